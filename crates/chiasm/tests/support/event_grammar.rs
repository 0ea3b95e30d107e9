//! Parsers for the event streams of the three APIs. They panic where a stream breaks its grammar.
//!
//! Whole answers are parsed to the same type as streams, so that tests can compare the two.
//! `chiasm-api` includes this file in its unit tests, too.
#![allow(clippy::panic, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(unreachable_pub, reason = "two crates have it as a part of their tests")]

use serde_json::{Map, Value};

/// A piece of an answer; pieces are in the order of the model's text.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    Reasoning(String),
    Text(String),
    Call(Call),
}

/// A tool call without its id, which is random.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub name: String,
    pub arguments: String,
    /// The status of a Responses item; empty in the other APIs.
    pub status: String,
}

/// One choice of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedAnswer {
    pub pieces: Vec<Piece>,
    /// `finish_reason`, `stop_reason` or the response's `status`; `None` after an error.
    pub end: Option<String>,
}

impl ParsedAnswer {
    fn reasoning(&mut self, more: &str) {
        match self.pieces.last_mut() {
            Some(Piece::Reasoning(text)) => text.push_str(more),
            _ => self.pieces.push(Piece::Reasoning(more.to_owned())),
        }
    }

    fn text(&mut self, more: &str) {
        match self.pieces.last_mut() {
            Some(Piece::Text(text)) => text.push_str(more),
            _ => self.pieces.push(Piece::Text(more.to_owned())),
        }
    }

    fn calls(&self) -> usize {
        self.pieces.iter().filter(|piece| matches!(piece, Piece::Call(_))).count()
    }

    /// Returns the last call, the only one that may still grow.
    fn last_call(&mut self) -> Option<&mut Call> {
        self.pieces.iter_mut().rev().find_map(|piece| match piece {
            Piece::Call(call) => Some(call),
            _ => None,
        })
    }

    /// Groups the pieces as a whole chat message does: reasoning, then text, then calls.
    pub fn unordered(&self) -> Self {
        let mut reasoning = String::new();
        let mut text = String::new();
        let mut calls = Vec::new();
        for piece in &self.pieces {
            match piece {
                Piece::Reasoning(more) => reasoning.push_str(more),
                Piece::Text(more) => text.push_str(more),
                Piece::Call(call) => calls.push(Piece::Call(call.clone())),
            }
        }
        let reasoning = (!reasoning.is_empty()).then_some(Piece::Reasoning(reasoning));
        let text = (!text.is_empty()).then_some(Piece::Text(text));
        Self {
            pieces: reasoning.into_iter().chain(text).chain(calls).collect(),
            end: self.end.clone(),
        }
    }
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Parses the data of each event and checks that the event's name equals its `type`.
fn named_events(stream: &str) -> Vec<Value> {
    let event = |event: &str| {
        let (name, data) = event
            .strip_prefix("event: ")
            .and_then(|event| event.split_once("\ndata: "))
            .unwrap_or_else(|| panic!("no named event: {event}"));
        let data: Value =
            serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"));
        assert_eq!(data["type"], name, "{data}");
        data
    };
    assert!(stream.ends_with("\n\n"), "a stream ends with a whole event");
    stream.split_terminator("\n\n").map(event).collect()
}

/// Parses a stream of chat chunks or completions. Returns its choices by index.
pub fn chat(stream: &str) -> Vec<ParsedAnswer> {
    assert!(stream.ends_with("\n\n"), "a stream ends with a whole event");
    let mut choices: Vec<ParsedAnswer> = Vec::new();
    let mut has_failed = false;
    let mut is_done = false;
    for event in stream.split_terminator("\n\n") {
        let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("no data: {event}"));
        assert!(!is_done, "after [DONE]: {data}");
        if data == "[DONE]" {
            is_done = true;
            continue;
        }
        assert!(!has_failed, "after an error: {data}");
        let chunk: Value =
            serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"));
        if chunk.get("error").is_some() {
            has_failed = true;
            continue;
        }
        for choice in chunk["choices"].as_array().unwrap_or_else(|| panic!("no choices: {chunk}")) {
            let index = choice["index"].as_u64().map_or(0, |index| index as usize);
            choices.resize(choices.len().max(index + 1), ParsedAnswer::default());
            chat_choice(&mut choices[index], choice);
        }
    }
    for (index, choice) in choices.iter().enumerate() {
        assert!(has_failed || choice.end.is_some(), "choice {index} has no end");
    }
    assert!(has_failed || is_done, "no [DONE]");
    choices
}

