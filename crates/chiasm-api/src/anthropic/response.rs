//! Whole answers, and the types that answers and events share.

use chiasm_backend::{Finish, RequestId, ToolCallDelta};
use chiasm_parse::CallEnd;
use chiasm_request::{AnswerEvent, FinishedChoice};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::openai::Usage;

/// The id and the model of an answer.
#[derive(Clone, Debug)]
pub struct Head {
    id: String,
    model: String,
}

impl Head {
    /// Creates the head of an answer. `model` is the client's name for the model.
    pub fn new(request: &RequestId, model: &str) -> Self {
        Self { id: format!("msg_{request}"), model: model.to_owned() }
    }

    /// Returns a message with this content.
    pub fn message<'a>(
        &'a self,
        content: Vec<Block<'a>>,
        ending: Ending<'a>,
        usage: Usage,
    ) -> Message<'a> {
        Message {
            id: &self.id,
            kind: "message",
            role: "assistant",
            model: &self.model,
            content,
            ending,
            usage: usage.into(),
        }
    }
}

/// The model's message.
#[derive(Debug, Serialize)]
pub struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block<'a>>,
    #[serde(flatten)]
    ending: Ending<'a>,
    usage: UsageBody,
}

/// A block of the model's message.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block<'a> {
    /// Text for the user.
    Text {
        /// The text.
        text: &'a str,
    },
    /// Reasoning.
    Thinking {
        /// The text.
        thinking: &'a str,
        /// A random value that clients send back with the block; it is not used here.
        signature: String,
    },
    /// A call.
    ToolUse {
        /// The call's id.
        id: &'a str,
        /// The function's name.
        name: &'a str,
        /// The arguments.
        input: Map<String, Value>,
    },
}

/// The reason for the end of a message; both fields are null until the message has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ending<'a> {
    /// Anthropic's name of the reason.
    pub stop_reason: Option<&'static str>,
    /// The stop string that ended the text, if one did.
    pub stop_sequence: Option<&'a str>,
}

impl<'a> Ending<'a> {
    /// Creates the end of an answer. `calls_end` is the end of its calls, if there are any.
    ///
    /// Closed calls have priority over a stop sequence. An answer with an unfinished call never has
    /// the reason `tool_use`, because clients would run that call, too.
    pub fn new(finish: &'a Finish, calls_end: Option<CallEnd>) -> Self {
        let has_calls = calls_end == Some(CallEnd::Closed);
        let stop_reason = match finish {
            Finish::Length => Some("max_tokens"),
            // As in vLLM: Anthropic has no name for this reason.
            Finish::Repetition => None,
            Finish::StopString(stop) if !has_calls => {
                return Self { stop_reason: Some("stop_sequence"), stop_sequence: Some(stop) };
            }
            Finish::ToolCalls => Some("tool_use"),
            Finish::Eos | Finish::StopToken(_) | Finish::StopString(_) if has_calls => {
                Some("tool_use")
            }
            Finish::Eos | Finish::StopToken(_) | Finish::StopString(_) => Some("end_turn"),
        };
        Self { stop_reason, stop_sequence: None }
    }
}

/// Token counts in Anthropic's terms: input tokens exclude those read from or written to a cache.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct UsageBody {
    input_tokens: usize,
    cache_read_input_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_creation_input_tokens: Option<usize>,
    output_tokens: usize,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        let cached = usage.cached_tokens.saturating_add(usage.created_tokens.unwrap_or(0));
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(cached),
            cache_read_input_tokens: usage.cached_tokens,
            cache_creation_input_tokens: usage.created_tokens,
            output_tokens: usage.completion_tokens,
        }
    }
}

/// Returns the signature that clients must send back with thinking. It is never checked here.
pub fn signature() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// Returns a whole answer, with a block for each reasoning, text and call. An answer without events
/// has a block with an empty text, because clients expect a first block.
pub fn whole_message<'a>(head: &'a Head, choice: &'a FinishedChoice, usage: Usage) -> Message<'a> {
    let mut content = Vec::new();
    let mut calls_end = None;
    for event in choice.events.iter() {
        match event {
            AnswerEvent::Reasoning(text) => {
                content.push(Block::Thinking { thinking: text, signature: signature() })
            }
            AnswerEvent::Text(text) => content.push(Block::Text { text }),
            AnswerEvent::Call(call) => content.push(tool_use(call)),
            AnswerEvent::EndCall(end) => calls_end = Some(CallEnd::combine(calls_end, *end)),
        }
    }
    if content.is_empty() {
        content.push(Block::Text { text: "" });
    }
    head.message(content, Ending::new(&choice.finish, calls_end), usage)
}

