//! Conversion of a parameter's value from text to JSON.

use serde_json::Value as Json;

use crate::Sink;
use crate::tools::{Types, json_may_begin_with, quoted};

/// The size of held text up to which its type is checked with every piece. Longer text is checked
/// each time its size has doubled, so that the time for a value is linear.
const EAGER_CHECK_BYTES: usize = 64;

/// A value that a format writes as text.
///
/// Text is streamed once nothing that follows can turn the value into a number, an object or
/// another type that its schema allows. Other values are emitted whole.
#[derive(Clone, Debug)]
pub(super) struct Value {
    /// The possible types. `None` if they are unknown.
    types: Option<Types>,
    /// `true` if the format declares that the value is JSON.
    is_json: bool,
    /// `true` if one line break at each end of the text is not part of the value.
    trims_lines: bool,
    /// Text that was not emitted yet.
    held: String,
    /// The size of `held`, in bytes, at which its type is checked next.
    next_check: usize,
    /// `true` if the value is text and its opening quote was emitted.
    is_text: bool,
}

impl Value {
    pub(super) fn new(types: Option<Types>, is_json: bool, trims_lines: bool) -> Self {
        Self { types, is_json, trims_lines, held: String::new(), next_check: 1, is_text: false }
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

    /// Ends the value and emits the rest of it.
    pub(super) fn end(&mut self, sink: &mut dyn Sink) {
        if self.is_text {
            // At most a line break is held, which belongs to the format.
            return sink.arguments("\"");
        }
        let text = self.without_line_breaks();
        sink.arguments(&self.to_json(text));
    }

    /// Emits the opening quote if the value is text, whatever follows. Returns `true` in that case.
    fn becomes_text(&mut self, sink: &mut dyn Sink) -> bool {
        if self.held.len() < self.next_check {
            return false;
        }
        if self.held.len() >= EAGER_CHECK_BYTES {
            self.next_check = self.held.len() * 2;
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
        let text = self.without_line_breaks();
        let may_be_json = self.is_json && json_may_begin_with(text);
        !may_be_json && self.types.is_none_or(|types| types.allow_only_text_after(text))
    }

    /// Returns the held text without the format's line breaks.
    fn without_line_breaks(&self) -> &str {
        if !self.trims_lines {
            return &self.held;
        }
        let text = self.held.strip_prefix('\n').unwrap_or(&self.held);
        text.strip_suffix('\n').unwrap_or(text)
    }

    fn to_json(&self, text: &str) -> String {
        let json = if self.is_json { serde_json::from_str(text).ok() } else { None };
        match (json, self.types) {
            (Some(Json::Array(_) | Json::Object(_)), _) | (Some(_), None) => text.trim().to_owned(),
            (Some(Json::String(text)), Some(types)) => types.to_json(&text),
            (_, types) => types.unwrap_or(Types::STRING).to_json(text),
        }
    }
}

/// Returns the JSON of a string without its quotes.
pub(super) fn inside_quotes(json: &str) -> &str {
    &json[1..json.len() - 1]
}
