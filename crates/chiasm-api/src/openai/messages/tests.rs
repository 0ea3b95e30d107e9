use bytes::Bytes;
use chiasm_media::ByteBudget;
use chiasm_prompt::ChatTemplate;
use chiasm_types::Modality;
use serde_json::json;

use super::super::request;
use super::*;
use crate::ErrorKind;
use crate::openai::BodyLimits;

fn parse(messages: &Value) -> Result<(Vec<ChatMessage>, Vec<MediaRef>), ApiError> {
    let mut intake = Intake::from_json(&json!({"messages": messages}));
    request::read(&mut intake).map(|(_, Messages { messages, media })| (messages, media))
}

fn refused(messages: Value) -> String {
    parse(&messages).unwrap_err().param.unwrap()
}

#[test]
fn images_keep_order_with_their_fields() {
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:x", "detail": "high"}, "uuid": "u"},
            {"type": "image_url", "image_url": "http://b"},
            {"type": "image_url", "image_url": null, "uuid": "v"},
            {"type": "image_url", "image_url": {"uuid": "w"}},
        ]},
    ]);
    let (messages, media) = parse(&messages).unwrap();
    assert_eq!(messages.len(), 2);
    let item = |url: Option<&str>, uuid: Option<&str>, part: usize| MediaRef {
        modality: Modality::Image,
        source: url.map(|url| MediaInput::Url(url.to_owned().into())),
        uuid: uuid.map(str::to_owned),
        field: format!("messages[1].content[{part}].image_url"),
    };
    assert_eq!(
        media,
        [
            item(Some("data:x"), Some("u"), 1),
            item(Some("http://b"), None, 2),
            item(None, Some("v"), 3),
            item(None, Some("w"), 4),
        ]
    );
}

#[test]
fn video_or_audio_parts_are_media_items() {
    let messages = json!([{"role": "user", "content": [
        {"type": "video_url", "video_url": {"url": "http://a"}},
        {"type": "audio_url", "audio_url": "http://b", "uuid": "u"},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
    ]}]);
    let (messages, media) = parse(&messages).unwrap();
    let items: Vec<_> = media
        .iter()
        .map(|item| {
            (item.modality.name(), item.source.as_ref().unwrap().text(), item.field.as_str())
        })
        .collect();
    assert_eq!(
        items,
        [
            ("video", &b"http://a"[..], "messages[0].content[0].video_url"),
            ("audio", b"http://b", "messages[0].content[1].audio_url"),
            ("audio", b"data:;base64,QUJD", "messages[0].content[2].input_audio"),
        ]
    );
    let Some(ChatContent::Parts(parts)) = &messages[0].content else { panic!("parts") };
    assert_eq!(parts[0], ChatPart::Media(Modality::Video));
}

#[test]
fn invalid_message_names_field() {
    assert_eq!(refused(json!([])), "messages");
    for role in ["user", "system", "developer", "tool"] {
        assert_eq!(refused(json!([{"role": role, "content": null}])), "messages[0].content");
    }
    assert_eq!(refused(json!([{"role": "king", "content": "x"}])), "messages[0].role");
    assert_eq!(refused(json!([{"role": "user", "content": 3}])), "messages[0].content");
    assert_eq!(
        refused(json!([{"role": "user", "content": [{"type": "smell_url", "smell_url": "x"}]}])),
        "messages[0].content[0].type"
    );
    for (part, field) in [
        (json!({"type": "video_url", "image_url": "x", "video_url": "x"}), ".image_url"),
        (json!({"type": "video_url", "image_url": "x"}), ".video_url.url"),
        (json!({"type": "text", "text": "x", "audio_url": "x"}), ".audio_url"),
        (json!({"type": "text", "text": "x", "uuid": "x"}), ".uuid"),
        (json!({"type": "text", "refusal": "x"}), ".text"),
        (json!({"type": "refusal", "refusal": "x", "text": "x"}), ".text"),
        (json!({"type": "image_url", "image_url": "x", "thinking": "x"}), ".thinking"),
        (json!({"type": "image_url", "image_url": "x", "detail": "low"}), ".detail"),
        (json!({"type": "text", "text": "x", "detail": "low"}), ".detail"),
        (json!({"type": "input_audio", "input_audio": {"format": "wav"}}), ".input_audio.data"),
        (json!({"type": "input_audio", "input_audio": "x"}), ".input_audio"),
        (json!({"type": "audio_url", "audio_url": {"data": "x"}}), ".audio_url.data"),
    ] {
        let messages = json!([{"role": "user", "content": [part]}]);
        assert_eq!(refused(messages), format!("messages[0].content[0]{field}"));
    }
    assert_eq!(
        refused(json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])),
        "messages[0].content[0].image_url.url"
    );
    assert_eq!(
        refused(json!([{"role": "user", "content": "x", "audio": {}}])),
        "messages[0].audio"
    );
    assert_eq!(
        refused(
            json!([{"role": "user", "content": [{"type": "image_url", "uuid": "x".repeat(300)}]}])
        ),
        "messages[0].content[0].uuid"
    );
}

