//! The syntax of reasoning and calls: the types of the entries in the table of formats.

use crate::calls::{Reader, braces, json, python, section, tagged};
use crate::tag::TagForm;

/// The syntax of reasoning.
#[derive(Debug)]
pub(crate) struct Reasoning {
    /// The marker that begins reasoning; may be empty.
    pub(crate) open: &'static str,
    /// The marker that ends reasoning.
    pub(crate) close: &'static str,
    /// `true` if an answer begins within reasoning, without `open`.
    pub(crate) begins_inside: bool,
    /// `true` if reasoning may begin again in the text after it.
    pub(crate) may_follow_text: bool,
    /// `true` if a call ends reasoning.
    pub(crate) ends_at_calls: bool,
    /// `true` if a `close` without `open` is dropped from the text.
    pub(crate) drops_stray_ends: bool,
    /// `true` if white space at the end of reasoning is dropped.
    pub(crate) trims_end: bool,
    /// The text at the beginning of reasoning that is dropped; may be empty.
    pub(crate) label: &'static str,
    /// `true` if the model reasons when the request sets neither of the template's variables for
    /// it. `None` if no variable controls reasoning.
    pub(crate) thinks_by_default: Option<bool>,
    /// `true` if reasoning stays in the text, which begins with `open`.
    pub(crate) stays_in_text: bool,
}

/// The syntax of calls.
#[derive(Debug)]
pub(crate) struct Calls {
    /// The markers that begin calls, and the syntax after each of them.
    pub(crate) openings: &'static [(&'static str, Kind)],
    /// `true` if text after the calls is dropped.
    pub(crate) drops_later_text: bool,
    /// `true` if calls are only recognized when no text comes before them.
    pub(crate) must_come_first: bool,
    /// The structural tag that constrains an engine to these calls. `None` if xgrammar has none.
    pub(crate) tag: Option<&'static TagForm>,
}

/// The syntax after an opening marker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Json(&'static json::Form),
    Section(&'static section::Form),
    Tagged(&'static tagged::Form),
    /// The text before the list of calls, and the text after it.
    Python(&'static str, &'static str),
    Braces(&'static braces::Form),
    /// A marker without a meaning here. It is dropped.
    Dropped,
}

impl Kind {
    /// Creates a reader for this syntax.
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
