//! Tests of the conversion of Anthropic's messages to messages for chat templates.

use bytes::Bytes;
use chiasm_media::{ByteBudget, MediaInput};
use chiasm_request::{Chat, Prompt};
use serde_json::json;

use super::super::request::MessagesRequest;
use super::*;
use crate::ErrorKind;
use crate::openai::BodyLimits;
use crate::openai::RequestBody;

fn parse_text(body: Bytes, limits: &BodyLimits) -> Result<Chat, ApiError> {
    let (request, _) =
        MessagesRequest::parse(Intake::new(body, limits, &ByteBudget::new(1 << 20)))?;
    let Prompt::Chat(chat) = request.generate.prompt else { panic!("a conversation") };
    Ok(chat)
}

fn parse(messages: &Value) -> Result<Chat, ApiError> {
    let body = json!({"max_tokens": 5, "messages": messages});
    parse_text(body.to_string().into(), &BodyLimits::default())
}

fn image(url: &str) -> Value {
    json!({"type": "image", "source": {"type": "url", "url": url}})
}

fn document(source: Value) -> Value {
    json!({
        "type": "document",
        "source": source,
        "citations": {"enabled": false},
        "cache_control": {"type": "ephemeral"},
    })
}

fn search_result(title: &str, content: Value) -> Value {
    json!({"type": "search_result", "source": "https://a.org", "title": title, "content": content})
}

fn with_citations(mut block: Value) -> Value {
    block["citations"] = json!({"enabled": true});
    block
}

fn parts(parts: Vec<ChatPart>) -> Option<ChatContent> {
    Some(ChatContent::Parts(parts))
}

fn image_part() -> ChatPart {
    ChatPart::Media(Modality::Image)
}

#[test]
fn tool_results_precede_other_content() {
    let chat = parse(&json!([
        {"role": "user", "content": [
            image("a"),
            {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "h", "signature": "s"},
            {"type": "redacted_thinking", "data": "d"},
            {"type": "thinking", "thinking": "m", "signature": "s"},
            {"type": "text", "text": "so", "citations": null},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
            {"type": "tool_use", "id": "2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            image("d"),
            {"type": "tool_result", "tool_use_id": "1", "is_error": true, "content": [
                {"type": "text", "text": "one"},
                image("b"),
                {"type": "text", "text": "two"},
                image("c"),
            ]},
            {"type": "tool_result", "tool_use_id": "2", "content": "three"},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "3"}]},
    ]));
    let Chat { messages, media, .. } = chat.unwrap();
    let with_content = |role: &str, content| ChatMessage {
        role: role.to_owned(),
        content,
        ..ChatMessage::default()
    };
    let result = |id: &str, text: &str| ChatMessage {
        tool_call_id: Some(id.to_owned()),
        ..message("tool", text.to_owned())
    };
    let call = |id: &str, name: &str, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    };
    let expected = [
        with_content("user", parts(vec![image_part(), ChatPart::Text("x".to_owned())])),
        ChatMessage {
            reasoning: Some("hm".to_owned()),
            tool_calls: Some(json!([call("1", "f", r#"{"a":[1]}"#), call("2", "g", "{}")])),
            ..message("assistant", "so".to_owned())
        },
        result("1", "one\ntwo"),
        with_content("user", parts(vec![image_part(), image_part()])),
        result("2", "three"),
        result("3", ""),
        with_content("user", parts(vec![image_part()])),
    ];
    assert_eq!(messages, expected);
    let sources: Vec<_> = media
        .iter()
        .map(|item| (item.source.as_ref().unwrap().text(), item.field.as_str()))
        .collect();
    let expected: [(&[u8], &str); 4] = [
        (b"a", "messages[0].content[0].source"),
        (b"b", "messages[2].content[1].content[1].source"),
        (b"c", "messages[2].content[1].content[3].source"),
        (b"d", "messages[2].content[0].source"),
    ];
    assert_eq!(sources, expected);
}

#[test]
fn passages_become_text_with_metadata() {
    let texts = json!([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]);
    let mut titled =
        document(json!({"type": "text", "media_type": "text/plain", "data": "a \"b\""}));
    titled["title"] = json!("T");
    titled["context"] = json!("C");
    let found = search_result("F", texts.clone());
    let chat = parse(&json!([
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
            {"type": "text", "text": "read"},
            document(json!({"type": "content", "content": texts})),
        ]}, titled, found, {"type": "text", "text": "so?"}]},
    ]));
    let first = "<document>\n<source>T</source>\n<context>C</context>\n\
                 <document_content>\na \"b\"\n</document_content>\n</document>\n";
    let second = "<search_result>\n<source>https://a.org</source>\n<title>F</title>\n\
                  <search_result_content>\none\ntwo\n</search_result_content>\n\
                  </search_result>\n";
    let user_parts = [first, second, "so?"].map(|text| ChatPart::Text(text.to_owned())).into();
    let read = "read\n<document>\n<document_content>\none\ntwo\n</document_content>\n</document>\n";
    let expected = [
        ChatMessage { tool_call_id: Some("1".to_owned()), ..message("tool", read.to_owned()) },
        ChatMessage { content: parts(user_parts), ..message("user", String::new()) },
    ];
    assert_eq!(chat.unwrap().messages, expected);
}

