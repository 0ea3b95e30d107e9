//! Answers that clients don't read.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::{Value, json};

use super::ends::CHAT;
use crate::support::{Server, demo_model, wait_for};

const TIMEOUT: Duration = Duration::from_secs(120);
/// The limit of unread bytes of all answers together.
const MAX_UNREAD_BYTES: u64 = 1 << 20;

/// Returns a request for a stream with some kilobytes per step.
fn large_request() -> Value {
    json!({
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3000,
        "ignore_eos": true,
        "stream": true,
        "n": 8,
        "logprobs": true,
        "top_logprobs": 20,
    })
}

#[tokio::test]
async fn unread_answers_are_bounded_together() {
    let model = demo_model().display().to_string();
    let max_unread = MAX_UNREAD_BYTES.to_string();
    let server = Server::start(&[
        &model,
        "--served-model-name",
        "m",
        "--sim",
        "1",
        "--sim-speedup",
        "50",
        "--max-unread-bytes",
        &max_unread,
    ]);
    server.wait_ready(1, TIMEOUT).await;
    let mut answers = Vec::new();
    for _ in 0..3 {
        answers.push(server.open(CHAT, &large_request()).await);
    }
    let one_is_cut = async || {
        assert!(server.metric("chiasm_unread_bytes").await <= MAX_UNREAD_BYTES as f64);
        server.metric("chiasm_unread_answers_cut_total").await >= 1.0
    };
    wait_for("a cut", TIMEOUT, one_is_cut).await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    server.chat(&json!({"model": "m", "messages": messages, "max_tokens": 2})).await.ok();
    // A client that reads the cut answer gets an orderly end.
    let mut read: FuturesUnordered<_> = answers.into_iter().map(reqwest::Response::text).collect();
    let first = read.next().await.expect("an answer").expect("a body");
    assert!(
        first.contains("the answer was aborted: too much of it was unread"),
        "{}",
        &first[first.len() - 500..]
    );
    assert!(first.ends_with("data: [DONE]\n\n"));
    drop(read);
    wait_for("memory", TIMEOUT, async || server.metric("chiasm_unread_bytes").await == 0.0).await;
}
