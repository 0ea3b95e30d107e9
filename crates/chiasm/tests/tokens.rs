//! What is told of a prompt's tokens: `/tokenize` and `/detokenize`.
#![allow(clippy::expect_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};
use support::{Answer, Server, demo_model};

const SOON: Duration = Duration::from_secs(20);
/// Words that no simulated engine has room for.
const MANY: usize = 20_000;

/// A server before a fast simulated engine.
async fn serve(extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args = vec![model.as_str(), "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(1, SOON).await;
    server
}

fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(fields);
    body
}

/// A conversation with a picture and a function.
fn conversation() -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(DAWN.jpeg));
    let content = json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]);
    let function = json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    json!({"model": "m", "messages": [{"role": "user", "content": content}], "tools": [function]})
}

#[tokio::test]
async fn the_tokens_of_a_conversation_are_those_that_an_engine_gets() {
    let server = serve(&[]).await;
    let context = server.client.get(format!("{}/v1/models", server.url)).send().await.expect("models");
    let context = support::json(context).await["data"][0]["max_model_len"].clone();
    for changes in [
        json!({}),
        json!({"add_generation_prompt": false}),
        json!({"mm_processor_kwargs": {"max_pixels": 50176}, "chat_template_kwargs": {"a": 1}}),
    ] {
        let body = with(conversation(), changes);
        let told = server.post("/tokenize", &body).await.ok();
        let asked = with(body, json!({"return_token_ids": true, "max_tokens": 1, "tool_choice": "none"}));
        let answered = server.chat(&asked).await.ok();
        assert_eq!(told["tokens"], answered["prompt_token_ids"]);
        assert_eq!(told["count"], answered["usage"]["prompt_tokens"]);
        assert_eq!((&told["max_model_len"], &told["token_strs"]), (&context, &Value::Null));
    }
}

#[tokio::test]
async fn a_text_becomes_tokens_with_their_names_and_is_made_of_them_again() {
    let server = serve(&[]).await;
    let text = "the quick fox äöü 日本 🙂<|im_end|>";
    let told = server.post("/tokenize", &json!({"prompt": text, "return_token_strs": true})).await.ok();
    let names: Vec<&str> = told["token_strs"].as_array().expect("names").iter().filter_map(Value::as_str).collect();
    assert_eq!(told["count"], names.len());
    assert!(names.starts_with(&["t", "h", "e", "Ġ", "q"]) && names.ends_with(&["<|im_end|>"]), "{names:?}");
    let back = server.post("/detokenize", &json!({"model": "m", "tokens": told["tokens"]})).await.ok();
    assert_eq!(back, json!({"prompt": text}));
    assert_eq!(server.post("/detokenize", &json!({"tokens": []})).await.ok(), json!({"prompt": ""}));
    assert_eq!(server.post("/tokenize", &json!({"prompt": ""})).await.ok()["count"], 0);

    // Whoever asks whether a prompt fits is told, also if it does not.
    let long = "the ".repeat(MANY);
    let told = server.post("/tokenize", &json!({"prompt": long})).await.ok();
    assert!(told["count"].as_u64() > told["max_model_len"].as_u64(), "{}", told["count"]);
    let told = server.post("/tokenize", &json!({"messages": [{"role": "user", "content": long}]})).await.ok();
    assert!(told["count"].as_u64() > told["max_model_len"].as_u64(), "{}", told["count"]);
    assert_eq!(server.metric("chiasm_requests_total{endpoint=\"detokenize\",status=\"200\"}").await, 2.0);
}

#[tokio::test]
async fn what_is_wrong_names_its_field_and_who_has_no_key_is_told_nothing() {
    let server = serve(&["--api-key", "k"]).await;
    let post = async |path: &str, body: Value, key: &str| {
        let request = server.client.post(format!("{}{path}", server.url)).header("content-type", "application/json");
        let request = request.header("authorization", format!("Bearer {key}")).body(body.to_string());
        Answer::of(request.send().await.expect("an answer")).await
    };
    for (path, body, status, param) in [
        ("/tokenize", json!({"prompt": 5}), 400, "prompt"),
        ("/tokenize", json!({"model": "other", "prompt": "a"}), 404, "model"),
        ("/tokenize", json!({"messages": [{"role": "nobody", "content": "a"}]}), 400, "messages[0].role"),
        ("/detokenize", json!({"tokens": [1, u32::MAX]}), 400, "tokens"),
        ("/detokenize", json!({"tokens": [1, -1]}), 400, "tokens"),
        ("/detokenize", json!({}), 400, "tokens"),
    ] {
        assert_eq!(post(path, body.clone(), "k").await.refused(status), param, "{body}");
        assert_eq!(post(path, body, "wrong").await.status, 401);
    }
}
