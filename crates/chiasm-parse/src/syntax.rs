//! How reasoning and calls are written: the entries of the table of formats.

use crate::calls::{Reader, braces, json, python, section, tagged};
use crate::tag::TagForm;

/// How reasoning is written.
#[derive(Debug)]
pub(crate) struct Reasoning {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
    /// An answer begins with it, without `open`.
    pub(crate) begins_inside: bool,
    /// It may begin again in the text behind it.
    pub(crate) may_follow_text: bool,
    /// Calls end it.
    pub(crate) ends_at_calls: bool,
    /// An end without a beginning is left out of text.
    pub(crate) drops_stray_ends: bool,
    /// White space at its end is left out.
    pub(crate) trims_end: bool,
    /// What it says of itself first, which is left out.
    pub(crate) label: &'static str,
    /// It is there if a variable of the template says so, and otherwise if this does. `None` if no
    /// variable decides of it.
    pub(crate) thinks_untold: Option<bool>,
    /// It stays in the text, which begins with `open`.
    pub(crate) stays_text: bool,
}

/// How calls are written.
#[derive(Debug)]
pub(crate) struct Calls {
    /// What they begin with, and who reads them from there.
    pub(crate) openings: &'static [(&'static str, Kind)],
    /// Text behind them is left out.
    pub(crate) are_last: bool,
    /// Behind text there are none.
    pub(crate) stand_alone: bool,
    /// How an engine holds an answer to them, if vLLM has a way.
    pub(crate) tag: Option<&'static TagForm>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Json(&'static json::Form),
    Section(&'static section::Form),
    Tagged(&'static tagged::Form),
    /// What stands before the list, and behind it.
    Python(&'static str, &'static str),
    Braces(&'static braces::Form),
    /// A marker that means nothing here.
    Dropped,
}

impl Kind {
    pub(crate) fn reader(self) -> Option<Reader> {
        Some(match self {
            Self::Json(form) => Reader::Json(json::Reader::new(form)),
            Self::Section(form) => Reader::Section(section::Reader::new(form)),
            Self::Tagged(form) => Reader::Tagged(tagged::Reader::new(form)),
            Self::Python(open, close) => Reader::Python(python::Reader::new(open, close)),
            Self::Braces(form) => Reader::Braces(braces::Reader::new(form)),
            Self::Dropped => return None,
        })
    }
}
