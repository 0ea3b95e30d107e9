//! LoRA adapters with simulated engines, whose answers name the adapter that they used.

use std::time::Duration;

use crate::support::adapters::{adapter, answered_by, body, overlap};
use crate::support::{Answer, Server, demo_model};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(20);

async fn serve(engines: &str, flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let args = [&model, "--served-model-name", "m", "--sim", engines, "--sim-speedup", "1000"];
    let server = Server::start(&[&args, flags].concat());
    server.wait_ready(engines.parse().expect("a number"), TIMEOUT).await;
    server
}

async fn get(server: &Server, path: &str) -> Value {
    let response =
        server.client.get(format!("{}{path}", server.url)).send().await.expect("an answer");
    Answer::read(response).await.ok()
}

/// Asserts a refusal with this status and `error.param`. Returns its message.
#[track_caller]
fn assert_refused(answer: &Answer, status: u16, param: &str) -> String {
    assert_eq!(answer.status, status, "{}", answer.text);
    let error = answer.json()["error"].clone();
    assert_eq!(error["param"], param, "{}", answer.text);
    error["message"].as_str().expect("text").to_owned()
}

#[tokio::test]
async fn adapters_work_in_all_apis_with_separate_blocks() {
    let dir = tempfile::tempdir().expect("a folder");
    let a = format!("a={}", adapter(dir.path(), "one", 8).display());
    let b = json!({"name": "b", "path": adapter(dir.path(), "two", 24), "base_model_name": "m"})
        .to_string();
    let server = serve("2", &["--lora-modules", &a, &b]).await;
    let models = get(&server, "/v1/models").await;
    let ids: Vec<_> = models["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|model| model["id"].clone())
        .collect();
    assert_eq!(ids, ["m", "a", "b"]);
    let base = &models["data"][0];
    assert_eq!((base["root"].as_str(), &base["parent"]), (demo_model().to_str(), &Value::Null));
    let card = get(&server, "/v1/models/a").await;
    assert_eq!((&card["parent"], card["root"].as_str()), (&json!("m"), a.strip_prefix("a=")));
    assert_eq!(card["max_model_len"], base["max_model_len"]);

    for model in ["m", "a", "b"] {
        let first = server.chat(&body(model)).await;
        assert_eq!(first.ok()["model"], model);
        let name = answered_by(&first);
        assert_eq!(
            name.as_deref().and_then(|name| name.split('@').next()),
            (model != "m").then_some(model)
        );
        assert_eq!(overlap(&first), (0, 0), "{model} shares no blocks");
        let again = server.chat(&body(model)).await;
        let (predicted, cached) = overlap(&again);
        assert!(
            predicted > 5 && cached == 16 * predicted,
            "{model}: {predicted} blocks, {cached} tokens"
        );
        assert_eq!(
            again.header("x-chiasm-worker"),
            first.header("x-chiasm-worker"),
            "the worker with the model's blocks"
        );
    }
    assert_eq!(server.metric("chiasm_overlap_error_blocks_total").await, 0.0);

    let request = |model: &str, fields: Value| {
        let mut body = json!({"model": model});
        body.as_object_mut()
            .expect("an object")
            .extend(fields.as_object().expect("an object").clone());
        body
    };
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, fields) in [
        ("/v1/completions", json!({"prompt": "hi"})),
        ("/v1/responses", json!({"input": "hi"})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 8})),
    ] {
        let answer = server.post(path, &request("a", fields.clone())).await;
        assert_eq!(answer.ok()["model"], "a", "{path}");
        assert_eq!(server.post(path, &request("c", fields)).await.status, 404, "{path}");
    }
    for (path, fields) in [
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/tokenize", json!({"prompt": "hi"})),
        ("/detokenize", json!({"tokens": [1]})),
    ] {
        server.post(path, &request("a", fields.clone())).await.ok();
        assert_eq!(server.post(path, &request("c", fields)).await.status, 404, "{path}");
    }
    assert_eq!(server.post("/v1/load_lora_adapter", &json!({})).await.status, 404, "not allowed");
    let loaded = get(&server, "/workers").await["workers"][1]["lora_adapters"].clone();
    assert_eq!(loaded[0], json!({"name": "a", "loaded": true, "error": null}));
}