#[test]
fn consecutive_turns_of_one_role_are_joined() {
    let chat = parse(&json!([
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, image("i")]},
        {"role": "system", "content": "x-anthropic-billing-header: 1"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "h", "signature": "s"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [image("j")]},
        ]},
        {"role": "user", "content": "e"},
    ]));
    let text = |text: &str| ChatPart::Text(text.to_owned());
    let with_content =
        |role: &str, content| ChatMessage { content, ..message(role, String::new()) };
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let mut expected = vec![
        with_content("user", parts(vec![text("a"), text("b"), image_part(), text("c")])),
        ChatMessage {
            tool_calls: Some(json!([call])),
            reasoning: Some("h".to_owned()),
            ..message("assistant", "d".to_owned())
        },
        ChatMessage { tool_call_id: Some("1".to_owned()), ..message("tool", String::new()) },
        with_content("user", parts(vec![image_part(), text("e")])),
    ];
    let mut messages = chat.unwrap().messages;
    assert_eq!(messages, expected);

    append_user_to_results(&mut messages);
    expected.pop();
    expected[2].content = parts(vec![image_part(), text("e")]);
    assert_eq!(messages, expected);
}

#[test]
fn user_messages_around_moved_system_message_are_joined() {
    let mut messages =
        ["user", "system", "user"].map(|role| message(role, role.to_owned())).to_vec();
    put_system_first(&mut messages);
    let text = |text: &str| ChatPart::Text(text.to_owned());
    let user = ChatMessage {
        content: parts(vec![text("user"), text("user")]),
        ..message("user", String::new())
    };
    assert_eq!(messages, [message("system", "system".to_owned()), user]);
}

#[test]
fn billing_header_is_dropped_from_system_messages() {
    let header = "x-anthropic-billing-header: 1";
    let body = json!({
        "max_tokens": 5,
        "system": [
            {"type": "text", "text": header},
            {"type": "text", "text": "a"},
            {"type": "text", "text": "b"},
        ],
        "messages": [
            {"role": "user", "content": "hi"}, {"role": "system", "content": header},
            {"role": "system", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": []},
        ],
    });
    let chat = parse_text(body.to_string().into(), &BodyLimits::default()).unwrap();
    let expected = [("system", "ab"), ("user", "hi"), ("system", "c")];
    assert_eq!(chat.messages, expected.map(|(role, text)| message(role, text.to_owned())));
}

#[test]
fn large_image_shares_body() {
    let data = "AAAA".repeat(10_000);
    let body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    ]}]});
    let body = Bytes::from(body.to_string());
    let chat = parse_text(body.clone(), &BodyLimits::default()).unwrap();
    let Some(MediaInput::Base64(shared)) = &chat.media[0].source else { panic!("base64") };
    assert_eq!(shared, &data);
    assert!(body.as_ptr_range().contains(&shared.as_ptr()));
}

