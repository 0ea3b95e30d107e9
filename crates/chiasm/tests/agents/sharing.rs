//! What several frontends know of each other is worth: they route as one that has all requests.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{SOON, workers};
use crate::support::Server;

/// Conversations, how many of them go on at a time, and turns of each.
const CONVERSATIONS: usize = 48;
const AT_A_TIME: usize = 12;
const TURNS: usize = 4;
/// What a client waits before its next turn. A frontend hears of blocks some milliseconds after the
/// client has its answer, later on a busy machine, and these engines answer within 4 ms, which no
/// real one does.
const PAUSE: Duration = Duration::from_millis(50);
/// Part of the hit rate of one frontend that several may lack.
const TOLERANCE: f64 = 0.05;

/// Tokens of prompts, and those that engines found in their caches.
#[derive(Default)]
struct Found {
    prompts: u64,
    cached: u64,
}

/// One conversation. Each of its turns comes to another frontend than the one before.
async fn converse(frontends: &[Server], number: usize) -> Found {
    let (mut found, mut messages) = (Found::default(), Vec::new());
    for turn in 0..TURNS {
        let words =
            (0..150).map(|word| format!("{number} {turn} {word}")).collect::<Vec<_>>().join(" ");
        messages.push(json!({"role": "user", "content": words}));
        let body = json!({"model": "m", "messages": messages, "max_tokens": 16});
        let answer = frontends[(number + turn) % frontends.len()].chat(&body).await.ok();
        messages.push(answer["choices"][0]["message"].clone());
        tokio::time::sleep(PAUSE).await;
        let usage = &answer["usage"];
        let number = |value: &Value| value.as_u64().expect("a number");
        found.prompts += number(&usage["prompt_tokens"]);
        found.cached += number(&usage["prompt_tokens_details"]["cached_tokens"]);
    }
    found
}

/// The part of all prompts that engines on two machines find in their caches, behind so many
/// frontends.
async fn hit_rate(frontends: usize) -> f64 {
    let cluster = Cluster::new();
    let agent = |machine| cluster.agent(machine, &["--sim", "2", "--sim-speedup", "100"]);
    let agents = [agent(1), agent(2)];
    let frontends: Vec<Server> = (0..frontends).map(|_| cluster.serve(&agents, &[])).collect();
    for frontend in &frontends {
        frontend.wait_ready(4, SOON).await;
    }
    let all = stream::iter(0..CONVERSATIONS).map(|number| converse(&frontends, number));
    let found = all.buffer_unordered(AT_A_TIME).collect::<Vec<_>>().await;
    for worker in workers(&frontends[0]).await {
        assert!(
            worker["known_blocks"].as_u64().is_some_and(|blocks| blocks > 0),
            "all have work: {worker}"
        );
    }
    let (cached, prompts) =
        found.iter().fold((0, 0), |sum, one| (sum.0 + one.cached, sum.1 + one.prompts));
    cached as f64 / prompts as f64
}

#[tokio::test]
async fn two_frontends_find_as_much_in_caches_as_one() {
    let (one, two) = (hit_rate(1).await, hit_rate(2).await);
    println!("hit rate of one frontend {one:.3}, of two {two:.3}");
    assert!(one > 0.4 && two >= one * (1.0 - TOLERANCE), "one {one:.3}, two {two:.3}");
}
