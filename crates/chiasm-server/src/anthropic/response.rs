//! Whole answers, and what answers and events share.

use chiasm_backend::{Finish, RequestId, ToolCallDelta};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::openai::Usage;
use crate::pipeline::FinishedChoice;

/// Id and model of one answer.
#[derive(Clone, Debug)]
pub(super) struct Head {
    id: String,
    model: String,
}

impl Head {
    pub(super) fn new(request: &RequestId, model: &str) -> Self {
        Self { id: format!("msg_{request}"), model: model.to_owned() }
    }

    /// A message with this in it.
    pub(super) fn message<'a>(&'a self, content: Vec<Block<'a>>, ending: Ending<'a>, usage: Usage) -> Message<'a> {
        let (kind, role, usage) = ("message", "assistant", UsageBody::from(usage));
        Message { id: &self.id, kind, role, model: &self.model, content, ending, usage }
    }
}

/// The model's message.
#[derive(Debug, Serialize)]
pub(super) struct Message<'a> {
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

/// A block of what the model says.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Block<'a> {
    Text { text: &'a str },
    Thinking { thinking: &'a str, signature: String },
    ToolUse { id: &'a str, name: &'a str, input: Map<String, Value> },
}

/// Why a message ended; both are null until it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Ending<'a> {
    pub(super) stop_reason: Option<&'static str>,
    pub(super) stop_sequence: Option<&'a str>,
}

impl<'a> Ending<'a> {
    /// The end of an answer, whose last call has these arguments if it has any calls. Calls win over a stop sequence unless it
    /// cut the last one short, which must not run then.
    pub(super) fn of(finish: &'a Finish, last_call: Option<&str>) -> Self {
        let is_whole = |arguments: &str| serde_json::from_str::<Value>(arguments).is_ok();
        let stop_reason = match finish {
            Finish::Length => Some("max_tokens"),
            // As in vLLM: Anthropic has no word for it.
            Finish::Repetition => None,
            Finish::StopString(stop) if !last_call.is_some_and(is_whole) => {
                return Self { stop_reason: Some("stop_sequence"), stop_sequence: Some(stop) };
            }
            _ if last_call.is_some() || *finish == Finish::ToolCalls => Some("tool_use"),
            _ => Some("end_turn"),
        };
        Self { stop_reason, stop_sequence: None }
    }
}

/// Token counts in Anthropic's words: what was read from a cache or written to it is no input.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct UsageBody {
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

/// What clients must give back with thinking, and nobody looks at here.
pub(super) fn signature() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// The whole answer. One that says nothing has an empty text: clients take the first block for granted.
pub(super) fn whole<'a>(head: &'a Head, choice: &'a FinishedChoice, usage: Usage) -> Message<'a> {
    let mut content = Vec::with_capacity(2 + choice.tool_calls.len());
    if !choice.reasoning.is_empty() {
        content.push(Block::Thinking { thinking: &choice.reasoning, signature: signature() });
    }
    if !choice.text.is_empty() || (content.is_empty() && choice.tool_calls.is_empty()) {
        content.push(Block::Text { text: &choice.text });
    }
    content.extend(choice.tool_calls.iter().map(tool_use));
    let last_call = choice.tool_calls.last().map(|call| call.arguments.as_str());
    head.message(content, Ending::of(&choice.finish, last_call), usage)
}

/// A call. Its input is an object even if what the model wrote is none.
fn tool_use(call: &ToolCallDelta) -> Block<'_> {
    let input = serde_json::from_str(&call.arguments).unwrap_or_default();
    Block::ToolUse { id: call.id.as_deref().unwrap_or_default(), name: call.name.as_deref().unwrap_or_default(), input }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::pipeline::MediaTokens;

    const USAGE: Usage = Usage {
        prompt_tokens: 10,
        completion_tokens: 5,
        cached_tokens: 4,
        created_tokens: Some(3),
        media_tokens: MediaTokens { image: 0, video: 0, audio: 0 },
        reasoning_tokens: None,
    };

    fn call(index: usize, arguments: &str) -> ToolCallDelta {
        let (id, name) = (Some(format!("call{index}")), Some("f".to_owned()));
        ToolCallDelta { index, id, name, arguments: arguments.to_owned() }
    }

    fn told(text: &str, reasoning: &str, tool_calls: Vec<ToolCallDelta>, finish: Finish) -> Value {
        let (text, reasoning) = (text.to_owned(), reasoning.to_owned());
        let choice = FinishedChoice {
            text,
            reasoning,
            reasoning_tokens: 0,
            tokens: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            tool_calls,
            finish,
        };
        let head = Head::new(&RequestId::new("r").unwrap(), "m");
        serde_json::to_value(whole(&head, &choice, USAGE)).unwrap()
    }

    #[test]
    fn thinking_text_and_calls_are_blocks_in_this_order() {
        let calls = vec![call(0, r#"{"a": 1}"#), call(1, "{\"a\": ")];
        let mut answer = told("hello", "hm", calls, Finish::ToolCalls);
        let signature = answer["content"][0]["signature"].take();
        assert_eq!(signature.as_str().unwrap().len(), 32);
        let expected = json!({
            "id": "msg_r", "type": "message", "role": "assistant", "model": "m",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": null},
                {"type": "text", "text": "hello"},
                {"type": "tool_use", "id": "call0", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "call1", "name": "f", "input": {}},
            ],
            "stop_reason": "tool_use", "stop_sequence": null,
            "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3, "output_tokens": 5},
        });
        assert_eq!(answer, expected);
    }

    #[test]
    fn an_answer_without_words_has_an_empty_text_and_a_list_is_no_input() {
        assert_eq!(told("", "", vec![], Finish::Eos)["content"], json!([{"type": "text", "text": ""}]));
        assert_eq!(told("", "hm", vec![], Finish::Eos)["content"].as_array().unwrap().len(), 1);
        assert_eq!(told("", "", vec![call(0, "[1]")], Finish::Eos)["content"][0]["input"], json!({}));
    }

    #[test]
    fn every_end_has_its_reason() {
        let stop = || Finish::StopString("x".to_owned());
        for (finish, last_call, reason, sequence) in [
            (Finish::Eos, None, Some("end_turn"), None),
            (Finish::Eos, Some("{}"), Some("tool_use"), None),
            (Finish::ToolCalls, Some("{"), Some("tool_use"), None),
            (Finish::Length, Some("{}"), Some("max_tokens"), None),
            (Finish::Repetition, None, None, None),
            (stop(), None, Some("stop_sequence"), Some("x")),
            (stop(), Some("{\"a\""), Some("stop_sequence"), Some("x")),
            (stop(), Some("{}"), Some("tool_use"), None),
        ] {
            let expected = Ending { stop_reason: reason, stop_sequence: sequence };
            assert_eq!(Ending::of(&finish, last_call), expected, "{finish:?} {last_call:?}");
        }
    }
}