/// Returns the block of a call. The input is an empty object if the model's arguments are not an
/// object.
fn tool_use(call: &ToolCallDelta) -> Block<'_> {
    let input = serde_json::from_str(&call.arguments).unwrap_or_default();
    Block::ToolUse {
        id: call.id.as_deref().unwrap_or_default(),
        name: call.name.as_deref().unwrap_or_default(),
        input,
    }
}

#[cfg(test)]
mod tests {
    use chiasm_request::{AnswerEvents, MediaTokens};
    use serde_json::json;

    use super::*;

    const USAGE: Usage = Usage {
        prompt_tokens: 10,
        completion_tokens: 5,
        cached_tokens: 4,
        created_tokens: Some(3),
        media_tokens: MediaTokens { image: 0, video: 0, audio: 0 },
        reasoning_tokens: None,
    };

    fn call(index: usize, arguments: &str) -> AnswerEvent {
        let id = Some(format!("call{index}"));
        let name = Some("f".to_owned());
        AnswerEvent::Call(ToolCallDelta { index, id, name, arguments: arguments.to_owned() })
    }

    fn text(text: &str) -> AnswerEvent {
        AnswerEvent::Text(text.to_owned())
    }

    fn reasoning(text: &str) -> AnswerEvent {
        AnswerEvent::Reasoning(text.to_owned())
    }

    fn ends(end: CallEnd) -> AnswerEvent {
        AnswerEvent::EndCall(end)
    }

    fn message(events: impl IntoIterator<Item = AnswerEvent>, finish: Finish) -> Value {
        let mut all = AnswerEvents::default();
        events.into_iter().for_each(|event| all.push(event));
        let choice = FinishedChoice {
            events: all,
            reasoning_tokens: 0,
            tokens: Vec::new(),
            logprobs: None,
            text_logprobs: Vec::new(),
            prompt_logprobs: None,
            finish,
        };
        let head = Head::new(&RequestId::new("r").unwrap(), "m");
        serde_json::to_value(whole_message(&head, &choice, USAGE)).unwrap()
    }

    #[test]
    fn blocks_have_the_order_of_the_text() {
        let events = [
            reasoning("hm"),
            text("hello"),
            call(0, r#"{"a": 1}"#),
            ends(CallEnd::Closed),
            text("then"),
            call(1, "{\"a\": "),
            ends(CallEnd::Unfinished),
        ];
        let mut answer = message(events, Finish::Eos);
        let signature = answer["content"][0]["signature"].take();
        assert_eq!(signature.as_str().unwrap().len(), 32);
        let expected = json!({
            "id": "msg_r", "type": "message", "role": "assistant", "model": "m",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": null},
                {"type": "text", "text": "hello"},
                {"type": "tool_use", "id": "call0", "name": "f", "input": {"a": 1}},
                {"type": "text", "text": "then"},
                {"type": "tool_use", "id": "call1", "name": "f", "input": {}},
            ],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": 3,
                "cache_read_input_tokens": 4,
                "cache_creation_input_tokens": 3,
                "output_tokens": 5,
            },
        });
        assert_eq!(answer, expected);
    }

    #[test]
    fn missing_text_or_input_becomes_empty() {
        assert_eq!(message([], Finish::Eos)["content"], json!([{"type": "text", "text": ""}]));
        assert_eq!(message([reasoning("hm")], Finish::Eos)["content"].as_array().unwrap().len(), 1);
        assert_eq!(message([call(0, "[1]")], Finish::Eos)["content"][0]["input"], json!({}));
    }

    #[test]
    fn stop_reason_depends_on_finish_of_calls() {
        let stop = || Finish::StopString("x".to_owned());
        let closed = Some(CallEnd::Closed);
        let unfinished = Some(CallEnd::Unfinished);
        for (finish, calls_end, reason, sequence) in [
            (Finish::Eos, None, Some("end_turn"), None),
            (Finish::Eos, closed, Some("tool_use"), None),
            (Finish::Eos, unfinished, Some("end_turn"), None),
            (Finish::ToolCalls, closed, Some("tool_use"), None),
            (Finish::Length, closed, Some("max_tokens"), None),
            (Finish::Length, unfinished, Some("max_tokens"), None),
            (Finish::Repetition, None, None, None),
            (stop(), None, Some("stop_sequence"), Some("x")),
            (stop(), unfinished, Some("stop_sequence"), Some("x")),
            (stop(), closed, Some("tool_use"), None),
        ] {
            let expected = Ending { stop_reason: reason, stop_sequence: sequence };
            assert_eq!(Ending::new(&finish, calls_end), expected, "{finish:?} {calls_end:?}");
        }
    }
}
