//! Requests of third-party client packages, recorded by `cargo xtask record-clients` and sent to a
//! simulated engine.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::support::{Server, demo_model};
use serde_json::{Value, json};

/// The clients that must be among the recorded ones, as prefixes of file names.
const CLIENTS: [&str; 11] = [
    "anthropic-",
    "instructor-",
    "langchain-",
    "litellm-",
    "llama-index-",
    "openai-2-",
    "openai-3-",
    "openai-agents-",
    "openai-npm-",
    "pydantic-ai-",
    "vllm-bench-",
];

/// Reads the recorded calls by name.
fn recorded_calls() -> BTreeMap<String, Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded");
    let files =
        std::fs::read_dir(folder).expect("recorded calls").map(|file| file.expect("a file").path());
    let read = |path: std::path::PathBuf| {
        let call: Value =
            serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        (path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned(), call)
    };
    files.map(read).collect()
}

#[tokio::test]
async fn recorded_client_requests_are_accepted() {
    let model = demo_model().display().to_string();
    // LlamaIndex accepts only OpenAI's model names, so a second server has such a name.
    let args = [&model, "--sim", "1", "--sim-speedup", "1000", "--tool-call-parser", "hermes"];
    let servers = ["m", "gpt-4o"]
        .map(|name| (name, Server::start(&[&args[..], &["--served-model-name", name]].concat())));
    for (_, server) in &servers {
        server.wait_ready(1, Duration::from_secs(20)).await;
    }
    let calls = recorded_calls();
    for client in CLIENTS {
        assert!(calls.keys().any(|name| name.starts_with(client)), "{client}");
    }
    let mut refused = Vec::new();
    for (name, call) in &calls {
        let path = call["path"].as_str().expect("a path");
        let body = &call["body"];
        let (_, server) =
            servers.iter().find(|(name, _)| body["model"] == *name).expect("a served model");
        let answer = server.post(path, body).await;
        if answer.status != 200 {
            refused.push(format!("{name} ({}): {} {}", call["client"], answer.status, answer.text));
            continue;
        }
        let text = answer.text.trim_end();
        if body["stream"] == true {
            let is_whole = ["data: [DONE]", "\"type\":\"message_stop\"}"]
                .iter()
                .any(|end| text.ends_with(end));
            assert!(
                is_whole
                    || text.contains("event: response.completed")
                    || text.contains("event: response.incomplete"),
                "{name}: {text}"
            );
        } else {
            assert!(
                answer.json()["usage"].is_object() || answer.json()["input_tokens"].is_u64(),
                "{name}: {text}"
            );
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[tokio::test]
async fn unsupported_fields_are_refused_by_name() {
    let model = demo_model().display().to_string();
    let server =
        Server::start(&[&model, "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"]);
    server.wait_ready(1, Duration::from_secs(20)).await;
    let fields = [
        ("modalities", json!(["text", "audio"])),
        ("audio", json!({"voice": "alloy", "format": "wav"})),
        ("web_search_options", json!({})),
        ("moderation", json!({"model": "omni-moderation-latest"})),
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!({"name": "f"})),
        ("verbosity", json!("low")),
        // Invalid values of ignored fields.
        ("user", json!(7)),
        ("metadata", json!("a")),
        ("store", json!("yes")),
    ];
    for (path, body) in [
        (
            "/v1/chat/completions",
            json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}),
        ),
        ("/v1/completions", json!({"model": "m", "prompt": "x"})),
        ("/v1/responses", json!({"model": "m", "input": "x"})),
    ] {
        server.post(path, &body).await.ok();
        for (field, value) in &fields {
            let mut body = body.clone();
            body[*field] = value.clone();
            assert_eq!(server.post(path, &body).await.refused(400), *field, "{path}");
        }
    }
}