#[test]
fn invalid_message_names_field() {
    let refused = |messages: Value| parse(&messages).unwrap_err().param.unwrap();
    assert_eq!(refused(json!([])), "messages");
    assert_eq!(refused(json!([{"role": "user"}])), "messages[0].content");
    assert_eq!(refused(json!([{"content": "x"}])), "messages[0].role");
    assert_eq!(refused(json!([{"role": "tool", "content": "x"}])), "messages[0].role");
    assert_eq!(refused(json!([{"role": "user", "content": 3}])), "messages[0].content");
    assert_eq!(refused(json!([{"role": "user", "content": "x", "name": "n"}])), "messages[0].name");
    let result =
        |content: Value| json!({"type": "tool_result", "tool_use_id": "1", "content": content});
    let source = |source: Value| json!({"type": "image", "source": source});
    for (role, block, field) in [
        ("user", json!({"text": "x"}), ".type"),
        ("user", json!({"type": "text"}), ".text"),
        (
            "user",
            json!({"type": "text", "text": "x", "source": {"type": "url", "url": "x"}}),
            ".source",
        ),
        ("user", json!({"type": "text", "text": "x", "colour": "red"}), ".colour"),
        ("user", json!({"type": "document", "title": "x"}), ".source"),
        (
            "user",
            document(json!({"type": "base64", "media_type": "application/pdf", "data": "x"})),
            ".source.type",
        ),
        ("user", document(json!({"type": "url", "url": "x"})), ".source.type"),
        ("user", document(json!({"type": "file", "file_id": "x"})), ".source.type"),
        ("user", document(json!("x")), ".source"),
        ("user", document(json!({"type": "text"})), ".source.data"),
        ("user", document(json!({"type": "content"})), ".source.content"),
        ("user", document(json!({"type": "text", "data": "x", "content": "y"})), ".source.content"),
        (
            "user",
            document(json!({"type": "content", "content": [image("x")]})),
            ".source.content[0].source",
        ),
        (
            "user",
            with_citations(json!({"type": "document", "source": {"type": "text", "data": "x"}})),
            ".citations.enabled",
        ),
        (
            "user",
            with_citations(search_result("x", json!([{"type": "text", "text": "y"}]))),
            ".citations.enabled",
        ),
        ("user", search_result("x", json!([image("x")])), ".content[0].source"),
        (
            "user",
            json!({"type": "search_result", "source": {"type": "text", "data": "x"}}),
            ".source",
        ),
        ("user", json!({"type": "search_result", "source": "x", "content": "y"}), ".title"),
        ("assistant", document(json!({"type": "text", "data": "x"})), ".type"),
        ("user", json!({"type": "text", "text": "x", "title": "y"}), ".title"),
        ("user", source(json!({"type": "text", "data": "x"})), ".source.type"),
        ("user", json!({"type": "thinking", "thinking": "x"}), ".type"),
        ("assistant", image("x"), ".type"),
        ("assistant", result(json!("x")), ".type"),
        ("system", image("x"), ".type"),
        ("user", json!({"type": "image"}), ".source"),
        ("user", source(json!("x")), ".source"),
        ("user", source(json!({"url": "x"})), ".source.type"),
        ("user", source(json!({"type": "file", "file_id": "x"})), ".source.type"),
        ("user", source(json!({"type": "base64", "media_type": "image/png"})), ".source.data"),
        ("user", source(json!({"type": "url", "url": "x", "data": "x"})), ".source.data"),
        ("assistant", json!({"type": "tool_use", "name": "f", "input": {}}), ".id"),
        ("assistant", json!({"type": "tool_use", "id": "1", "input": {}}), ".name"),
        ("assistant", json!({"type": "tool_use", "id": "1", "name": "f", "input": [1]}), ".input"),
        ("user", json!({"type": "tool_result", "content": "x"}), ".tool_use_id"),
        ("user", result(json!([result(json!("x"))])), ".content[0].type"),
        ("user", result(json!([{"type": "text"}])), ".content[0].text"),
    ] {
        let messages = json!([{"role": role, "content": [block]}]);
        assert_eq!(refused(messages), format!("messages[0].content[0]{field}"));
    }
}

#[test]
fn excess_messages_or_blocks_are_refused() {
    let limits = BodyLimits { messages: 3, content_parts: 3, ..BodyLimits::default() };
    let outcome = |messages: Value| {
        let body = json!({"max_tokens": 5, "messages": messages});
        let parsed = parse_text(body.to_string().into(), &limits);
        parsed.map(drop).map_err(|error| (error.kind, error.param.unwrap()))
    };
    let block = json!({"type": "text", "text": "x"});
    let text = |count: usize| json!({"role": "user", "content": vec![block.clone(); count]});
    let result = json!({"type": "tool_result", "tool_use_id": "1", "content": [image("x")]});
    assert_eq!(outcome(json!([text(2), text(1)])), Ok(()));
    assert_eq!(
        outcome(json!([text(2), text(2)])),
        Err((ErrorKind::TooLarge, "messages[1].content[1]".to_owned()))
    );
    assert_eq!(outcome(json!([{"role": "user", "content": [result]}])), Ok(()));
    let twice = json!([text(0), {"role": "user", "content": [result]}]);
    assert_eq!(outcome(twice), Err((ErrorKind::TooLarge, "messages[1].content[0]".to_owned())));
}

#[test]
fn last_duplicate_field_wins_with_its_images() {
    let message = |url: &str| json!({"role": "user", "content": [image(url)]});
    let content = |url: &str| json!([image(url)]);
    let twice =
        format!(r#"{{"role": "user", "content": {}, "content": {}}}"#, content("b"), content("c"));
    let body =
        format!(r#"{{"max_tokens": 5, "messages": [{}], "messages": [{twice}]}}"#, message("a"));
    let chat = parse_text(body.into(), &BodyLimits::default()).unwrap();
    assert_eq!(chat.media.len(), 1);
    assert_eq!(chat.media[0].source.as_ref().unwrap().text(), b"c");
}

#[test]
fn name_of_chats_gets_the_name_here() {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let body = json!({"max_tokens": 5, "messages": messages, "stop": "x"});
    let error = parse_text(body.to_string().into(), &BodyLimits::default()).unwrap_err();
    assert_eq!(error.message, "'stop' is not supported; did you mean 'stop_sequences'?");
}
