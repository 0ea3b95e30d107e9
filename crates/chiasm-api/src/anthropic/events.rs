//! Streamed answers: blocks one after another, each with a beginning, deltas and an end.

use bytes::Bytes;
use chiasm_backend::ToolCallDelta;
use chiasm_parse::CallEnd;
use chiasm_request::{AnswerEvent, ChoiceDelta};
use serde::Serialize;
use serde_json::Map;

use super::response::{Block, Ending, Head, Message, UsageBody, signature};
use crate::error::ApiError;
use crate::openai::Usage;

/// An event, whose name is the `type` of its body.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: Block<'a> },
    ContentBlockDelta { index: usize, delta: Delta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Ending<'a>, usage: UsageBody },
    MessageStop {},
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop {} => "message_stop",
        }
    }
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Delta<'a> {
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

/// The block that is being told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    Nothing,
    Thinking,
    Text,
    /// The call with this index.
    ToolUse(usize),
}

/// Turns the deltas of one continuation into events.
pub struct Events {
    open: Open,
    /// The index of the block that is open, or else of the next.
    index: usize,
    /// The way the calls ended; `None` before the first one's end.
    calls_end: Option<CallEnd>,
    /// The events that have not been sent yet.
    out: Vec<u8>,
}

impl Default for Events {
    /// Creates the writer of a continuation's events.
    fn default() -> Self {
        Self { open: Open::Nothing, index: 0, calls_end: None, out: Vec::new() }
    }
}

impl Events {
    /// The events of a delta, of which the last one needs the usage of all; `None` if it has none.
    pub fn of(&mut self, delta: &ChoiceDelta, usage: Usage) -> Option<Bytes> {
        for event in delta.events.iter() {
            match event {
                AnswerEvent::Reasoning(text) => {
                    self.enter(Open::Thinking, || Block::Thinking {
                        thinking: "",
                        signature: String::new(),
                    });
                    self.tell(Delta::Thinking { thinking: text });
                }
                AnswerEvent::Text(text) => {
                    self.enter(Open::Text, || Block::Text { text: "" });
                    self.tell(Delta::Text { text });
                }
                AnswerEvent::Call(piece) => self.call(piece),
                AnswerEvent::EndCall(end) => {
                    self.calls_end = Some(CallEnd::joined(self.calls_end, *end));
                    self.close();
                }
            }
        }
        if let Some(finish) = &delta.finish {
            self.close();
            if self.index == 0 {
                self.enter(Open::Text, || Block::Text { text: "" });
                self.close();
            }
            let ending = Ending::new(finish, self.calls_end);
            write(&mut self.out, &Event::MessageDelta { delta: ending, usage: usage.into() });
        }
        (!self.out.is_empty()).then(|| std::mem::take(&mut self.out).into())
    }

    fn call(&mut self, piece: &ToolCallDelta) {
        let block = Open::ToolUse(piece.index);
        if let (Some(id), Some(name)) = (&piece.id, &piece.name) {
            self.enter(block, || Block::ToolUse { id, name, input: Map::new() });
        }
        if self.open == block && !piece.arguments.is_empty() {
            self.tell(Delta::InputJson { partial_json: &piece.arguments });
        }
    }

    /// Begins a block, unless it is the one that is open.
    fn enter<'a>(&mut self, block: Open, content_block: impl FnOnce() -> Block<'a>) {
        if self.open != block {
            self.close();
            self.open = block;
            let content_block = content_block();
            write(&mut self.out, &Event::ContentBlockStart { index: self.index, content_block });
        }
    }

    fn tell(&mut self, delta: Delta<'_>) {
        write(&mut self.out, &Event::ContentBlockDelta { index: self.index, delta });
    }

    /// Ends the block that is open.
    fn close(&mut self) {
        if self.open == Open::Nothing {
            return;
        }
        if self.open == Open::Thinking {
            self.tell(Delta::Signature { signature: signature() });
        }
        write(&mut self.out, &Event::ContentBlockStop { index: self.index });
        self.open = Open::Nothing;
        self.index += 1;
    }
}

