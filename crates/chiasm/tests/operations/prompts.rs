//! The operator's say in how conversations are written.

use serde_json::{Value, json};

use super::serve;
use crate::support::Server;

/// Writes one word and as many more as it is told, and then as many as there are functions.
const TEMPLATE: &str = "{{ messages[0].content }}{{ ' word' * (more | default(0)) }}{{ ' word' * ((tools or []) | length) }}";

/// A request's tokens, with one function and these fields.
async fn tokens(server: &Server, fields: Value) -> u64 {
    let function = json!({"type": "function", "function": {"name": "f"}});
    let mut body = json!({"messages": [{"role": "user", "content": "word"}], "tools": [function], "max_tokens": 1});
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    server.chat(&body).await.ok()["usage"]["prompt_tokens"].as_u64().expect("a number")
}

#[tokio::test]
async fn variables_of_all_conversations_yield_to_those_of_one_and_uncalled_functions_are_left_out()
{
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
    assert!(two > one, "the function is in the prompt where it may be called");
    let word = two - one;
    assert_eq!(tokens(&server, json!({})).await, two + 3 * word);
    assert_eq!(tokens(&server, json!({"tool_choice": "none"})).await, one + 3 * word);

    let server = serve(&[&flags[..2], &flags[4..]].concat()).await;
    assert_eq!(tokens(&server, json!({"tool_choice": "none"})).await, two, "without the flags");
}

/// TranslateGemma's is like this: it takes one part, by its place, and its languages.
const OF_ONE_PART: &str = "{% set part = messages[0]['content'][0] %}{{ part['source_lang_code'] }} to {{ part.target_lang_code }}: {{ part['text'] }}";

#[tokio::test]
async fn a_template_may_be_given_parts_whatever_it_seems_to_want() {
    let part =
        json!({"type": "text", "text": "dog", "source_lang_code": "en", "target_lang_code": "es"});
    let body =
        json!({"messages": [{"role": "user", "content": [part]}], "return_token_strs": true});
    let server =
        serve(&["--chat-template", OF_ONE_PART, "--chat-template-content-format", "openai"]).await;
    let answer = server.post("/tokenize", &body).await.ok();
    let tokens = answer["token_strs"].as_array().expect("a list").iter().filter_map(Value::as_str);
    assert_eq!(tokens.collect::<String>().replace('\u{120}', " "), "en to es: dog");

    // It seems to want a string, in which there is no place for languages.
    let server = serve(&["--chat-template", OF_ONE_PART]).await;
    let refused = server.post("/tokenize", &body).await.refused(400);
    assert_eq!(refused, "messages[0].content[0].source_lang_code");
}