#[test]
fn assistant_message_with_calls_needs_no_content() {
    let messages = json!([{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}]);
    assert!(parse(&messages).unwrap().0[0].content.is_none());
    let called = |calls: Value| json!([{"role": "user", "content": "x", "tool_calls": calls}]);
    assert_eq!(refused(called(json!([{"id": "1"}]))), "messages[0].tool_calls");
    assert!(parse(&called(json!([]))).is_ok());
}

#[test]
fn answer_is_accepted_as_message() {
    let reasoning = |fields: Value| {
        let mut message = json!({"role": "assistant", "content": null});
        message.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        parse(&json!([message]))
            .map(|(mut messages, _)| messages.remove(0).reasoning)
            .map_err(|error| error.param.unwrap())
    };
    let some = |text: &str| Ok(Some(text.to_owned()));
    assert_eq!(reasoning(json!({"reasoning": "a", "reasoning_content": "b"})), some("a"));
    assert_eq!(reasoning(json!({"reasoning_content": "b", "reasoning": "a"})), some("a"));
    assert_eq!(reasoning(json!({"reasoning_content": "b", "reasoning": null})), some("b"));
    let extras = json!({
        "refusal": null,
        "annotations": [],
        "audio": null,
        "function_call": null,
        "tool_calls": null,
    });
    assert_eq!(reasoning(extras), Ok(None));
    assert_eq!(reasoning(json!({"refusal": "no"})), Ok(None));
    let extras = json!({
        "provider_specific_fields": {"refusal": null},
        "content": "x",
        "cache_control": {"type": "ephemeral"},
    });
    assert_eq!(reasoning(extras), Ok(None));
    assert_eq!(reasoning(json!({"reasoning": 3})), Err("messages[0].reasoning".to_owned()));
    assert_eq!(
        refused(json!([{"role": "user", "content": "x", "reasoning": "a"}])),
        "messages[0].reasoning"
    );
    let cached = json!([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]);
    assert_eq!(parse(&json!([{"role": "system", "content": cached}])).unwrap().0.len(), 1);
}

#[test]
fn text_parts_of_several_apis_are_accepted() {
    let parts = json!([
        "a",
        {"type": "text", "text": "b"},
        {"type": "input_text", "text": "c"},
        {"type": "output_text", "text": "d", "refusal": null},
        {"type": "refusal", "refusal": "e"},
        {"type": "thinking", "thinking": "f"},
    ]);
    let (messages, media) = parse(&json!([{"role": "assistant", "content": parts}])).unwrap();
    let texts = ["a", "b", "c", "d", "e", "f"].map(|text| ChatPart::Text(text.to_owned()));
    assert_eq!(messages[0].content, Some(ChatContent::Parts(texts.to_vec())));
    assert!(media.is_empty());
}

#[test]
fn input_image_part_may_have_detail() {
    let part =
        json!({"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,eA=="});
    let (messages, media) = parse(&json!([{"role": "user", "content": [part]}])).unwrap();
    assert_eq!(
        messages[0].content,
        Some(ChatContent::Parts(vec![ChatPart::Media(Modality::Image)]))
    );
    assert_eq!(media.len(), 1);
}

#[test]
fn media_part_without_type_is_accepted() {
    let parts = json!([
        {"image_url": "http://a"},
        {"input_audio": {"data": "QUJD", "format": "wav"}},
        {"type": null, "video_url": {"url": "http://b"}},
    ]);
    let (_, media) = parse(&json!([{"role": "user", "content": parts}])).unwrap();
    let modalities: Vec<_> = media.iter().map(|item| item.modality.name()).collect();
    assert_eq!(modalities, ["image", "audio", "video"]);
    for part in [json!({"text": "x"}), json!({"uuid": "x"}), json!({})] {
        assert_eq!(
            refused(json!([{"role": "user", "content": [part]}])),
            "messages[0].content[0].type"
        );
    }
    let both = json!([{"image_url": "http://a", "video_url": "http://b"}]);
    assert_eq!(
        refused(json!([{"role": "user", "content": both}])),
        "messages[0].content[0].video_url"
    );
}

/// Parses messages with a template that has the role `document`. It reads a part's `language` if
/// `wants_parts` is `true`.
fn with_template(messages: &Value, wants_parts: bool) -> Result<Vec<ChatMessage>, ApiError> {
    let content = if wants_parts {
        "{% for part in m['content'] %}{{ part.language }}{{ part['text'] }}{% endfor %}"
    } else {
        "{{ m.language }}"
    };
    let template = format!(
        "{{% for m in messages %}}{{% if m.role == 'document' %}}{{% endif %}}\
         {content}{{% endfor %}}"
    );
    let dir = tempfile::tempdir().unwrap();
    let mut intake = Intake::from_json(&json!({"messages": messages}));
    intake.template = ChatTemplate::from_model_dir(dir.path(), Some(template.as_ref())).unwrap();
    request::read(&mut intake).map(|(_, Messages { messages, .. })| messages)
}

