//! Parses a model's answer while it streams: reasoning, text for the user and tool calls.
//!
//! A [`Format`] says how a model writes these things; there is one for each of vLLM's tool parsers
//! and reasoning parsers that are known here, under vLLM's names. A [`Parser`] reads one answer. It
//! is given text in pieces, however they are cut, and tells a [`Sink`] of what it has understood:
//! what it tells does not depend on the pieces. No text is looked at more than a few times, so a
//! long answer takes time in proportion to its length.
//!
//! What a whole answer comes to is what vLLM's own parsers make of it as a whole;
//! `tests/goldens.rs` holds the two against each other and lists where they differ, with the
//! reasons.
//!
//! ```
//! use chiasm_parse::{Collected, Format, Parser, Tools};
//!
//! let format = Format::new(Some("hermes"), Some("qwen3")).unwrap();
//! let mut parser = Parser::new(&format, Tools::default().into(), format.start(None));
//! let mut answer = Collected::default();
//! for piece in ["Hm.</thi", "nk>\n\nI look.\n<tool", "_call>{\"name\": \"look\", \"arguments\": {\"at\": 1}}</tool_call>"] {
//!     parser.push(piece, &mut answer);
//! }
//! parser.finish(&mut answer);
//! assert_eq!((answer.reasoning.as_str(), answer.text.as_str()), ("Hm.", "\n\nI look."));
//! assert_eq!((answer.calls[0].name.as_str(), answer.calls[0].arguments.as_str()), ("look", r#"{"at": 1}"#));
//! ```
#![forbid(unsafe_code)]

mod calls;
mod detect;
mod format;
mod parser;
mod pending;
mod syntax;
mod table;
mod tag;
mod tools;

pub use detect::{Detected, detect};
pub use format::{Format, Start, UnknownParser, reasoning_parsers, tool_parsers};
pub use parser::Parser;
pub use tag::Function;
pub use tools::Tools;

/// Is told what an answer says, in its order. Calls follow each other: one has ended before the
/// next is told of.
pub trait Sink {
    /// More of what the model thinks.
    fn reasoning(&mut self, text: &str);
    /// More text for the user.
    fn text(&mut self, text: &str);
    /// A call begins. `id`: the call's identity, where the model itself gives one.
    fn call(&mut self, name: &str, id: Option<&str>);
    /// More of the JSON of the arguments of the call that began last. All of it together is an
    /// object, if the model writes one and does not break off.
    fn arguments(&mut self, json: &str);
    /// Ends the call that began last. Every call ends once, before the next call or text begins.
    fn end_call(&mut self, end: CallEnd);
}

/// The way a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// The format closed the call: its arguments are all there.
    Closed,
    /// The answer ended or broke the format before the call was closed: it must not be run.
    Unfinished,
}

impl CallEnd {
    /// Returns the end of several calls, of which `next` is the last: unfinished if one is, because
    /// clients run all calls of an answer or none.
    #[must_use]
    pub fn joined(before: Option<Self>, next: Self) -> Self {
        if before == Some(Self::Unfinished) { Self::Unfinished } else { next }
    }
}

/// An answer as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The reasoning.
    pub reasoning: String,
    /// The text for the user.
    pub text: String,
    /// The calls.
    pub calls: Vec<Call>,
}

/// A tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// The function's name.
    pub name: String,
    /// The call's identity, where the model itself gives one.
    pub id: Option<String>,
    /// Its arguments as JSON.
    pub arguments: String,
    /// The way it ended. `None` before that.
    pub end: Option<CallEnd>,
}

impl Sink for Collected {
    fn reasoning(&mut self, text: &str) {
        self.reasoning.push_str(text);
    }

    fn text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn call(&mut self, name: &str, id: Option<&str>) {
        self.calls.push(Call {
            name: name.to_owned(),
            id: id.map(str::to_owned),
            ..Call::default()
        });
    }

    fn arguments(&mut self, json: &str) {
        if let Some(call) = self.calls.last_mut() {
            call.arguments.push_str(json);
        }
    }

    fn end_call(&mut self, end: CallEnd) {
        if let Some(call) = self.calls.last_mut() {
            call.end = Some(end);
        }
    }
}
