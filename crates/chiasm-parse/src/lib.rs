//! Parses a model's answer while it streams: reasoning, text for the user and tool calls.
//!
//! A [`Format`] describes the syntax in which a model writes reasoning and calls. Formats have the
//! names of the vLLM tool parsers and reasoning parsers that read them.
//!
//! A [`Parser`] reads one answer. It accepts text in pieces of any size and emits the parsed parts
//! to a [`Sink`]. The piece boundaries do not affect the result. Each byte is scanned a bounded
//! number of times, so parsing takes time linear in the length of the answer.
//!
//! The result for a whole answer equals that of vLLM's own parsers. `tests/goldens.rs` compares the
//! two; `tests/goldens/differences.txt` lists the differences and their reasons.
//!
//! ```
//! use chiasm_parse::{Collected, Format, Parser, Tools};
//!
//! let format = Format::new(Some("hermes"), Some("qwen3")).unwrap();
//! let mut parser = Parser::new(&format, Tools::default().into(), format.start(None));
//! let mut answer = Collected::default();
//! for piece in [
//!     "Hm.</thi",
//!     "nk>\n\nI look.\n<tool",
//!     "_call>{\"name\": \"look\", \"arguments\": {\"at\": 1}}</tool_call>",
//! ] {
//!     parser.push(piece, &mut answer);
//! }
//! parser.finish(&mut answer);
//! assert_eq!(answer.reasoning, "Hm.");
//! assert_eq!(answer.text, "\n\nI look.");
//! assert_eq!(answer.calls[0].name, "look");
//! assert_eq!(answer.calls[0].arguments, r#"{"at": 1}"#);
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

/// A receiver of the parts of an answer, in their order.
///
/// Calls never overlap: each one ends before the next one begins.
pub trait Sink {
    /// Receives more reasoning.
    fn reasoning(&mut self, text: &str);
    /// Receives more text for the user.
    fn text(&mut self, text: &str);
    /// Begins a call. `id` is the call's id in formats in which the model writes one.
    fn call(&mut self, name: &str, id: Option<&str>);
    /// Receives more JSON of the current call's arguments. The pieces of a call add up to a JSON
    /// object, unless the model writes something else or the call is unfinished.
    fn arguments(&mut self, json: &str);
    /// Ends the current call. Each call ends exactly once, before the next call or text begins.
    fn end_call(&mut self, end: CallEnd);
}

/// The way a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallEnd {
    /// The format closed the call, so its arguments are complete.
    Closed,
    /// The answer ended or broke the format before the call was closed. The call must not be run.
    Unfinished,
}

impl CallEnd {
    /// Combines the ends of several calls: `previous` of the calls so far, and `next` of the next
    /// one. The result is unfinished if any call is, because clients run all calls of an answer or
    /// none.
    #[must_use]
    pub fn combine(previous: Option<Self>, next: Self) -> Self {
        if previous == Some(Self::Unfinished) { Self::Unfinished } else { next }
    }
}

/// A [`Sink`] that collects a whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// The reasoning.
    pub reasoning: String,
    /// The text for the user.
    pub text: String,
    /// The tool calls.
    pub calls: Vec<Call>,
}

/// A tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// The function's name.
    pub name: String,
    /// The call's id in formats in which the model writes one.
    pub id: Option<String>,
    /// The arguments as JSON.
    pub arguments: String,
    /// The way the call ended. `None` while it is still open.
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
