//! Answers that nobody reads.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::{Value, json};

use super::ends::CHAT;
use crate::support::{Server, demo_model, wait_for};

const PATIENCE: Duration = Duration::from_secs(120);
/// The bound for the unread parts of all answers.
const BOUND_BYTES: u64 = 1 << 20;

/// Asks for an answer with some kilobytes for each step.
fn large() -> Value {
    let hi = json!([{"role": "user", "content": "hi"}]);
    json!({
        "model": "m", "messages": hi, "max_tokens": 3000, "ignore_eos": true, "stream": true, "n": 8, "logprobs": true,
        "top_logprobs": 20,
    })
}

#[tokio::test]
async fn answers_nobody_reads_are_bounded_together() {
    let model = demo_model().display().to_string();
    let bound = BOUND_BYTES.to_string();
    let server = Server::start(&[
        &model,
        "--served-model-name",
        "m",
        "--sim",
        "1",
        "--sim-speedup",
        "50",
        "--max-unread-bytes",
        &bound,
    ]);
    server.wait_ready(1, PATIENCE).await;
    let mut answers = Vec::new();
    for _ in 0..3 {
        answers.push(server.open(CHAT, &large()).await);
    }
    let one_is_cut = async || {
        assert!(server.metric("chiasm_unread_bytes").await <= BOUND_BYTES as f64);
        server.metric("chiasm_unread_answers_cut_total").await >= 1.0
    };
    wait_for("a cut", PATIENCE, one_is_cut).await;
    server.chat(&json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})).await.ok();
    // Whoever reads on after all finds an end.
    let mut read: FuturesUnordered<_> = answers.into_iter().map(reqwest::Response::text).collect();
    let first = read.next().await.expect("an answer").expect("a body");
    assert!(
        first.contains("too much of the answer was waiting to be read"),
        "{}",
        &first[first.len() - 500..]
    );
    assert!(first.ends_with("data: [DONE]\n\n"));
    drop(read);
    wait_for("memory", PATIENCE, async || server.metric("chiasm_unread_bytes").await == 0.0).await;
}
