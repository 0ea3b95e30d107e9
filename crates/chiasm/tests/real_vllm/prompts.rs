//! Data about prompts: tokens, log probabilities and texts, compared with `vllm serve`.

use std::collections::BTreeSet;

use chiasm::scenarios::DAWN;
use serde_json::{Map, Value, json};

use super::environment::Reference;
use super::requests::{image, text};
use crate::support::{Answer, Server};

/// The tolerated difference between numbers of two runs of a model.
const TOLERANCE: f64 = 1e-3;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Returns paths and requests with the fields of their answers to compare.
fn requests() -> Vec<(&'static str, Value, &'static [&'static str])> {
    let messages = json!([{"role": "user", "content": [image(DAWN), text("what is this?")]}]);
    let function =
        json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    let fields: &[&str] =
        &["text", "finish_reason", "logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids"];
    let complete = |settings: Value| {
        let mut request =
            json!({"model": "m", "max_tokens": 6, "temperature": 0, "ignore_eos": true});
        request
            .as_object_mut()
            .expect("an object")
            .extend(settings.as_object().cloned().unwrap_or_default());
        // In a stream with an echo, vLLM sends the prompt's ids even if not requested.
        let fields = if request["stream"] == true { &fields[..3] } else { fields };
        (COMPLETIONS, request, fields)
    };
    let tokens: &[&str] = &["count", "max_model_len", "tokens", "token_strs"];
    let words = "the quick äöü 日本 🙂<|im_end|>";
    vec![
        ("/tokenize", json!({"model": "m", "prompt": words, "return_token_strs": true}), tokens),
        ("/tokenize", json!({"prompt": words, "add_special_tokens": false}), tokens),
        ("/tokenize", json!({"messages": messages, "return_token_strs": true}), tokens),
        (
            "/tokenize",
            json!({"messages": messages, "tools": [function], "add_generation_prompt": false}),
            tokens,
        ),
        ("/detokenize", json!({"model": "m", "tokens": [40, 41, 300, 393, 5]}), &["prompt"]),
        ("/detokenize", json!({"tokens": []}), &["prompt"]),
        (
            CHAT,
            json!({
                "model": "m",
                "messages": messages,
                "max_tokens": 4,
                "temperature": 0,
                "prompt_logprobs": 3,
            }),
            &["prompt_logprobs"],
        ),
        complete(json!({"prompt": words, "prompt_logprobs": 0})),
        complete(json!({"prompt": words, "echo": true})),
        complete(json!({"prompt": words, "echo": true, "logprobs": 2})),
        complete(json!({"prompt": [40, 41, 300, 5], "echo": true, "logprobs": 0})),
        complete(json!({"prompt": words, "echo": true, "logprobs": 1, "max_tokens": 0})),
        complete(json!({"prompt": words, "echo": true, "return_token_ids": true, "logprobs": 1})),
        complete(json!({"prompt": words, "echo": true, "logprobs": 2, "stream": true})),
        complete(json!({"prompt": [40, 41, 300, 5], "echo": true, "stream": true})),
        complete(json!({"prompt": words, "echo": true, "max_tokens": 0, "stream": true})),
        complete(json!({"prompt": words, "skip_reading_prefix_cache": true})),
    ]
}

/// Records the answers of `vllm serve`.
pub(crate) async fn record(reference: &Reference) -> Vec<Value> {
    let mut recorded = Vec::new();
    for (path, request, _) in requests() {
        recorded.push(merge(&reference.post(path, &request).await));
    }
    recorded
}

/// Asserts that the server gives the recorded answers of `vllm serve` of this version.
pub(crate) async fn assert_same(server: &Server, recorded: &[Value], version: &str) {
    for ((path, request, fields), theirs) in requests().iter().zip(recorded) {
        let answer = server.post(path, request).await;
        let mut ours = merge(&answer);
        let mut theirs = theirs.clone();
        if version.starts_with("0.31.") && request["stream"] == true {
            // This version counts offsets in the text as streamed, later ones per token.
            for answer in [&mut ours, &mut theirs] {
                answer["logprobs"].as_object_mut().map(|logprobs| logprobs.remove("text_offset"));
            }
        }
        for field in *fields {
            assert_close(&ours[field], &theirs[field], &format!("{field} of {request}"));
        }
    }
    let uncached = json!({
        "model": "m",
        "prompt": vec![300; 100],
        "max_tokens": 1,
        "skip_reading_prefix_cache": true,
    });
    for _ in 0..2 {
        let answer = server.post(COMPLETIONS, &uncached).await.ok();
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{answer}");
    }
}

/// Returns an answer's fields merged with those of its first choice. The chunks of a stream are
/// concatenated.
fn merge(answer: &Answer) -> Value {
    if !answer.text.starts_with("data: ") {
        let mut body = answer.ok();
        let choice = body["choices"][0].as_object().cloned().unwrap_or_default();
        body.as_object_mut().expect("an object").extend(choice);
        return body;
    }
    let mut all = Map::new();
    for chunk in answer.chunks() {
        for (name, more) in chunk["choices"][0].as_object().into_iter().flatten() {
            add(all.entry(name).or_insert(Value::Null), more);
        }
    }
    all.into()
}

fn add(all: &mut Value, more: &Value) {
    match (all, more) {
        (_, Value::Null) => {}
        (Value::String(all), Value::String(more)) => all.push_str(more),
        (Value::Array(all), Value::Array(more)) => all.extend(more.iter().cloned()),
        (Value::Object(all), Value::Object(more)) => {
            more.iter().for_each(|(name, more)| add(all.entry(name).or_insert(Value::Null), more));
        }
        (all, more) => *all = more.clone(),
    }
}

/// Asserts that two values are equal, except for small differences of numbers.
fn assert_close(ours: &Value, theirs: &Value, what: &str) {
    match (ours, theirs) {
        (Value::Number(ours), Value::Number(theirs)) if ours.is_f64() || theirs.is_f64() => {
            let difference = ours
                .as_f64()
                .zip(theirs.as_f64())
                .map_or(f64::NAN, |(ours, theirs)| (ours - theirs).abs());
            assert!(difference <= TOLERANCE, "{what}: {ours}, not {theirs}");
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            assert_eq!(ours.len(), theirs.len(), "{what}: {ours:?}, not {theirs:?}");
            ours.iter().zip(theirs).enumerate().for_each(|(i, (ours, theirs))| {
                assert_close(ours, theirs, &format!("[{i}] {what}"))
            });
        }
        (Value::Object(ours), Value::Object(theirs)) => {
            let names = |map: &Map<String, Value>| map.keys().cloned().collect::<BTreeSet<_>>();
            assert_eq!(names(ours), names(theirs), "{what}");
            ours.iter().for_each(|(name, ours)| {
                assert_close(ours, &theirs[name], &format!("{name} {what}"))
            });
        }
        _ => assert_eq!(ours, theirs, "{what}"),
    }
}
