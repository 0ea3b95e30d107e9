use bytes::Bytes;
use chiasm_media::{ByteBudget, MediaInput};
use chiasm_prompt::ChatPart;
use chiasm_types::Modality;
use serde_json::json;

use super::*;
use crate::ErrorKind;
use crate::openai::BodyLimits;
use crate::openai::request;

fn parse(input: &Value) -> Result<Input, ApiError> {
    request::read(&mut Intake::from_json(&json!({"input": input}))).map(|(_, input)| input)
}

fn refused(input: Value) -> String {
    parse(&input).err().unwrap().param.unwrap()
}

fn text_message(role: &str, text: &str) -> ChatMessage {
    let content = Some(ChatContent::Text(text.to_owned()));
    ChatMessage { role: role.to_owned(), content, ..ChatMessage::default() }
}

fn parts_message(role: &str, texts: &[&str]) -> ChatMessage {
    let parts = texts.iter().map(|text| ChatPart::Text((*text).to_owned())).collect();
    ChatMessage { content: Some(ChatContent::Parts(parts)), ..text_message(role, "") }
}

fn output_text(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

#[test]
fn text_input_becomes_user_message() {
    let Input { messages, media, is_open } = parse(&json!("hello")).unwrap();
    assert_eq!((messages, media.len(), is_open), (vec![text_message("user", "hello")], 0, false));
}

#[test]
fn assistant_items_become_one_message() {
    let call = |id: &str| {
        json!({
            "type": "function_call", "id": "fc", "call_id": id, "name": "f", "arguments": "{}",
        })
    };
    let summary = |text: &str| json!({"type": "summary_text", "text": text});
    let reasoning = [json!({"type": "reasoning_text", "text": "hm"})];
    let input = json!([
        {"role": "developer", "content": "short"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": reasoning,
            "encrypted_content": null,
        },
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "status": "completed",
            "content": [output_text("wait")],
        },
        call("a"),
        call("b"),
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
        {"type": "reasoning", "id": "rs", "summary": [summary("s"), summary("t")]},
        {"type": "reasoning", "id": "rs", "summary": []},
    ]);
    let Input { messages, is_open, .. } = parse(&input).unwrap();
    let function = json!({"name": "f", "arguments": "{}"});
    let called = |id: &str| json!({"id": id, "type": "function", "function": function});
    let answer = |id: &str| Some(id.to_owned());
    let expected = [
        text_message("developer", "short"),
        parts_message("user", &["hi"]),
        ChatMessage {
            reasoning: Some("hm".to_owned()),
            tool_calls: Some(json!([called("a"), called("b")])),
            ..parts_message("assistant", &["wait"])
        },
        ChatMessage { tool_call_id: answer("a"), ..text_message("tool", "1") },
        ChatMessage { tool_call_id: answer("b"), ..parts_message("tool", &["2"]) },
        text_message("assistant", "done"),
        ChatMessage { reasoning: Some("s\nt".to_owned()), ..text_message("assistant", "really") },
    ];
    assert_eq!(messages, expected);
    assert!(!is_open);
}

