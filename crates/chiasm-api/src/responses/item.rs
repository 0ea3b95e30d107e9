//! The items of a response's output.

use serde::{Serialize, Serializer};

use super::custom_input::InputReader;
use super::logprobs::TokenJson;

/// The progress of an item or a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    InProgress,
    Completed,
    /// The item or the response was cut off.
    Incomplete,
    /// The response failed. Items never have this status.
    Failed,
}

/// One item of the output.
#[derive(Debug)]
pub struct Item {
    pub id: String,
    /// The item's position in the output.
    pub index: usize,
    pub(crate) kind: Kind,
    pub(crate) status: Status,
    /// The reasoning, the text, a call's arguments or a custom tool's input.
    pub text: String,
    /// The tokens of a message's text, if their log probabilities are wanted.
    pub(crate) logprobs: Vec<TokenJson>,
}

/// The kind of an item.
#[derive(Debug, PartialEq)]
pub(crate) enum Kind {
    Reasoning,
    Message,
    Call {
        call_id: String,
        name: String,
        namespace: Option<String>,
        /// The reader of a custom tool's input.
        input: Option<InputReader>,
    },
}

impl Item {
    /// Returns `true` for a call that was cut off.
    pub(super) fn is_unfinished_call(&self) -> bool {
        matches!(self.kind, Kind::Call { .. }) && self.status == Status::Incomplete
    }

    /// Returns the only part of the item's content; a call has none.
    pub(super) fn part(&self) -> Option<Part<'_>> {
        let Self { text, logprobs, .. } = self;
        match self.kind {
            Kind::Reasoning => Some(Part::ReasoningText { text }),
            Kind::Message => Some(Part::OutputText { text, annotations: [], logprobs }),
            Kind::Call { .. } => None,
        }
    }
}

/// A part of an item's content.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Part<'a> {
    ReasoningText { text: &'a str },
    OutputText { text: &'a str, annotations: [(); 0], logprobs: &'a [TokenJson] },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Body<'a> {
    Reasoning {
        id: &'a str,
        summary: [(); 0],
        content: Vec<Part<'a>>,
        status: Status,
    },
    Message {
        id: &'a str,
        role: &'static str,
        content: Vec<Part<'a>>,
        status: Status,
    },
    FunctionCall {
        id: &'a str,
        call_id: &'a str,
        #[serde(flatten)]
        called: ToolName<'a>,
        arguments: &'a str,
        status: Status,
    },
    CustomToolCall {
        id: &'a str,
        call_id: &'a str,
        #[serde(flatten)]
        called: ToolName<'a>,
        input: &'a str,
        status: Status,
    },
}

/// The client's name of a tool.
#[derive(Serialize)]
struct ToolName<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a str>,
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self { id, kind, status, text, .. } = self;
        let status = *status;
        // An item starts without its part, which has an event of its own.
        let content: Vec<_> =
            self.part().filter(|_| status != Status::InProgress).into_iter().collect();
        match kind {
            Kind::Reasoning => Body::Reasoning { id, summary: [], content, status }.serialize(to),
            Kind::Message => Body::Message { id, role: "assistant", content, status }.serialize(to),
            Kind::Call { call_id, name, namespace, input, .. } => {
                let called = ToolName { name, namespace: namespace.as_deref() };
                match input {
                    Some(_) => Body::CustomToolCall { id, call_id, called, input: text, status }
                        .serialize(to),
                    None => Body::FunctionCall { id, call_id, called, arguments: text, status }
                        .serialize(to),
                }
            }
        }
    }
}