fn chat_choice(parsed: &mut ParsedAnswer, choice: &Value) {
    let delta = &choice["delta"];
    let reasoning =
        delta["reasoning"].as_str().or(delta["reasoning_content"].as_str()).unwrap_or_default();
    let text = delta["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
    let calls = delta["tool_calls"].as_array().map_or(&[][..], Vec::as_slice);
    if parsed.end.is_some() {
        let is_empty = reasoning.is_empty() && text.is_empty() && calls.is_empty();
        assert!(is_empty && choice["finish_reason"].is_null(), "after the end: {choice}");
    }
    if !reasoning.is_empty() {
        parsed.reasoning(reasoning);
    }
    if !text.is_empty() {
        parsed.text(text);
    }
    for piece in calls {
        let index = piece["index"].as_u64().unwrap_or_else(|| panic!("no index: {piece}")) as usize;
        let arguments = piece["function"]["arguments"].as_str().unwrap_or_default();
        let started = parsed.calls();
        if index == started {
            let is_named = piece["id"].as_str().is_some_and(|id| !id.is_empty())
                && piece["type"] == "function";
            let name = string(&piece["function"]["name"]);
            assert!(is_named && !name.is_empty(), "a call begins with id, type and name: {piece}");
            parsed.pieces.push(Piece::Call(Call {
                name,
                arguments: arguments.to_owned(),
                status: String::new(),
            }));
            continue;
        }
        assert_eq!(index + 1, started, "only the last call may continue: {piece}");
        assert!(
            piece.get("id").is_none() && piece["function"].get("name").is_none(),
            "id or name repeated: {piece}"
        );
        parsed.last_call().expect("a call").arguments.push_str(arguments);
    }
    if let Some(reason) = choice["finish_reason"].as_str() {
        parsed.end = Some(reason.to_owned());
    }
}

/// Parses a whole chat answer. Returns its first choice.
pub fn whole_chat(answer: &Value) -> ParsedAnswer {
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    let mut parsed = ParsedAnswer {
        pieces: Vec::new(),
        end: choice["finish_reason"].as_str().map(str::to_owned),
    };
    let reasoning = string(&message["reasoning"]);
    let text = string(&message["content"]);
    if !reasoning.is_empty() {
        parsed.reasoning(&reasoning);
    }
    if !text.is_empty() {
        parsed.text(&text);
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        assert!(call["id"].is_string() && call["type"] == "function", "{call}");
        let name = string(&call["function"]["name"]);
        let arguments = string(&call["function"]["arguments"]);
        parsed.pieces.push(Piece::Call(Call { name, arguments, status: String::new() }));
    }
    parsed
}

/// Parses a stream of the Messages API.
pub fn messages(stream: &str) -> ParsedAnswer {
    let mut parsed = ParsedAnswer::default();
    let mut blocks = 0;
    // The type of the open block.
    let mut open: Option<String> = None;
    // The type of the open block's last delta.
    let mut last_delta = String::new();
    let mut is_over = false;
    let events = named_events(stream);
    for (number, event) in events.iter().enumerate() {
        assert!(!is_over, "after the end: {event}");
        let kind = event["type"].as_str().unwrap_or_default();
        assert_eq!(number == 0, kind == "message_start", "{event}");
        let index = event["index"].as_u64();
        match kind {
            "message_start" => assert_eq!(event["message"]["content"], Value::Array(Vec::new())),
            "ping" => {}
            "content_block_start" => {
                assert!(
                    open.is_none() && parsed.end.is_none(),
                    "a block inside another block, or after the end: {event}"
                );
                assert_eq!(index, Some(blocks), "{event}");
                let block = &event["content_block"];
                match block["type"].as_str().unwrap_or_default() {
                    "thinking" => parsed.pieces.push(Piece::Reasoning(string(&block["thinking"]))),
                    "text" => parsed.pieces.push(Piece::Text(string(&block["text"]))),
                    "tool_use" => {
                        assert!(block["id"].as_str().is_some_and(|id| !id.is_empty()), "{event}");
                        assert_eq!(block["input"], Value::Object(Map::new()), "{event}");
                        let name = string(&block["name"]);
                        assert!(!name.is_empty(), "{event}");
                        parsed.pieces.push(Piece::Call(Call {
                            name,
                            arguments: String::new(),
                            status: String::new(),
                        }));
                    }
                    other => panic!("a block of type {other}"),
                }
                open = Some(string(&block["type"]));
                last_delta.clear();
            }
            "content_block_delta" => {
                assert_eq!(index, Some(blocks), "{event}");
                let delta = &event["delta"];
                last_delta = string(&delta["type"]);
                match (open.as_deref(), last_delta.as_str(), parsed.pieces.last_mut()) {
                    (Some("text"), "text_delta", Some(Piece::Text(text))) => {
                        text.push_str(&string(&delta["text"]))
                    }
                    (Some("thinking"), "thinking_delta", Some(Piece::Reasoning(text))) => {
                        text.push_str(&string(&delta["thinking"]));
                    }
                    (Some("thinking"), "signature_delta", _) => {}
                    (Some("tool_use"), "input_json_delta", Some(Piece::Call(call))) => {
                        call.arguments.push_str(&string(&delta["partial_json"]));
                    }
                    (open, ..) => panic!("inside {open:?}: {event}"),
                }
            }
            "content_block_stop" => {
                assert_eq!(index, Some(blocks), "{event}");
                let block = open.take().unwrap_or_else(|| panic!("no open block: {event}"));
                assert!(
                    block != "thinking" || last_delta == "signature_delta",
                    "thinking without a signature"
                );
                blocks += 1;
            }
            "message_delta" => {
                assert!(open.is_none() && parsed.end.is_none() && blocks > 0, "{event}");
                parsed.end = Some(string(&event["delta"]["stop_reason"]));
            }
            "message_stop" => {
                assert!(parsed.end.is_some(), "no message_delta before {event}");
                is_over = true;
            }
            "error" => {
                parsed.end = None;
                is_over = true;
            }
            _ => panic!("unknown event: {event}"),
        }
    }
    assert!(is_over, "no end: {:?}", events.last());
    parsed.pieces.retain(|piece| !matches!(piece, Piece::Text(text) if text.is_empty()));
    for call in parsed.pieces.iter_mut().filter_map(|piece| match piece {
        Piece::Call(call) => Some(call),
        _ => None,
    }) {
        call.arguments = as_object(&call.arguments);
    }
    parsed
}

/// Parses a whole message.
pub fn whole_message(message: &Value) -> ParsedAnswer {
    let mut parsed =
        ParsedAnswer { pieces: Vec::new(), end: Some(string(&message["stop_reason"])) };
    for block in message["content"].as_array().expect("blocks") {
        parsed.pieces.push(match block["type"].as_str().unwrap_or_default() {
            "thinking" => Piece::Reasoning(string(&block["thinking"])),
            "text" => Piece::Text(string(&block["text"])),
            "tool_use" => Piece::Call(Call {
                name: string(&block["name"]),
                arguments: block["input"].to_string(),
                status: String::new(),
            }),
            other => panic!("a block of type {other}"),
        });
    }
    parsed.pieces.retain(|piece| !matches!(piece, Piece::Text(text) if text.is_empty()));
    parsed
}

/// Formats streamed arguments like the `input` of a whole message: an object, `{}` if there are no
/// arguments.
fn as_object(arguments: &str) -> String {
    Value::Object(serde_json::from_str(arguments).unwrap_or_default()).to_string()
}

/// Parses a stream of the Responses API.
pub fn responses(stream: &str) -> ParsedAnswer {
    let events = named_events(stream);
    let mut items = ResponseItems::default();
    let mut end: Option<&Value> = None;
    for (number, event) in events.iter().enumerate() {
        assert!(end.is_none(), "after the end: {event}");
        assert_eq!(event["sequence_number"].as_u64(), Some(number as u64), "{event}");
        let kind = event["type"].as_str().unwrap_or_default().trim_start_matches("response.");
        assert_eq!(number == 0, kind == "created", "{event}");
        assert_eq!(number == 1, kind == "in_progress", "{event}");
        match kind {
            "created" | "in_progress" => {
                assert_eq!(event["response"]["output"], Value::Array(Vec::new()))
            }
            "completed" | "incomplete" | "failed" => {
                assert_eq!(event["response"]["status"], kind, "{event}");
                end = Some(event);
            }
            _ => items.apply(kind, event),
        }
    }
    let end = end.unwrap_or_else(|| panic!("no end: {:?}", events.last()));
    let output = end["response"]["output"].as_array().expect("an output");
    let parsed = whole_response(&end["response"]);
    assert_eq!(items.parsed.pieces.len(), output.len(), "items without events: {end}");
    for (number, (item, streamed)) in output.iter().zip(&items.parsed.pieces).enumerate() {
        let is_cut_custom = item["type"] == "custom_tool_call" && item["status"] == "incomplete";
        match items.done.get(number) {
            Some(done) => assert_eq!(done, item, "differs from its `.done` event"),
            None => {
                assert!(is_cut_custom && number + 1 == output.len(), "no `.done` event: {item}");
            }
        }
        let whole = &parsed.pieces[number];
        let is_same = match (whole, streamed) {
            (Piece::Call(whole), Piece::Call(call)) => {
                whole.name == call.name && whole.arguments == call.arguments
            }
            (whole, piece) => whole == piece,
        };
        assert!(is_same, "{streamed:?} was streamed for {whole:?}");
    }
    parsed
}

/// The items of a response so far; at most one is open at a time.
#[derive(Default)]
struct ResponseItems {
    parsed: ParsedAnswer,
    done: Vec<Value>,
    open: Option<OpenItem>,
}

struct OpenItem {
    id: String,
    kind: String,
    has_part: bool,
    /// The parts whose `.done` event has arrived: `text`, `part`.
    done: Vec<&'static str>,
}

impl ResponseItems {
    fn apply(&mut self, kind: &str, event: &Value) {
        if kind == "output_item.added" {
            return self.add(event);
        }
        let number = self.parsed.pieces.len() - 1;
        assert_eq!(event["output_index"].as_u64(), Some(number as u64), "{event}");
        let open = self.open.as_mut().unwrap_or_else(|| panic!("no open item: {event}"));
        if kind != "output_item.done" {
            assert_eq!(event["item_id"], open.id.as_str(), "{event}");
        }
        let (text, is_call) = match self.parsed.pieces.last_mut().expect("an item") {
            Piece::Reasoning(text) | Piece::Text(text) => (text, false),
            Piece::Call(call) => (&mut call.arguments, true),
        };
        let text_event = match open.kind.as_str() {
            "reasoning" => "reasoning_text",
            "message" => "output_text",
            "function_call" => "function_call_arguments",
            _ => "custom_tool_call_input",
        };
        assert_eq!(
            event.get("content_index").is_some(),
            kind.contains("part") || kind.contains("_text."),
            "{event}"
        );
        match kind {
            "content_part.added" => {
                assert!(!is_call && !open.has_part, "{event}");
                open.has_part = true;
            }
            "content_part.done" => {
                assert_eq!(open.done, ["text"], "{event}");
                assert_eq!(event["part"]["text"], text.as_str(), "{event}");
                open.done.push("part");
            }
            "output_item.done" => {
                let expected: &[&str] = if is_call { &["text"] } else { &["text", "part"] };
                assert_eq!(open.done, expected, "{event}");
                self.done.push(event["item"].clone());
                self.open = None;
            }
            _ if kind.strip_suffix(".delta") == Some(text_event) => {
                assert!((is_call || open.has_part) && open.done.is_empty(), "{event}");
                text.push_str(event["delta"].as_str().expect("a delta"));
            }
            _ if kind.strip_suffix(".done") == Some(text_event) => {
                let field = if !is_call {
                    "text"
                } else if open.kind == "function_call" {
                    "arguments"
                } else {
                    "input"
                };
                assert_eq!(event[field], text.as_str(), "{event}");
                open.done.push("text");
            }
            _ => panic!("inside {}: {event}", open.kind),
        }
    }

    fn add(&mut self, event: &Value) {
        assert!(self.open.is_none(), "an item inside another item: {event}");
        let item = &event["item"];
        assert_eq!(
            event["output_index"].as_u64(),
            Some(self.parsed.pieces.len() as u64),
            "{event}"
        );
        assert_eq!(item["status"], "in_progress", "{event}");
        let piece = response_item(item);
        assert!(
            !matches!(&piece, Piece::Call(call) if call.name.is_empty()),
            "a call without a name: {event}"
        );
        self.parsed.pieces.push(piece);
        let id = string(&item["id"]);
        let kind = string(&item["type"]);
        self.open = Some(OpenItem { id, kind, has_part: false, done: Vec::new() });
    }
}

fn response_item(item: &Value) -> Piece {
    let text = || string(&item["content"][0]["text"]);
    match item["type"].as_str().unwrap_or_default() {
        "reasoning" => Piece::Reasoning(text()),
        "message" => Piece::Text(text()),
        kind @ ("function_call" | "custom_tool_call") => {
            assert!(item["call_id"].as_str().is_some_and(|id| !id.is_empty()), "{item}");
            let field = if kind == "function_call" { "arguments" } else { "input" };
            let name = string(&item["name"]);
            let arguments = string(&item[field]);
            Piece::Call(Call { name, arguments, status: string(&item["status"]) })
        }
        other => panic!("an item of type {other}"),
    }
}

/// Parses a whole response.
pub fn whole_response(response: &Value) -> ParsedAnswer {
    let pieces =
        response["output"].as_array().expect("an output").iter().map(response_item).collect();
    let end = string(&response["status"]);
    ParsedAnswer { pieces, end: (end != "failed").then_some(end) }
}
