//! A frontend of Dynamo's own mocker workers, found in a real etcd.
//!
//! `CHIASM_TEST_DYNAMO` is the path of a Python with Dynamo 1.6.1, `CHIASM_TEST_ETCD` that of etcd.
//! If `CHIASM_TEST_PYTHON` (a Python with vLLM) and `CHIASM_TEST_MODELS` are set, tensors are
//! compared with those of vLLM's own processor.

mod failures;
mod folder;
mod mocker;
mod tensors;

use std::time::Duration;

use crate::support::etcd::Etcd;
use crate::support::{Answer, Server, demo_model, scenario_run, wait_for};
use base64::Engine;
use chiasm::scenarios::DAWN;
use mocker::Mocker;
use serde_json::{Value, json};

/// The deadline for processes to find each other on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The block size in tokens.
const BLOCK: u64 = 16;
const NAMESPACE: &str = "chiasm-test";

fn chat_body(text: &str, tokens: u32) -> Value {
    json!({
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": true,
    })
}

/// Starts a frontend of the workers in etcd.
fn frontend(etcd: &Etcd, flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let url = format!("dynamo+etcd://{}/{NAMESPACE}", etcd.server());
    let args = [&model, "--served-model-name", "m", "--upstream", &url];
    Server::start(&[&args, flags].concat())
}

/// Returns the frontend's list of workers.
async fn workers(server: &Server) -> Vec<Value> {
    let response =
        server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    crate::support::json(response).await["workers"].as_array().expect("a list").clone()
}

/// Waits until knowledge of all workers is exact. Returns the sorted numbers of their known blocks.
async fn wait_known_blocks(server: &Server) -> Vec<u64> {
    let is_exact =
        async || workers(server).await.iter().all(|worker| worker["knowledge"] == "exact");
    wait_for("exact knowledge", TIMEOUT, is_exact).await;
    let mut known: Vec<u64> = workers(server)
        .await
        .iter()
        .map(|worker| worker["known_blocks"].as_u64().expect("a number"))
        .collect();
    known.sort_unstable();
    known
}

/// Returns the number of predicted blocks of a prompt, and of all its blocks.
fn overlap(answer: &Answer) -> (u64, u64) {
    let header = answer.header("x-chiasm-overlap");
    let (predicted, total) = header.split_once('/').expect("X/Y");
    (predicted.parse().expect("a number"), total.parse().expect("a number"))
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn predictions_match_worker_caches_in_each_frontend() {
    let etcd = Etcd::start().await;
    let _mockers = [Mocker::start(&etcd, NAMESPACE), Mocker::start(&etcd, NAMESPACE)];
    let server = frontend(&etcd, &[]);
    server.wait_ready(2, TIMEOUT).await;
    wait_known_blocks(&server).await;
    scenario_run::play_all_with("text", &server, "m", BLOCK, 16).await;
    assert_eq!(server.metric("chiasm_distrusted_workers_total").await, 0.0);

    let second = frontend(&etcd, &[]);
    second.wait_ready(2, TIMEOUT).await;
    wait_for("the knowledge of the first frontend", TIMEOUT, async || {
        wait_known_blocks(&second).await == wait_known_blocks(&server).await
    })
    .await;
    let known = wait_known_blocks(&second).await;
    assert!(known.iter().sum::<u64>() > 100, "{known:?}");
    let long =
        "A prompt that the first frontend sent and the second one finds, word by word. ".repeat(20);
    let new = overlap(&server.chat(&chat_body(&long, 4)).await).1;
    let total = known.iter().sum::<u64>() + new;
    wait_for("the blocks of the first frontend's prompt", TIMEOUT, async || {
        wait_known_blocks(&second).await.iter().sum::<u64>() >= total
    })
    .await;
    let answer = second.chat(&chat_body(&long, 4)).await;
    let cached =
        answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    assert_eq!((overlap(&answer), cached), ((new, new), BLOCK * new));
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn unsupported_parameters_are_refused_by_name() {
    let etcd = Etcd::start().await;
    let _mocker = Mocker::start(&etcd, NAMESPACE);
    let server = frontend(&etcd, &[]);
    server.wait_ready(1, TIMEOUT).await;
    for (field, value) in [
        ("logit_bias", json!({"5": 1.0})),
        ("bad_words", json!(["no"])),
        ("prompt_logprobs", json!(1)),
        ("allowed_token_ids", json!([5])),
        ("cache_salt", json!("mine")),
        ("logprobs", json!(true)),
    ] {
        let mut body = chat_body("hello", 4);
        body[field] = value;
        let refused = server.chat(&body).await.refused(400);
        assert_eq!(refused, field);
    }
    let picture = base64::engine::general_purpose::STANDARD.encode(DAWN.jpeg);
    let url = format!("data:image/jpeg;base64,{picture}");
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    let body =
        json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [image]}]});
    assert_eq!(server.chat(&body).await.refused(400), "messages");
    // A mocker accepts images but does not expand their tokens, which the frontend detects.
    let url = format!("dynamo+etcd://{}/{NAMESPACE},images", etcd.server());
    let model = demo_model().display().to_string();
    let with_images = Server::start(&[&model, "--served-model-name", "m", "--upstream", &url]);
    with_images.wait_ready(1, TIMEOUT).await;
    with_images.chat(&body).await.ok();
    with_images.wait_for_log("were expected");
    // Each choice is a request of its own to the worker.
    let mut body = chat_body("hello", 4);
    body["n"] = json!(3);
    assert_eq!(server.chat(&body).await.ok()["choices"].as_array().expect("a list").len(), 3);
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn workers_of_another_model_are_not_served() {
    let etcd = Etcd::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(demo_model()).expect("a model") {
        let file = file.expect("a file");
        std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
    }
    let config = folder.path().join("config.json");
    let text = std::fs::read_to_string(&config).expect("a configuration");
    std::fs::write(&config, format!("{text}\n")).expect("a changed configuration");
    let _mocker = Mocker::start_with_model(&etcd, NAMESPACE, folder.path());
    let server = frontend(&etcd, &[]);
    server.wait_for_log("the config.json of its model 'mocked' differs from the local one");
    assert_eq!(server.ready_workers().await, 0);
    let url = format!("dynamo+etcd://{}/{NAMESPACE},model=mocked", etcd.server());
    let with_model_name = frontend(&etcd, &["--upstream", &url]);
    with_model_name.wait_ready(1, TIMEOUT).await;
    with_model_name.chat(&chat_body("hello", 4)).await.ok();
}
