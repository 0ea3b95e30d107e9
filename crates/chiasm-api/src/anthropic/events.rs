//! Streamed answers: consecutive blocks, each with a start, deltas and a stop.

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

/// The block in progress.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OpenBlock {
    None,
    Thinking,
    Text,
    /// The call with this index.
    ToolUse(usize),
}

/// The events of one continuation, converted from its deltas.
pub struct Events {
    open: OpenBlock,
    /// The index of the open block, or of the next one if no block is open.
    index: usize,
    /// The combined end of the calls; `None` until the first call has ended.
    calls_end: Option<CallEnd>,
    /// The events that have not been returned yet.
    out: Vec<u8>,
}

impl Default for Events {
    /// Creates the writer of a continuation's events.
    fn default() -> Self {
        Self { open: OpenBlock::None, index: 0, calls_end: None, out: Vec::new() }
    }
}

impl Events {
    /// Converts a delta to events; `None` if there are none. The last delta's events contain
    /// `usage`.
    pub fn push(&mut self, delta: &ChoiceDelta, usage: Usage) -> Option<Bytes> {
        for event in delta.events.iter() {
            match event {
                AnswerEvent::Reasoning(text) => {
                    self.enter(OpenBlock::Thinking, || Block::Thinking {
                        thinking: "",
                        signature: String::new(),
                    });
                    self.write_delta(Delta::Thinking { thinking: text });
                }
                AnswerEvent::Text(text) => {
                    self.enter(OpenBlock::Text, || Block::Text { text: "" });
                    self.write_delta(Delta::Text { text });
                }
                AnswerEvent::Call(piece) => self.push_call(piece),
                AnswerEvent::EndCall(end) => {
                    self.calls_end = Some(CallEnd::combine(self.calls_end, *end));
                    self.close();
                }
            }
        }
        if let Some(finish) = &delta.finish {
            self.close();
            if self.index == 0 {
                self.enter(OpenBlock::Text, || Block::Text { text: "" });
                self.close();
            }
            let ending = Ending::new(finish, self.calls_end);
            write(&mut self.out, &Event::MessageDelta { delta: ending, usage: usage.into() });
        }
        (!self.out.is_empty()).then(|| std::mem::take(&mut self.out).into())
    }

    fn push_call(&mut self, piece: &ToolCallDelta) {
        let block = OpenBlock::ToolUse(piece.index);
        if let (Some(id), Some(name)) = (&piece.id, &piece.name) {
            self.enter(block, || Block::ToolUse { id, name, input: Map::new() });
        }
        if self.open == block && !piece.arguments.is_empty() {
            self.write_delta(Delta::InputJson { partial_json: &piece.arguments });
        }
    }

    /// Starts a block, unless it is already open.
    fn enter<'a>(&mut self, block: OpenBlock, content_block: impl FnOnce() -> Block<'a>) {
        if self.open != block {
            self.close();
            self.open = block;
            let content_block = content_block();
            write(&mut self.out, &Event::ContentBlockStart { index: self.index, content_block });
        }
    }

    fn write_delta(&mut self, delta: Delta<'_>) {
        write(&mut self.out, &Event::ContentBlockDelta { index: self.index, delta });
    }

    /// Ends the open block, if there is one.
    fn close(&mut self) {
        if self.open == OpenBlock::None {
            return;
        }
        if self.open == OpenBlock::Thinking {
            self.write_delta(Delta::Signature { signature: signature() });
        }
        write(&mut self.out, &Event::ContentBlockStop { index: self.index });
        self.open = OpenBlock::None;
        self.index += 1;
    }
}

/// Returns the first event: a message without content.
pub fn message_start(head: &Head, usage: Usage) -> Bytes {
    serialize(&Event::MessageStart { message: head.message(Vec::new(), Ending::default(), usage) })
}

/// Returns the last event.
pub fn message_stop() -> Bytes {
    serialize(&Event::MessageStop {})
}

/// Returns a single event as bytes.
fn serialize(event: &Event<'_>) -> Bytes {
    let mut out = Vec::new();
    write(&mut out, event);
    out.into()
}

