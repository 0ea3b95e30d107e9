//! Shared knowledge between frontends: several of them route as well as one that gets all requests.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{TIMEOUT, workers};
use crate::support::Server;

/// The number of conversations.
const CONVERSATIONS: usize = 48;
/// The number of conversations at a time.
const CONCURRENCY: usize = 12;
/// The number of turns per conversation.
const TURNS: usize = 4;
/// The pause of a client before its next turn. A frontend learns of new blocks some milliseconds
/// after the client has its answer, later on a busy machine. The simulated engines answer within
/// 4 ms, which no real one does.
const PAUSE: Duration = Duration::from_millis(50);
/// The tolerated relative loss of hit rate.
const TOLERANCE: f64 = 0.05;

/// Token counts of a conversation's prompts.
#[derive(Default)]
struct PromptTokens {
    total: u64,
    cached: u64,
}

/// Holds one conversation. Each turn goes to another frontend than the previous turn.
async fn converse(frontends: &[Server], number: usize) -> PromptTokens {
    let mut tokens = PromptTokens::default();
    let mut messages = Vec::new();
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
        tokens.total += number(&usage["prompt_tokens"]);
        tokens.cached += number(&usage["prompt_tokens_details"]["cached_tokens"]);
    }
    tokens
}

/// Returns the share of prompt tokens that engines on two machines find in their caches, with
/// `frontends` frontends in front of them.
async fn hit_rate(frontends: usize) -> f64 {
    let cluster = Cluster::new();
    let agent = |machine| cluster.agent(machine, &["--sim", "2", "--sim-speedup", "100"]);
    let agents = [agent(1), agent(2)];
    let frontends: Vec<Server> = (0..frontends).map(|_| cluster.serve(&agents, &[])).collect();
    for frontend in &frontends {
        frontend.wait_ready(4, TIMEOUT).await;
    }
    let conversations = stream::iter(0..CONVERSATIONS).map(|number| converse(&frontends, number));
    let tokens = conversations.buffer_unordered(CONCURRENCY).collect::<Vec<_>>().await;
    for worker in workers(&frontends[0]).await {
        assert!(
            worker["known_blocks"].as_u64().is_some_and(|blocks| blocks > 0),
            "every worker has blocks: {worker}"
        );
    }
    let cached: u64 = tokens.iter().map(|tokens| tokens.cached).sum();
    let total: u64 = tokens.iter().map(|tokens| tokens.total).sum();
    cached as f64 / total as f64
}

#[tokio::test]
async fn two_frontends_reach_the_hit_rate_of_one() {
    let one = hit_rate(1).await;
    let two = hit_rate(2).await;
    println!("hit rate of one frontend {one:.3}, of two {two:.3}");
    assert!(one > 0.4 && two >= one * (1.0 - TOLERANCE), "one {one:.3}, two {two:.3}");
}
