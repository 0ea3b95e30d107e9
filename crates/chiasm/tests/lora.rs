//! LoRA adapters before simulated engines, which say who has answered.

use std::time::Duration;

use crate::support::adapters::{adapter, answered_by, body, overlap};
use crate::support::{Answer, Server, demo_model};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);

async fn serve(engines: &str, flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let fixed = [&model, "--served-model-name", "m", "--sim", engines, "--sim-speedup", "1000"];
    let server = Server::start(&[&fixed, flags].concat());
    server.wait_ready(engines.parse().expect("a number"), SOON).await;
    server
}

async fn get(server: &Server, path: &str) -> Value {
    let response =
        server.client.get(format!("{}{path}", server.url)).send().await.expect("an answer");
    Answer::of(response).await.ok()
}

#[track_caller]
fn refused(answer: &Answer, status: u16, param: &str) -> String {
    assert_eq!(answer.status, status, "{}", answer.text);
    let error = answer.json()["error"].clone();
    assert_eq!(error["param"], param, "{}", answer.text);
    error["message"].as_str().expect("text").to_owned()
}

#[tokio::test]
async fn an_adapter_answers_by_its_name_in_every_api_and_shares_no_block() {
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
        assert_eq!(overlap(&first), (0, 0), "{model} shares nothing");
        let again = server.chat(&body(model)).await;
        let (predicted, found) = overlap(&again);
        assert!(
            predicted > 5 && found == 16 * predicted,
            "{model}: {predicted} blocks, {found} tokens"
        );
        assert_eq!(
            again.header("x-chiasm-worker"),
            first.header("x-chiasm-worker"),
            "where its blocks are"
        );
    }
    assert_eq!(server.metric("chiasm_overlap_error_blocks_total").await, 0.0);

    let named = |model: &str, fields: Value| {
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
        let answer = server.post(path, &named("a", fields.clone())).await;
        assert_eq!(answer.ok()["model"], "a", "{path}");
        assert_eq!(server.post(path, &named("c", fields)).await.status, 404, "{path}");
    }
    for (path, fields) in [
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/tokenize", json!({"prompt": "hi"})),
        ("/detokenize", json!({"tokens": [1]})),
    ] {
        server.post(path, &named("a", fields.clone())).await.ok();
        assert_eq!(server.post(path, &named("c", fields)).await.status, 404, "{path}");
    }
    assert_eq!(server.post("/v1/load_lora_adapter", &json!({})).await.status, 404, "not allowed");
    let loaded = get(&server, "/workers").await["workers"][1]["lora_adapters"].clone();
    assert_eq!(loaded[0], json!({"name": "a", "loaded": true, "error": null}));
}

#[tokio::test]
async fn adapters_come_and_go_at_run_time() {
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
        refused(&load(json!({"lora_name": "a", "lora_path": path})).await, 400, "lora_name");
    assert!(message.contains("load_inplace"), "{message}");
    refused(&load(json!({"lora_name": "m", "lora_path": path})).await, 400, "lora_name");
    refused(
        &load(json!({"lora_name": "b", "lora_path": dir.path().join("none")})).await,
        404,
        "lora_path",
    );
    refused(&load(json!({"lora_name": "b", "lora_path": dir.path()})).await, 400, "lora_path");
    let large = adapter(dir.path(), "large", 64);
    let message =
        refused(&load(json!({"lora_name": "b", "lora_path": large})).await, 400, "lora_path");
    assert_eq!(message, "LoRA rank 64 is greater than max_lora_rank 16.");
    refused(&server.chat(&body("b")).await, 404, "model");

    // Other weights at the same place and under the same name: none of the blocks of before is
    // theirs.
    std::fs::write(path.join("adapter_model.safetensors"), "others").expect("a file");
    let again = json!({"lora_name": "a", "lora_path": path, "load_inplace": true});
    assert_eq!(load(again.clone()).await.status, 200);
    let answer = server.chat(&body("a")).await;
    assert_eq!(overlap(&answer), (0, 0));
    let second = answered_by(&answer).expect("an adapter");
    assert!(first != second && second.starts_with("a@"), "{first}, {second}");
    // Nothing has changed, so nothing is computed again.
    assert_eq!(load(again).await.status, 200);
    assert!(overlap(&server.chat(&body("a")).await).1 > 0);

    assert_eq!(
        load(json!({"lora_name": "b", "lora_path": adapter(dir.path(), "two", 8)})).await.status,
        200
    );
    let message =
        refused(&load(json!({"lora_name": "c", "lora_path": path})).await, 400, "lora_name");
    assert!(message.contains("--max-lora-adapters"), "{message}");
    let unloaded = unload("b").await;
    assert_eq!(
        (unloaded.status, unloaded.text.as_str()),
        (200, "Success: LoRA adapter 'b' removed successfully.")
    );
    refused(&server.chat(&body("b")).await, 404, "model");
    refused(&unload("b").await, 404, "lora_name");
    assert_eq!(get(&server, "/v1/models").await["data"].as_array().expect("a list").len(), 2);
}

#[tokio::test]
async fn a_wrong_adapter_is_told_at_the_start() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = adapter(dir.path(), "large", 1024).display().to_string();
    let model = demo_model().display().to_string();
    let run = |flags: &[&str]| {
        let fixed = ["serve", &model, "--served-model-name", "m", "--sim", "1", "--port", "0"];
        let ended =
            crate::support::chiasm(&[&fixed, flags].concat()).output().expect("chiasm runs");
        assert!(!ended.status.success());
        String::from_utf8_lossy(&ended.stderr).into_owned()
    };
    let nowhere = dir.path().join("none").display().to_string();
    for (flags, told) in [
        (vec!["--lora-modules".to_owned(), format!("a={nowhere}")], "no adapter is found at"),
        (
            vec!["--lora-modules".to_owned(), format!("a={path}")],
            "its rank is 1024, and engines take 512",
        ),
        (vec!["--lora-modules".to_owned(), format!("m={path}")], "the model has this name"),
        (
            vec!["--".to_owned(), "--default-mm-loras={}".to_owned()],
            "--default-mm-loras after -- is not supported",
        ),
    ] {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let said = run(&flags);
        assert!(said.contains(told), "{flags:?}: {said}");
    }
}
