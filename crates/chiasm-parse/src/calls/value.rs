//! A parameter's value that a format writes as text, on its way to JSON.

use serde_json::Value as Json;

use crate::Sink;
use crate::tools::{Types, json_may_begin_with, quoted};

/// Text up to this size is looked at again with every piece, longer text each time it has doubled:
/// a long answer takes time in proportion to its length.
const LOOKED_AT_BYTES: usize = 64;

/// A value that was written as text.
///
/// Text is passed on as it grows, once no more of it can make the value a number, an object or
/// anything else that its type allows. Other values are passed on when they are whole.
#[derive(Clone, Debug)]
pub(super) struct Value {
    /// Its possible types. `None` if they are unknown.
    types: Option<Types>,
    /// The format says that it is JSON.
    is_json: bool,
    /// A line break at its beginning and one at its end belong to the format.
    trims_lines: bool,
    /// Text that is not passed on yet.
    held: String,
    /// The size of `held` at which it is looked at again.
    looks_at: usize,
    /// It is text, and its opening quote is passed on.
    is_text: bool,
}

impl Value {
    pub(super) fn new(types: Option<Types>, is_json: bool, trims_lines: bool) -> Self {
        Self { types, is_json, trims_lines, held: String::new(), looks_at: 1, is_text: false }
    }

    /// Takes the next piece of the value.
    pub(super) fn push(&mut self, text: &str, sink: &mut dyn Sink) {
        self.held.push_str(text);
        if !self.is_text && !self.becomes_text(sink) {
            return;
        }
        let kept = usize::from(self.trims_lines && self.held.ends_with('\n'));
        let end = self.held.len() - kept;
        if end > 0 {
            sink.arguments(inside_quotes(&quoted(&self.held[..end])));
            self.held.drain(..end);
        }
    }

    /// Ends the value and passes on what is left of it.
    pub(super) fn end(&mut self, sink: &mut dyn Sink) {
        if self.is_text {
            // What is held is the line break before the end.
            return sink.arguments("\"");
        }
        let text = self.without_lines();
        sink.arguments(&self.read(text));
    }

    /// Passes on the opening quote, if the value is text whatever follows.
    fn becomes_text(&mut self, sink: &mut dyn Sink) -> bool {
        if self.held.len() < self.looks_at {
            return false;
        }
        if self.held.len() >= LOOKED_AT_BYTES {
            self.looks_at = self.held.len() * 2;
        }
        if !self.is_surely_text() {
            return false;
        }
        if self.trims_lines && self.held.starts_with('\n') {
            self.held.remove(0);
        }
        sink.arguments("\"");
        self.is_text = true;
        true
    }

    fn is_surely_text(&self) -> bool {
        let text = self.without_lines();
        let is_no_json = !self.is_json || !json_may_begin_with(text);
        is_no_json && self.types.is_none_or(|types| types.are_text_behind(text))
    }

    fn without_lines(&self) -> &str {
        if !self.trims_lines {
            return &self.held;
        }
        let text = self.held.strip_prefix('\n').unwrap_or(&self.held);
        text.strip_suffix('\n').unwrap_or(text)
    }

    fn read(&self, text: &str) -> String {
        let json = if self.is_json { serde_json::from_str(text).ok() } else { None };
        match (json, self.types) {
            (Some(Json::Array(_) | Json::Object(_)), _) | (Some(_), None) => text.trim().to_owned(),
            (Some(Json::String(text)), Some(types)) => types.read(&text),
            (_, types) => types.unwrap_or(Types::STRING).read(text),
        }
    }
}

/// Returns a string's JSON without its quotes.
pub(super) fn inside_quotes(json: &str) -> &str {
    &json[1..json.len() - 1]
}
