//! Flags that control how conversations are rendered as prompts.

use serde_json::{Value, json};

use super::serve;
use crate::support::Server;

/// A template that writes the message, `more` words, and one word per function.
const TEMPLATE: &str = "{{ messages[0].content }}{{ ' word' * (more | default(0)) }}\
                        {{ ' word' * ((tools or []) | length) }}";

/// Returns the number of prompt tokens of a request with one function and `fields`.
async fn tokens(server: &Server, fields: Value) -> u64 {
    let function = json!({"type": "function", "function": {"name": "f"}});
    let messages = json!([{"role": "user", "content": "word"}]);
    let mut body = json!({"messages": messages, "tools": [function], "max_tokens": 1});
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    server.chat(&body).await.ok()["usage"]["prompt_tokens"].as_u64().expect("a number")
}

#[tokio::test]
async fn request_kwargs_override_default_template_kwargs() {
    let directory = tempfile::tempdir().expect("a directory");
    let template = directory.path().join("template.jinja");
    std::fs::write(&template, TEMPLATE).expect("a template");
    let flags = [
        "--chat-template",
        &template.display().to_string(),
        "--default-chat-template-kwargs",
        r#"{"more": 3}"#,
        "--tool-call-parser",
        "hermes",
    ];
    let server = serve(&[&flags[..], &["--exclude-tools-when-tool-choice-none"]].concat()).await;
    let none = json!({"tool_choice": "none", "chat_template_kwargs": {"more": 0}});
    let one = tokens(&server, none).await;
    let two = tokens(&server, json!({"chat_template_kwargs": {"more": 0}})).await;
    assert!(two > one, "a function that may be called is in the prompt");
    let word = two - one;
    assert_eq!(tokens(&server, json!({})).await, two + 3 * word);
    assert_eq!(tokens(&server, json!({"tool_choice": "none"})).await, one + 3 * word);

    let server = serve(&[&flags[..2], &flags[4..]].concat()).await;
    assert_eq!(tokens(&server, json!({"tool_choice": "none"})).await, two, "without the flags");
}

/// A template like TranslateGemma's, which indexes the first part and reads its languages.
const PART_TEMPLATE: &str = "{% set part = messages[0]['content'][0] %}\
                             {{ part['source_lang_code'] }} to {{ part.target_lang_code }}: \
                             {{ part['text'] }}";

#[tokio::test]
async fn content_format_flag_overrides_template_detection() {
    let part =
        json!({"type": "text", "text": "dog", "source_lang_code": "en", "target_lang_code": "es"});
    let body =
        json!({"messages": [{"role": "user", "content": [part]}], "return_token_strs": true});
    let server =
        serve(&["--chat-template", PART_TEMPLATE, "--chat-template-content-format", "openai"])
            .await;
    let answer = server.post("/tokenize", &body).await.ok();
    let tokens = answer["token_strs"].as_array().expect("a list").iter().filter_map(Value::as_str);
    assert_eq!(tokens.collect::<String>().replace('\u{120}', " "), "en to es: dog");

    // Detection takes the template for one of strings, which have no languages.
    let server = serve(&["--chat-template", PART_TEMPLATE]).await;
    let refused = server.post("/tokenize", &body).await.refused(400);
    assert_eq!(refused, "messages[0].content[0].source_lang_code");
}