#[test]
fn custom_calls_become_function_calls() {
    let input = json!([
        {"role": "user", "content": "hi"},
        {
            "type": "custom_tool_call",
            "id": "ctc",
            "call_id": "a",
            "name": "sh",
            "input": "say \"a\"",
            "status": "completed",
        },
        {"type": "function_call", "call_id": "b", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c", "name": "sh", "namespace": "n", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "a", "name": "sh", "output": "a"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "1"}],
        },
    ]);
    let called = |id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };
    let calls = json!([
        called("a", "sh", r#"{"input": "say \"a\""}"#),
        called("b", "n__f", "{}"),
        called("c", "n__sh", r#"{"input": ""}"#),
    ]);
    let answer = |id: &str| Some(id.to_owned());
    let expected = [
        text_message("user", "hi"),
        ChatMessage {
            role: "assistant".to_owned(),
            tool_calls: Some(calls),
            ..ChatMessage::default()
        },
        ChatMessage { tool_call_id: answer("a"), ..text_message("tool", "a") },
        ChatMessage { tool_call_id: answer("b"), ..parts_message("tool", &["1"]) },
    ];
    assert_eq!(parse(&input).unwrap().messages, expected);
    let refused = |item: Value| refused(json!([item]));
    assert_eq!(
        refused(json!({"type": "custom_tool_call", "call_id": "a", "name": "sh"})),
        "input[0].input"
    );
    let mixed = json!({
        "type": "custom_tool_call",
        "call_id": "a",
        "name": "sh",
        "input": "",
        "arguments": "{}",
    });
    assert_eq!(refused(mixed), "input[0].arguments");
    let mixed = json!({
        "type": "function_call",
        "call_id": "a",
        "name": "f",
        "input": "x",
        "arguments": "{}",
    });
    assert_eq!(refused(mixed), "input[0].input");
}

#[test]
fn incomplete_last_message_is_continued() {
    let is_open = |input: Value| parse(&input).unwrap().is_open;
    let last = |status: &str| {
        let content = [output_text("a")];
        json!({"type": "message", "role": "assistant", "status": status, "content": content})
    };
    assert!(is_open(json!([{"role": "user", "content": "x"}, last("incomplete")])));
    assert!(is_open(json!([last("in_progress")])));
    assert!(!is_open(json!([last("completed")])));
    assert!(!is_open(
        json!([last("incomplete"), {"role": "user", "content": "go on", "status": "in_progress"}])
    ));
}

#[test]
fn images_keep_order_with_their_fields() {
    let image = |url: &str| {
        json!({
            "type": "input_image", "image_url": url, "detail": "auto", "file_id": null,
        })
    };
    let input = json!([
        {"role": "user", "content": [image("http://a"), {"type": "input_text", "text": "b"}]},
        {"type": "function_call_output", "call_id": "c", "output": [image("data:x")]},
    ]);
    let Input { messages, media, .. } = parse(&input).unwrap();
    assert_eq!(messages.len(), 2);
    let item = |url: &str, field: &str| MediaRef {
        modality: Modality::Image,
        source: Some(MediaInput::Url(Bytes::from(url.to_owned()))),
        uuid: None,
        field: field.to_owned(),
    };
    let expected = [
        item("http://a", "input[0].content[0].image_url"),
        item("data:x", "input[1].output[0].image_url"),
    ];
    assert_eq!(media, expected);
}

#[test]
fn large_image_shares_body() {
    let url = format!("data:image/png;base64,{}", "AAAA".repeat(10_000));
    let part = json!({"type": "input_image", "image_url": url});
    let body = Bytes::from(json!({"input": [{"role": "user", "content": [part]}]}).to_string());
    let mut intake = Intake::new(body.clone(), &BodyLimits::default(), &ByteBudget::new(1 << 20));
    let (_, Input { media, .. }) = request::read(&mut intake).unwrap();
    let Some(MediaInput::Url(read)) = media[0].source.clone() else { panic!("a URL") };
    assert!(body.as_ptr_range().contains(&read.as_ptr()));
    assert_eq!(read, url.as_bytes());
    let charged = intake.into_charge().bytes();
    assert!(charged < 10_000, "{charged}");
}

#[test]
fn last_duplicate_field_wins_with_its_images() {
    let content =
        |url: &str| format!(r#""content": [{{"type": "input_image", "image_url": "{url}"}}]"#);
    let twice =
        format!(r#"[{{"role": "user", {}, {}}}]"#, content("http://a"), content("http://b"));
    let before = format!(r#"[{{"role": "user", {}}}]"#, content("http://c"));
    let body = format!(r#"{{"input": {before}, "input": {twice}}}"#);
    let mut intake = Intake::new(body.into(), &BodyLimits::default(), &ByteBudget::new(1 << 20));
    let (_, Input { media, .. }) = request::read(&mut intake).unwrap();
    assert_eq!(media.len(), 1);
    assert_eq!(media[0].source, Some(MediaInput::Url(Bytes::from_static(b"http://b"))));
}

#[test]
fn invalid_item_names_field() {
    for (item, field) in [
        (json!(3), ""),
        (json!("x"), ""),
        (json!({"content": "x"}), ".type"),
        (json!({"role": "king", "content": "x"}), ".role"),
        (json!({"role": "tool", "content": "x"}), ".role"),
        (json!({"type": "message", "content": "x"}), ".role"),
        (json!({"role": "user"}), ".content"),
        (json!({"role": "user", "content": 3}), ".content"),
        (json!({"role": "user", "content": "x", "status": "late"}), ".status"),
        (json!({"role": "user", "content": "x", "call_id": "c"}), ".call_id"),
        (json!({"role": "user", "content": "x", "colour": "red"}), ".colour"),
        (json!({"type": "item_reference", "id": "msg"}), ".type"),
        (json!({"type": "web_search_call", "id": "ws"}), ".type"),
        (json!({"type": "function_call", "name": "f", "arguments": "{}"}), ".call_id"),
        (json!({"type": "function_call", "call_id": "c", "arguments": "{}"}), ".name"),
        (json!({"type": "function_call", "call_id": "c", "name": "f"}), ".arguments"),
        (
            json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}),
            ".arguments",
        ),
        (json!({"type": "function_call_output", "output": "1"}), ".call_id"),
        (json!({"type": "function_call_output", "call_id": "c"}), ".output"),
        (
            json!({"type": "reasoning", "summary": [], "encrypted_content": "x"}),
            ".encrypted_content",
        ),
        (
            json!({"type": "reasoning", "summary": [{"type": "input_text", "text": "x"}]}),
            ".summary[0].type",
        ),
        (json!({"type": "reasoning", "content": "x", "output": "x"}), ".output"),
    ] {
        assert_eq!(refused(json!([item])), format!("input[0]{field}"), "{item}");
    }
    assert_eq!(refused(json!([])), "input");
    assert_eq!(refused(json!([{"type": "reasoning", "summary": []}])), "input");
    assert_eq!(refused(json!(3)), "input");
    let error =
        request::read::<Input>(&mut Intake::from_json(&json!({"model": "m"}))).err().unwrap();
    assert_eq!((error.code, error.param.as_deref()), ("missing_field", Some("input")));
}

#[test]
fn invalid_part_names_field() {
    for (part, field) in [
        (json!("x"), ""),
        (json!({"text": "x"}), ".type"),
        (json!({"type": "input_file", "file_id": "f"}), ".type"),
        (json!({"type": "reasoning_text", "text": "x"}), ".type"),
        (json!({"type": "input_text"}), ".text"),
        (json!({"type": "input_text", "text": "x", "image_url": "x"}), ".image_url"),
        (json!({"type": "input_image", "detail": "auto"}), ".image_url"),
        (json!({"type": "input_image", "file_id": "f"}), ".file_id"),
        (json!({"type": "input_image", "image_url": "x", "text": "x"}), ".text"),
    ] {
        assert_eq!(
            refused(json!([{"role": "user", "content": [part]}])),
            format!("input[0].content[0]{field}"),
            "{part}"
        );
    }
}

#[test]
fn excess_items_or_parts_are_refused() {
    let limits = BodyLimits { messages: 2, content_parts: 3, ..BodyLimits::default() };
    let outcome = |input: &Value| {
        let body = json!({"input": input}).to_string();
        let mut intake = Intake::new(body.into(), &limits, &ByteBudget::new(1 << 20));
        let read = request::read::<Input>(&mut intake);
        read.map(drop).map_err(|error| (error.kind, error.param.unwrap()))
    };
    let part = json!({"type": "input_text", "text": "x"});
    let item = |parts: usize| json!({"role": "user", "content": vec![part.clone(); parts]});
    assert_eq!(outcome(&json!([item(2), item(1)])), Ok(()));
    assert_eq!(
        outcome(&json!([item(2), item(2)])),
        Err((ErrorKind::TooLarge, "input[1].content[1]".to_owned()))
    );
    assert_eq!(
        outcome(&json!([item(0), item(0), item(0)])),
        Err((ErrorKind::TooLarge, "input[2]".to_owned()))
    );
}