/// The first event: a message without content.
pub fn start(head: &Head, usage: Usage) -> Bytes {
    alone(&Event::MessageStart { message: head.message(Vec::new(), Ending::default(), usage) })
}

/// The last event.
pub fn stop() -> Bytes {
    alone(&Event::MessageStop {})
}

fn alone(event: &Event<'_>) -> Bytes {
    let mut out = Vec::new();
    write(&mut out, event);
    out.into()
}

fn write(out: &mut Vec<u8>, event: &Event<'_>) {
    out.extend_from_slice(format!("event: {}\ndata: ", event.name()).as_bytes());
    let begun = out.len();
    if let Err(error) = serde_json::to_writer(&mut *out, event) {
        out.truncate(begun);
        let error = ApiError::internal(format!("an event could not be written: {error}"));
        out.extend_from_slice(error.anthropic_body().to_string().as_bytes());
    }
    out.extend_from_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use chiasm_backend::{Finish, RequestId};
    use chiasm_request::MediaTokens;
    use serde_json::{Value, json};

    use super::*;
    use crate::stream_end::StreamApi;

    const USAGE: Usage = Usage {
        prompt_tokens: 10,
        completion_tokens: 5,
        cached_tokens: 4,
        created_tokens: Some(3),
        media_tokens: MediaTokens { image: 0, video: 0, audio: 0 },
        reasoning_tokens: None,
    };

    fn parsed(bytes: &[u8]) -> Vec<Value> {
        let parse = |event: &str| {
            let (name, data) =
                event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
            let body: Value = serde_json::from_str(data).unwrap();
            assert_eq!(body["type"], name);
            body
        };
        str::from_utf8(bytes).unwrap().split_terminator("\n\n").map(parse).collect()
    }

    /// The events of these deltas, without what is random.
    fn told(deltas: Vec<ChoiceDelta>) -> Vec<Value> {
        let mut events = Events::default();
        let told = deltas.iter().filter_map(|delta| events.of(delta, USAGE));
        let mut told: Vec<Value> = told.flat_map(|bytes| parsed(&bytes)).collect();
        for signature in told.iter_mut().filter_map(|event| event.pointer_mut("/delta/signature")) {
            assert_eq!(signature.as_str().unwrap().len(), 32);
            *signature = Value::Null;
        }
        told
    }

    fn said(events: impl IntoIterator<Item = AnswerEvent>) -> ChoiceDelta {
        let mut delta = ChoiceDelta::default();
        events.into_iter().for_each(|event| delta.events.push(event));
        delta
    }

    fn text(text: &str) -> AnswerEvent {
        AnswerEvent::Text(text.to_owned())
    }

    fn reasoning(text: &str) -> AnswerEvent {
        AnswerEvent::Reasoning(text.to_owned())
    }

    fn call(index: usize, arguments: &str) -> AnswerEvent {
        let id = Some(format!("call{index}"));
        let name = Some("f".to_owned());
        AnswerEvent::Call(ToolCallDelta { index, id, name, arguments: arguments.to_owned() })
    }

    fn more(index: usize, arguments: &str) -> AnswerEvent {
        AnswerEvent::Call(ToolCallDelta {
            index,
            arguments: arguments.to_owned(),
            ..ToolCallDelta::default()
        })
    }

    fn closed() -> AnswerEvent {
        AnswerEvent::EndCall(CallEnd::Closed)
    }

    fn end(finish: Finish) -> ChoiceDelta {
        ChoiceDelta { finish: Some(finish), ..ChoiceDelta::default() }
    }

    fn begins(index: usize, content_block: Value) -> Value {
        json!({"type": "content_block_start", "index": index, "content_block": content_block})
    }

    fn adds(index: usize, delta: Value) -> Value {
        json!({"type": "content_block_delta", "index": index, "delta": delta})
    }

    fn ends(index: usize) -> Value {
        json!({"type": "content_block_stop", "index": index})
    }

    fn message_delta(reason: &str) -> Value {
        json!({
            "type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": null},
            "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3, "output_tokens": 5},
        })
    }

    #[test]
    fn thinking_text_and_two_calls_are_four_blocks() {
        let told = told(vec![
            said([reasoning("h")]),
            said([reasoning("m"), text("so")]),
            said([]),
            said([call(0, ""), more(0, "{\"a\"")]),
            said([more(0, ": 1}"), closed(), call(1, "{}"), closed()]),
            end(Finish::ToolCalls),
        ]);
        let tool = |id: &str| json!({"type": "tool_use", "id": id, "name": "f", "input": {}});
        let expected = [
            begins(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
            adds(0, json!({"type": "thinking_delta", "thinking": "h"})),
            adds(0, json!({"type": "thinking_delta", "thinking": "m"})),
            adds(0, json!({"type": "signature_delta", "signature": null})),
            ends(0),
            begins(1, json!({"type": "text", "text": ""})),
            adds(1, json!({"type": "text_delta", "text": "so"})),
            ends(1),
            begins(2, tool("call0")),
            adds(2, json!({"type": "input_json_delta", "partial_json": "{\"a\""})),
            adds(2, json!({"type": "input_json_delta", "partial_json": ": 1}"})),
            ends(2),
            begins(3, tool("call1")),
            adds(3, json!({"type": "input_json_delta", "partial_json": "{}"})),
            ends(3),
            message_delta("tool_use"),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn delta_across_blocks_keeps_event_order() {
        let told = told(vec![
            said([call(0, "{")]),
            said([more(0, "}"), closed(), text("and")]),
            said([text(" so"), reasoning("hm"), call(1, "{}"), closed()]),
            end(Finish::ToolCalls),
        ]);
        let expected = [
            adds(0, json!({"type": "input_json_delta", "partial_json": "}"})),
            ends(0),
            begins(1, json!({"type": "text", "text": ""})),
            adds(1, json!({"type": "text_delta", "text": "and"})),
            adds(1, json!({"type": "text_delta", "text": " so"})),
            ends(1),
            begins(2, json!({"type": "thinking", "thinking": "", "signature": ""})),
            adds(2, json!({"type": "thinking_delta", "thinking": "hm"})),
            adds(2, json!({"type": "signature_delta", "signature": null})),
            ends(2),
            begins(3, json!({"type": "tool_use", "id": "call1", "name": "f", "input": {}})),
            adds(3, json!({"type": "input_json_delta", "partial_json": "{}"})),
            ends(3),
            message_delta("tool_use"),
        ];
        assert_eq!(told[2..], expected);
    }

    #[test]
    fn unfinished_call_does_not_end_with_tool_use() {
        let cut = said([call(0, "{\"a\""), AnswerEvent::EndCall(CallEnd::Unfinished)]);
        let told = told(vec![cut, end(Finish::Eos)]);
        assert_eq!(told.last(), Some(&message_delta("end_turn")));
    }

    #[test]
    fn an_answer_without_words_is_an_empty_text() {
        let expected =
            [begins(0, json!({"type": "text", "text": ""})), ends(0), message_delta("end_turn")];
        assert_eq!(told(vec![said([]), end(Finish::Eos)]), expected);
        assert!(Events::default().of(&said([]), USAGE).is_none());
    }

    #[test]
    fn a_stream_begins_and_ends_with_its_message() {
        let head = Head::new(&RequestId::new("r").unwrap(), "m");
        let message = json!({
            "id": "msg_r", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": null,
            "stop_sequence": null, "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3, "output_tokens": 0},
        });
        let begun = start(&head, Usage { completion_tokens: 0, ..USAGE });
        assert_eq!(parsed(&begun), [json!({"type": "message_start", "message": message})]);
        assert_eq!(stop(), "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
        let mut failed = Vec::new();
        StreamApi::Messages.write_failure(&mut failed, &ApiError::internal("gone"), 0);
        let error = json!({"type": "error", "error": {"type": "api_error", "message": "gone"}});
        assert_eq!(parsed(&failed), [error]);
    }
}
