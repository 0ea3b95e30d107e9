//! Readers of calls, one per syntax. `Parser` calls them for each piece of a stream.

pub(crate) mod braces;
pub(crate) mod json;
pub(crate) mod python;
mod python_literal;
pub(crate) mod section;
pub(crate) mod tagged;
mod value;

use crate::pending::Pending;
use crate::{Sink, Tools};

/// The result of a reader's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The reader needs more text.
    More,
    /// The calls are over. The pending text comes after them.
    Over,
    /// The text only looked like a call. None of it was consumed.
    NotACall,
}

/// A reader of the calls that begin with one marker.
#[derive(Clone, Debug)]
pub(crate) enum Reader {
    Json(json::Reader),
    Section(section::Reader),
    Tagged(tagged::Reader),
    Python(python::Reader),
    Braces(braces::Reader),
}

impl Reader {
    /// Reads the pending text as far as possible. `is_last` is `true` if no more text follows.
    pub(crate) fn read(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        tools: &Tools,
        sink: &mut dyn Sink,
    ) -> Step {
        match self {
            Self::Json(reader) => reader.read(pending, is_last, sink),
            Self::Section(reader) => reader.read(pending, is_last, sink),
            Self::Tagged(reader) => reader.read(pending, is_last, tools, sink),
            Self::Python(reader) => reader.read(pending, is_last, sink),
            Self::Braces(reader) => reader.read(pending, is_last, tools, sink),
        }
    }
}
