//! Engines of other machines: agents and frontends as processes, on addresses of this one.

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
mod weather;

use std::time::Duration;

use crate::support::{Server, demo_model, scenario_run, wait_for};
use cluster::Cluster;
use serde_json::{Value, json};

/// How long processes may take to find each other on a busy machine.
const SOON: Duration = Duration::from_secs(30);
/// Tokens of a block.
const BLOCK: u64 = 16;
/// Simulated engines for tests of what they answer, and not of when.
const FAST: [&str; 2] = ["--sim-speedup", "20"];

fn ask(text: &str, tokens: u32) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": true})
}

/// What a frontend knows of all its workers.
async fn workers(server: &Server) -> Vec<Value> {
    let response =
        server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    crate::support::json(response).await["workers"].as_array().expect("a list").clone()
}

#[tokio::test]
async fn the_ten_scenarios_are_answered_as_by_local_engines() {
    let model = demo_model().display().to_string();
    let local = Server::start(
        &[&[&*model, "--served-model-name", "m", "--allow-private-media", "--sim", "4"], &FAST[..]]
            .concat(),
    );
    local.wait_ready(4, SOON).await;
    let expected = scenario_run::play_all(&local, "m", BLOCK, 64).await;
    let cluster = Cluster::new();
    let flags = [&["--sim", "2"], &FAST[..]].concat();
    let agents = [cluster.agent(1, &flags), cluster.agent(2, &flags)];
    let server = cluster.serve(&agents, &["--allow-private-media"]);
    server.wait_ready(4, SOON).await;
    let found = scenario_run::play_all(&server, "m", BLOCK, 64).await;
    assert_eq!(found, expected);
    let ways = |way: &str| format!("chiasm_mm_transfer_total{{mode=\"{way}\"}}");
    let (cached, shared) =
        (server.metric(&ways("cached")).await, server.metric(&ways("shm")).await);
    assert!(cached > 0.0 && shared > 0.0, "{cached} {shared}");
    assert_eq!(server.metric(&ways("inline")).await, 0.0);
    // Agents that fetch by themselves.
    let flags = [&flags[..], &["--fetch-media", "--allow-private-media"]].concat();
    let agents = [cluster.agent(3, &flags), cluster.agent(4, &flags)];
    let fetching = cluster.serve(&agents, &["--allow-private-media"]);
    fetching.wait_ready(4, SOON).await;
    assert_eq!(scenario_run::play_all(&fetching, "m", BLOCK, 64).await, expected);
    assert_eq!(fetching.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
}

#[tokio::test]
async fn several_frontends_know_the_same_and_a_new_one_knows_it_at_once() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1"]), cluster.agent(2, &["--sim", "1"])];
    let first = cluster.serve(&agents, &[]);
    first.wait_ready(2, SOON).await;
    let long = "one two three four five six seven eight nine ten ".repeat(20);
    let told = first.chat(&ask(&long, 2)).await;
    assert!(told.header("x-chiasm-overlap").starts_with("0/"));
    let second = cluster.serve(&agents, &[]);
    second.wait_ready(2, SOON).await;
    let is_exact =
        async || workers(&second).await.iter().all(|worker| worker["knowledge"] == "exact");
    wait_for("exact knowledge", SOON, is_exact).await;
    for server in [&second, &first] {
        let again = server.chat(&ask(&long, 2)).await;
        let (overlap, total) =
            (again.header("x-chiasm-overlap"), again.ok()["usage"]["prompt_tokens"].clone());
        let blocks = total.as_u64().expect("a count") / BLOCK;
        assert_eq!(overlap, format!("{blocks}/{blocks}"));
        assert_eq!(
            again.ok()["usage"]["prompt_tokens_details"]["cached_tokens"],
            (total.as_u64().expect("a count") - 1) / BLOCK * BLOCK
        );
    }
    // What one has computed the other is told of.
    let other = format!("{long} and more of it, so that there are new blocks: {long}");
    second.chat(&ask(&other, 2)).await.ok();
    let known = async |server: &Server| -> Vec<u64> {
        let mut known: Vec<_> = workers(server)
            .await
            .iter()
            .filter_map(|worker| worker["known_blocks"].as_u64())
            .collect();
        known.sort_unstable();
        known
    };
    wait_for("equal knowledge", SOON, async || known(&first).await == known(&second).await).await;
}

#[tokio::test]
async fn frontends_know_of_each_others_requests() {
    let cluster = Cluster::new();
    let slow = ["--sim", "1", "--sim-decode-rate", "20"];
    let agents = [cluster.agent(1, &slow), cluster.agent(2, &slow)];
    let (one, other) = (cluster.serve(&agents, &[]), cluster.serve(&agents, &[]));
    one.wait_ready(2, SOON).await;
    other.wait_ready(2, SOON).await;
    let requests = async |server: &Server| -> Vec<u64> {
        let mut all: Vec<_> =
            workers(server).await.iter().filter_map(|worker| worker["requests"].as_u64()).collect();
        all.sort_unstable();
        all
    };
    let mut body = ask(&"one two three four five six seven eight nine ten ".repeat(20), 400);
    body["stream"] = json!(true);
    let stream = one.open("/v1/chat/completions", &body).await;
    let worker = stream.headers()["x-chiasm-worker"].clone();
    wait_for("the request of the other frontend", SOON, async || requests(&other).await == [0, 1])
        .await;
    // A frontend that comes now is told of it, too.
    let late = cluster.serve(&agents, &[]);
    late.wait_ready(2, SOON).await;
    wait_for("the request that ran before", SOON, async || requests(&late).await == [0, 1]).await;
    // Load of others counts: what nobody holds goes to the worker that is idle.
    let second = one.chat(&ask("hello", 2)).await;
    assert_ne!(second.header("x-chiasm-worker"), worker.to_str().expect("text"));
    drop(stream);
    for server in [&one, &other, &late] {
        wait_for("the end of all", SOON, async || requests(server).await == [0, 0]).await;
    }
}

#[tokio::test]
async fn choices_are_streamed_and_ended_one_by_one() {
    let cluster = Cluster::new();
    let agents =
        [cluster.agent(1, &["--sim", "1", "--sim-answer", "abc stop def stop ghi stop jkl"])];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(1, SOON).await;
    let mut body = ask("hello", 200);
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
    wait_for("end of all continuations", SOON, is_idle).await;
    body["stream"] = json!(true);
    assert!(server.chat(&body).await.chunks().len() > 6);
}
