//! Dynamo's own mockers as workers, found in a real etcd: what a frontend makes of them.
//!
//! `CHIASM_TEST_DYNAMO` names a Python that has Dynamo 1.6.1, `CHIASM_TEST_ETCD` an etcd. With
//! `CHIASM_TEST_PYTHON`, which has vLLM, and `CHIASM_TEST_MODELS` tensors are compared with those
//! of vLLM's own processor.

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

/// How long processes may take to find each other on a busy machine.
const SOON: Duration = Duration::from_secs(60);
/// Tokens of a block.
const BLOCK: u64 = 16;
const NAMESPACE: &str = "chiasm-test";

fn ask(text: &str, tokens: u32) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": true})
}

/// A frontend before whatever is named there.
fn frontend(etcd: &Etcd, more: &[&str]) -> Server {
    let (model, url) = (
        demo_model().display().to_string(),
        format!("dynamo+etcd://{}/{NAMESPACE}", etcd.server()),
    );
    let args = [&model, "--served-model-name", "m", "--upstream", &url];
    Server::start(&[&args, more].concat())
}

/// What a frontend knows of all its workers.
async fn workers(server: &Server) -> Vec<Value> {
    let response =
        server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    crate::support::json(response).await["workers"].as_array().expect("a list").clone()
}

/// What each worker is known to hold, once that is exact for all of them.
async fn known_exactly(server: &Server) -> Vec<u64> {
    let is_exact =
        async || workers(server).await.iter().all(|worker| worker["knowledge"] == "exact");
    wait_for("exact knowledge", SOON, is_exact).await;
    let mut known: Vec<u64> = workers(server)
        .await
        .iter()
        .map(|worker| worker["known_blocks"].as_u64().expect("a number"))
        .collect();
    known.sort_unstable();
    known
}

/// Blocks of a prompt that were predicted, and all of them.
fn overlap(answer: &Answer) -> (u64, u64) {
    let told = answer.header("x-chiasm-overlap");
    let blocks =
        told.split_once('/').and_then(|(some, all)| Some((some.parse().ok()?, all.parse().ok()?)));
    blocks.expect("X/Y")
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn what_is_predicted_is_what_workers_count_and_a_new_frontend_knows_it_at_once() {
    let etcd = Etcd::start().await;
    let _mockers = [Mocker::start(&etcd, NAMESPACE), Mocker::start(&etcd, NAMESPACE)];
    let server = frontend(&etcd, &[]);
    server.wait_ready(2, SOON).await;
    known_exactly(&server).await;
    scenario_run::play_all_with("text", &server, "m", BLOCK, 16).await;
    assert_eq!(server.metric("chiasm_distrusted_workers_total").await, 0.0);

    let second = frontend(&etcd, &[]);
    second.wait_ready(2, SOON).await;
    wait_for("what the first one knows", SOON, async || {
        known_exactly(&second).await == known_exactly(&server).await
    })
    .await;
    let known = known_exactly(&second).await;
    assert!(known.iter().sum::<u64>() > 100, "{known:?}");
    let long =
        "A prompt that the first frontend sent and the second one finds, word by word. ".repeat(20);
    let new = overlap(&server.chat(&ask(&long, 4)).await).1;
    let in_all = known.iter().sum::<u64>() + new;
    wait_for("what the other one sent", SOON, async || {
        known_exactly(&second).await.iter().sum::<u64>() >= in_all
    })
    .await;
    let answer = second.chat(&ask(&long, 4)).await;
    let cached =
        answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    assert_eq!((overlap(&answer), cached), ((new, new), BLOCK * new));
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn what_a_worker_can_t_be_asked_for_is_refused_by_its_name() {
    let etcd = Etcd::start().await;
    let _mocker = Mocker::start(&etcd, NAMESPACE);
    let server = frontend(&etcd, &[]);
    server.wait_ready(1, SOON).await;
    for (field, value) in [
        ("logit_bias", json!({"5": 1.0})),
        ("bad_words", json!(["no"])),
        ("prompt_logprobs", json!(1)),
        ("allowed_token_ids", json!([5])),
        ("cache_salt", json!("mine")),
        ("logprobs", json!(true)),
    ] {
        let mut body = ask("hello", 4);
        body[field] = value;
        let refused = server.chat(&body).await.refused(400);
        assert_eq!(refused, field);
    }
    let picture = base64::engine::general_purpose::STANDARD.encode(DAWN.jpeg);
    let image = json!({"type": "image_url", "image_url": {"url": format!("data:image/jpeg;base64,{picture}")}});
    let body =
        json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [image]}]});
    assert_eq!(server.chat(&body).await.refused(400), "messages");
    // A mocker takes images and does not make more tokens of them, which is noticed.
    let url = format!("dynamo+etcd://{}/{NAMESPACE},images", etcd.server());
    let (model, flags) =
        (demo_model().display().to_string(), ["--served-model-name", "m", "--upstream", &url]);
    let with_images = Server::start(&[&[model.as_str()], &flags[..]].concat());
    with_images.wait_ready(1, SOON).await;
    with_images.chat(&body).await.ok();
    with_images.logged("that was expected to have");
    // Several answers are several requests to the worker.
    let mut body = ask("hello", 4);
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
    std::fs::write(&config, format!("{text}\n")).expect("another one");
    let _mocker = Mocker::start_with(&etcd, NAMESPACE, folder.path());
    let server = frontend(&etcd, &[]);
    server.logged("the config.json of its model 'mocked' is another one than here");
    assert_eq!(server.ready_workers().await, 0);
    let url = format!("dynamo+etcd://{}/{NAMESPACE},model=mocked", etcd.server());
    let believing = frontend(&etcd, &["--upstream", &url]);
    believing.wait_ready(1, SOON).await;
    believing.chat(&ask("hello", 4)).await.ok();
}