#[test]
fn template_may_add_roles_or_part_fields() {
    let messages = json!([
        {"role": "document", "content": "x"},
        {"role": "user", "content": [
            {"type": "text", "text": "y", "language": {"from": ["en"]}},
            {"type": "image_url", "image_url": "http://a", "language": 3},
            {"type": "text", "text": "z", "language": null},
        ]},
    ]);
    let read = with_template(&messages, true).unwrap();
    assert_eq!(read[0].role, "document");
    let extended = |part, language| {
        let fields = Map::from_iter([("language".to_owned(), language)]);
        ChatPart::Extended(Box::new(ExtendedPart { part, fields }))
    };
    let parts = vec![
        extended(ChatPart::Text("y".to_owned()), json!({"from": ["en"]})),
        extended(ChatPart::Media(Modality::Image), json!(3)),
        ChatPart::Text("z".to_owned()),
    ];
    assert_eq!(read[1].content, Some(ChatContent::Parts(parts)));
    let refused = |messages: &Value, wants_parts| {
        with_template(messages, wants_parts).unwrap_err().param.unwrap()
    };
    assert_eq!(refused(&messages, false), "messages[1].content[0].language");
    for (field, message) in [
        ("role", json!({"role": "documents", "content": "x"})),
        ("content", json!({"role": "document"})),
        ("language", json!({"role": "user", "content": "x", "language": "en"})),
        (
            "content[0].tongue",
            json!({"role": "user", "content": [{"type": "text", "text": "x", "tongue": "en"}]}),
        ),
    ] {
        assert_eq!(refused(&json!([message]), true), format!("messages[0].{field}"));
    }
}

#[test]
fn excess_messages_or_parts_are_refused() {
    let limits = BodyLimits { messages: 2, content_parts: 3, ..BodyLimits::default() };
    let outcome = |messages: &Value| {
        let body = json!({"messages": messages}).to_string();
        let mut intake = Intake::new(body.into(), &limits, &ByteBudget::new(1 << 20));
        let read = request::read::<Messages>(&mut intake);
        read.map(drop).map_err(|error| (error.kind, error.param.unwrap()))
    };
    let message = |parts: usize| json!({"role": "user", "content": vec!["x"; parts]});
    assert_eq!(outcome(&json!([message(2), message(1)])), Ok(()));
    assert_eq!(
        outcome(&json!([message(2), message(2)])),
        Err((ErrorKind::TooLarge, "messages[1].content[1]".to_owned()))
    );
    assert_eq!(
        outcome(&json!([message(0), message(0), message(0)])),
        Err((ErrorKind::TooLarge, "messages[2]".to_owned()))
    );
}

#[test]
fn large_url_without_escapes_shares_body() {
    let url =
        |separator: &str| format!("data:image{separator}png;base64,{}", "AAAA".repeat(10_000));
    let parsed = |url: &str| {
        let message = format!(
            r#"{{"role": "user", "content": [{{"type": "image_url", "image_url": "{url}"}}]}}"#
        );
        let body = Bytes::from(format!(r#"{{"messages": [{message}]}}"#));
        let budget = ByteBudget::new(1 << 20);
        let mut intake = Intake::new(body.clone(), &BodyLimits::default(), &budget);
        let (_, Messages { media, .. }) = request::read(&mut intake).unwrap();
        let url = media[0].source.clone().unwrap();
        (body.as_ptr_range().contains(&url.text().as_ptr()), url, intake.into_charge().bytes())
    };
    let (in_body, plain, few) = parsed(&url("/"));
    let (copied, escaped, more) = parsed(&url("\\/"));
    assert!(in_body && !copied);
    assert_eq!((plain.text(), escaped.text()), (url("/").as_bytes(), url("/").as_bytes()));
    assert!(few < 10_000 && more > 40_000, "{few} and {more}");
}

#[test]
fn last_duplicate_field_wins_with_its_images() {
    let image = |name: &str| format!(r#"{{"type": "image_url", "image_url": "http://{name}"}}"#);
    let message = |content: &str| format!(r#"{{"role": "user", {content}}}"#);
    let twice = message(&format!(r#""content": [{}], "content": [{}]"#, image("a"), image("b")));
    let body = format!(
        r#"{{"messages": [{}], "messages": [{twice}]}}"#,
        message(&format!(r#""content": [{}]"#, image("c")))
    );
    let mut intake = Intake::new(body.into(), &BodyLimits::default(), &ByteBudget::new(1 << 20));
    let (_, Messages { media, .. }) = request::read(&mut intake).unwrap();
    assert_eq!(media.len(), 1);
    assert_eq!(media[0].source.as_ref().unwrap().text(), b"http://b");
}

#[test]
fn broken_json_names_body_instead_of_field() {
    assert_eq!(refused(json!([{"role": 3, "content": "x"}])), "messages[0].role");
    assert_eq!(refused(json!([3])), "messages[0]");
    assert_eq!(refused(json!("x")), "messages");
    let mut intake = Intake::new(
        r#"{"messages": [{"role": "user", "content": "x"#.into(),
        &BodyLimits::default(),
        &ByteBudget::new(1 << 20),
    );
    let error = request::read::<Messages>(&mut intake).err().unwrap();
    assert_eq!((error.code, error.param.as_deref()), ("invalid_json", Some("body")));
}