#[tokio::test]
async fn adapters_are_loaded_at_run_time() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = adapter(dir.path(), "one", 8);
    let server = serve("2", &["--allow-runtime-lora-updating", "--max-lora-adapters", "2"]).await;
    let load = async |fields: Value| server.post("/v1/load_lora_adapter", &fields).await;
    let unload = async |name: &str| {
        server.post("/v1/unload_lora_adapter", &json!({"lora_name": name})).await
    };

    let loaded = load(json!({"lora_name": "a", "lora_path": path})).await;
    assert_eq!(
        (loaded.status, loaded.text.as_str()),
        (200, "Success: LoRA adapter 'a' added successfully.")
    );
    let first = answered_by(&server.chat(&body("a")).await).expect("an adapter");
    assert!(overlap(&server.chat(&body("a")).await).1 > 0);
    let message =
        assert_refused(&load(json!({"lora_name": "a", "lora_path": path})).await, 400, "lora_name");
    assert!(message.contains("load_inplace"), "{message}");
    assert_refused(&load(json!({"lora_name": "m", "lora_path": path})).await, 400, "lora_name");
    assert_refused(
        &load(json!({"lora_name": "b", "lora_path": dir.path().join("none")})).await,
        404,
        "lora_path",
    );
    assert_refused(
        &load(json!({"lora_name": "b", "lora_path": dir.path()})).await,
        400,
        "lora_path",
    );
    let large = adapter(dir.path(), "large", 64);
    let message = assert_refused(
        &load(json!({"lora_name": "b", "lora_path": large})).await,
        400,
        "lora_path",
    );
    assert_eq!(message, "LoRA rank 64 is greater than max_lora_rank 16.");
    assert_refused(&server.chat(&body("b")).await, 404, "model");

    // New weights at the same path and under the same name: the old blocks don't match.
    std::fs::write(path.join("adapter_model.safetensors"), "others").expect("a file");
    let again = json!({"lora_name": "a", "lora_path": path, "load_inplace": true});
    assert_eq!(load(again.clone()).await.status, 200);
    let answer = server.chat(&body("a")).await;
    assert_eq!(overlap(&answer), (0, 0));
    let second = answered_by(&answer).expect("an adapter");
    assert!(first != second && second.starts_with("a@"), "{first}, {second}");
    // Reloading unchanged weights keeps the blocks.
    assert_eq!(load(again).await.status, 200);
    assert!(overlap(&server.chat(&body("a")).await).1 > 0);

    assert_eq!(
        load(json!({"lora_name": "b", "lora_path": adapter(dir.path(), "two", 8)})).await.status,
        200
    );
    let message =
        assert_refused(&load(json!({"lora_name": "c", "lora_path": path})).await, 400, "lora_name");
    assert!(message.contains("--max-lora-adapters"), "{message}");
    let unloaded = unload("b").await;
    assert_eq!(
        (unloaded.status, unloaded.text.as_str()),
        (200, "Success: LoRA adapter 'b' removed successfully.")
    );
    assert_refused(&server.chat(&body("b")).await, 404, "model");
    assert_refused(&unload("b").await, 404, "lora_name");
    assert_eq!(get(&server, "/v1/models").await["data"].as_array().expect("a list").len(), 2);
}

#[tokio::test]
async fn invalid_adapters_are_refused_at_start() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = adapter(dir.path(), "large", 1024).display().to_string();
    let model = demo_model().display().to_string();
    let run = |flags: &[&str]| {
        let args = ["serve", &model, "--served-model-name", "m", "--sim", "1", "--port", "0"];
        let output =
            crate::support::chiasm(&[&args, flags].concat()).output().expect("chiasm runs");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let nowhere = dir.path().join("none").display().to_string();
    for (flags, expected) in [
        (vec!["--lora-modules".to_owned(), format!("a={nowhere}")], "no adapter found at"),
        (
            vec!["--lora-modules".to_owned(), format!("a={path}")],
            "its rank 1024 exceeds the engines' limit of 512",
        ),
        (vec!["--lora-modules".to_owned(), format!("m={path}")], "the model has this name"),
        (
            vec!["--".to_owned(), "--default-mm-loras={}".to_owned()],
            "--default-mm-loras after -- is not supported",
        ),
    ] {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let stderr = run(&flags);
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
}