fn write(out: &mut Vec<u8>, event: &Event<'_>) {
    out.extend_from_slice(format!("event: {}\ndata: ", event.name()).as_bytes());
    let body_start = out.len();
    if let Err(error) = serde_json::to_writer(&mut *out, event) {
        out.truncate(body_start);
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

    /// Returns the events of these deltas, without the random signatures.
    fn streamed(deltas: Vec<ChoiceDelta>) -> Vec<Value> {
        let mut writer = Events::default();
        let written = deltas.iter().filter_map(|delta| writer.push(delta, USAGE));
        let mut events: Vec<Value> = written.flat_map(|bytes| parsed(&bytes)).collect();
        let signatures =
            events.iter_mut().filter_map(|event| event.pointer_mut("/delta/signature"));
        for signature in signatures {
            assert_eq!(signature.as_str().unwrap().len(), 32);
            *signature = Value::Null;
        }
        events
    }

    fn delta(events: impl IntoIterator<Item = AnswerEvent>) -> ChoiceDelta {
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

    fn call_piece(index: usize, arguments: &str) -> AnswerEvent {
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

    fn start(index: usize, content_block: Value) -> Value {
        json!({"type": "content_block_start", "index": index, "content_block": content_block})
    }

    fn block_delta(index: usize, delta: Value) -> Value {
        json!({"type": "content_block_delta", "index": index, "delta": delta})
    }

    fn stop(index: usize) -> Value {
        json!({"type": "content_block_stop", "index": index})
    }

    fn usage(output_tokens: usize) -> Value {
        json!({
            "input_tokens": 3,
            "cache_read_input_tokens": 4,
            "cache_creation_input_tokens": 3,
            "output_tokens": output_tokens,
        })
    }

    fn message_delta(reason: &str) -> Value {
        json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": null},
            "usage": usage(5),
        })
    }

    #[test]
    fn kinds_of_content_become_separate_blocks() {
        let events = streamed(vec![
            delta([reasoning("h")]),
            delta([reasoning("m"), text("so")]),
            delta([]),
            delta([call(0, ""), call_piece(0, "{\"a\"")]),
            delta([call_piece(0, ": 1}"), closed(), call(1, "{}"), closed()]),
            end(Finish::ToolCalls),
        ]);
        let tool = |id: &str| json!({"type": "tool_use", "id": id, "name": "f", "input": {}});
        let expected = [
            start(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
            block_delta(0, json!({"type": "thinking_delta", "thinking": "h"})),
            block_delta(0, json!({"type": "thinking_delta", "thinking": "m"})),
            block_delta(0, json!({"type": "signature_delta", "signature": null})),
            stop(0),
            start(1, json!({"type": "text", "text": ""})),
            block_delta(1, json!({"type": "text_delta", "text": "so"})),
            stop(1),
            start(2, tool("call0")),
            block_delta(2, json!({"type": "input_json_delta", "partial_json": "{\"a\""})),
            block_delta(2, json!({"type": "input_json_delta", "partial_json": ": 1}"})),
            stop(2),
            start(3, tool("call1")),
            block_delta(3, json!({"type": "input_json_delta", "partial_json": "{}"})),
            stop(3),
            message_delta("tool_use"),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn delta_across_blocks_keeps_event_order() {
        let events = streamed(vec![
            delta([call(0, "{")]),
            delta([call_piece(0, "}"), closed(), text("and")]),
            delta([text(" so"), reasoning("hm"), call(1, "{}"), closed()]),
            end(Finish::ToolCalls),
        ]);
        let expected = [
            block_delta(0, json!({"type": "input_json_delta", "partial_json": "}"})),
            stop(0),
            start(1, json!({"type": "text", "text": ""})),
            block_delta(1, json!({"type": "text_delta", "text": "and"})),
            block_delta(1, json!({"type": "text_delta", "text": " so"})),
            stop(1),
            start(2, json!({"type": "thinking", "thinking": "", "signature": ""})),
            block_delta(2, json!({"type": "thinking_delta", "thinking": "hm"})),
            block_delta(2, json!({"type": "signature_delta", "signature": null})),
            stop(2),
            start(3, json!({"type": "tool_use", "id": "call1", "name": "f", "input": {}})),
            block_delta(3, json!({"type": "input_json_delta", "partial_json": "{}"})),
            stop(3),
            message_delta("tool_use"),
        ];
        assert_eq!(events[2..], expected);
    }

    #[test]
    fn unfinished_call_does_not_end_with_tool_use() {
        let cut = delta([call(0, "{\"a\""), AnswerEvent::EndCall(CallEnd::Unfinished)]);
        let events = streamed(vec![cut, end(Finish::Eos)]);
        assert_eq!(events.last(), Some(&message_delta("end_turn")));
    }

    #[test]
    fn empty_answer_has_empty_text_block() {
        let expected =
            [start(0, json!({"type": "text", "text": ""})), stop(0), message_delta("end_turn")];
        assert_eq!(streamed(vec![delta([]), end(Finish::Eos)]), expected);
        assert!(Events::default().push(&delta([]), USAGE).is_none());
    }

    #[test]
    fn message_events_enclose_the_stream() {
        let head = Head::new(&RequestId::new("r").unwrap(), "m");
        let message = json!({
            "id": "msg_r",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(0),
        });
        let first = message_start(&head, Usage { completion_tokens: 0, ..USAGE });
        assert_eq!(parsed(&first), [json!({"type": "message_start", "message": message})]);
        assert_eq!(message_stop(), "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
        let mut failed = Vec::new();
        StreamApi::Messages.write_failure(&mut failed, &ApiError::internal("gone"), 0);
        let error = json!({"type": "error", "error": {"type": "api_error", "message": "gone"}});
        assert_eq!(parsed(&failed), [error]);
    }
}
