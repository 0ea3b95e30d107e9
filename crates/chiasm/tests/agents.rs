//! Engines on other machines: agents and frontends as processes on loopback addresses.

mod adapters;
mod cluster;
mod discovery;
mod failures;
mod fetching;
mod images;
mod links;
mod network;
mod probe;
mod relay;
mod roles;
mod security;
mod sharing;
mod videos;
mod weather;

use std::time::Duration;

use crate::support::{Server, demo_model, scenario_run, wait_for};
use cluster::Cluster;
use serde_json::{Value, json};

/// The deadline for processes to find each other on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The block size in tokens.
const BLOCK: u64 = 16;
/// Flags for fast simulated engines, for tests that don't depend on timing.
const FAST: [&str; 2] = ["--sim-speedup", "20"];

fn chat_body(text: &str, tokens: u32) -> Value {
    json!({
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": true,
    })
}

/// Returns the frontend's list of workers.
async fn workers(server: &Server) -> Vec<Value> {
    let response =
        server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    crate::support::json(response).await["workers"].as_array().expect("a list").clone()
}

#[tokio::test]
async fn scenario_answers_match_local_engines() {
    let model = demo_model().display().to_string();
    let local = Server::start(
        &[&[&*model, "--served-model-name", "m", "--allow-private-media", "--sim", "4"], &FAST[..]]
            .concat(),
    );
    local.wait_ready(4, TIMEOUT).await;
    let expected = scenario_run::play_all(&local, "m", BLOCK, 64).await;
    let cluster = Cluster::new();
    let flags = [&["--sim", "2"], &FAST[..]].concat();
    let agents = [cluster.agent(1, &flags), cluster.agent(2, &flags)];
    let server = cluster.serve(&agents, &["--allow-private-media"]);
    server.wait_ready(4, TIMEOUT).await;
    let answers = scenario_run::play_all(&server, "m", BLOCK, 64).await;
    assert_eq!(answers, expected);
    let transfers = |mode: &str| format!("chiasm_mm_transfer_total{{mode=\"{mode}\"}}");
    let cached = server.metric(&transfers("cached")).await;
    let shared = server.metric(&transfers("shm")).await;
    assert!(cached > 0.0 && shared > 0.0, "{cached} {shared}");
    assert_eq!(server.metric(&transfers("inline")).await, 0.0);
    // Agents that fetch media themselves.
    let flags = [&flags[..], &["--fetch-media", "--allow-private-media"]].concat();
    let agents = [cluster.agent(3, &flags), cluster.agent(4, &flags)];
    let fetching = cluster.serve(&agents, &["--allow-private-media"]);
    fetching.wait_ready(4, TIMEOUT).await;
    assert_eq!(scenario_run::play_all(&fetching, "m", BLOCK, 64).await, expected);
    assert_eq!(fetching.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
}

#[tokio::test]
async fn new_frontend_learns_cached_blocks_from_agents() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1"]), cluster.agent(2, &["--sim", "1"])];
    let first = cluster.serve(&agents, &[]);
    first.wait_ready(2, TIMEOUT).await;
    let long = "one two three four five six seven eight nine ten ".repeat(20);
    let answer = first.chat(&chat_body(&long, 2)).await;
    assert!(answer.header("x-chiasm-overlap").starts_with("0/"));
    let second = cluster.serve(&agents, &[]);
    second.wait_ready(2, TIMEOUT).await;
    let is_exact =
        async || workers(&second).await.iter().all(|worker| worker["knowledge"] == "exact");
    wait_for("exact knowledge", TIMEOUT, is_exact).await;
    for server in [&second, &first] {
        let again = server.chat(&chat_body(&long, 2)).await;
        let overlap = again.header("x-chiasm-overlap");
        let total = again.ok()["usage"]["prompt_tokens"].clone();
        let blocks = total.as_u64().expect("a count") / BLOCK;
        assert_eq!(overlap, format!("{blocks}/{blocks}"));
        assert_eq!(
            again.ok()["usage"]["prompt_tokens_details"]["cached_tokens"],
            (total.as_u64().expect("a count") - 1) / BLOCK * BLOCK
        );
    }
    // Blocks computed for one frontend become known to the other.
    let other = format!("{long} and more of it, so that there are new blocks: {long}");
    second.chat(&chat_body(&other, 2)).await.ok();
    let known = async |server: &Server| -> Vec<u64> {
        let mut known: Vec<_> = workers(server)
            .await
            .iter()
            .filter_map(|worker| worker["known_blocks"].as_u64())
            .collect();
        known.sort_unstable();
        known
    };
    wait_for("equal knowledge", TIMEOUT, async || known(&first).await == known(&second).await)
        .await;
}

#[tokio::test]
async fn frontends_count_requests_of_other_frontends() {
    let cluster = Cluster::new();
    let slow = ["--sim", "1", "--sim-decode-rate", "20"];
    let agents = [cluster.agent(1, &slow), cluster.agent(2, &slow)];
    let one = cluster.serve(&agents, &[]);
    let other = cluster.serve(&agents, &[]);
    one.wait_ready(2, TIMEOUT).await;
    other.wait_ready(2, TIMEOUT).await;
    let requests = async |server: &Server| -> Vec<u64> {
        let mut all: Vec<_> =
            workers(server).await.iter().filter_map(|worker| worker["requests"].as_u64()).collect();
        all.sort_unstable();
        all
    };
    let mut body = chat_body(&"one two three four five six seven eight nine ten ".repeat(20), 400);
    body["stream"] = json!(true);
    let stream = one.open("/v1/chat/completions", &body).await;
    let worker = stream.headers()["x-chiasm-worker"].clone();
    wait_for("the request of the other frontend", TIMEOUT, async || {
        requests(&other).await == [0, 1]
    })
    .await;
    // A new frontend also learns of the running request.
    let late = cluster.serve(&agents, &[]);
    late.wait_ready(2, TIMEOUT).await;
    wait_for("the request that ran before", TIMEOUT, async || requests(&late).await == [0, 1])
        .await;
    // Load of other frontends counts: a prompt without cached blocks goes to the idle worker.
    let second = one.chat(&chat_body("hello", 2)).await;
    assert_ne!(second.header("x-chiasm-worker"), worker.to_str().expect("text"));
    drop(stream);
    for server in [&one, &other, &late] {
        wait_for("the end of all requests", TIMEOUT, async || requests(server).await == [0, 0])
            .await;
    }
}

#[tokio::test]
async fn choices_end_independently_of_each_other() {
    let cluster = Cluster::new();
    let agents =
        [cluster.agent(1, &["--sim", "1", "--sim-answer", "abc stop def stop ghi stop jkl"])];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(1, TIMEOUT).await;
    let mut body = chat_body("hello", 200);
    body["n"] = json!(3);
    body["stop"] = json!(["stop"]);
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(2);
    let answer = server.chat(&body).await.ok();
    for choice in answer["choices"].as_array().expect("a list") {
        assert_eq!(
            (&choice["finish_reason"], &choice["message"]["content"]),
            (&json!("stop"), &json!("abc "))
        );
        assert!(!choice["logprobs"]["content"].as_array().expect("a list").is_empty());
    }
    let is_idle =
        async || workers(&server).await.iter().all(|worker| worker["engine"]["running"] == 0);
    wait_for("end of all choices", TIMEOUT, is_idle).await;
    body["stream"] = json!(true);
    assert!(server.chat(&body).await.chunks().len() > 6);
}
