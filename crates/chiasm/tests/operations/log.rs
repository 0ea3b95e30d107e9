//! Whoever reads the log may be gone or stuck: requests don't notice.

use std::process::{ChildStderr, Stdio};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;

use super::SOON;
use crate::support::{Process, chiasm, free_port, send_signal, wait_for};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/model");

/// `chiasm serve` whose log goes into a pipe that nobody reads.
struct Unread {
    process: Process,
    stderr: Option<ChildStderr>,
    url: String,
    client: reqwest::Client,
}

impl Unread {
    async fn start(filter: &str) -> Self {
        let port = free_port();
        let mut child = chiasm(&[
            "serve",
            MODEL,
            "--served-model-name",
            "m",
            "--sim",
            "1",
            "--sim-speedup",
            "1000000",
        ])
        .args(["--port", &port.to_string()])
        .env("CHIASM_LOG", filter)
        .stderr(Stdio::piped())
        .spawn()
        .expect("chiasm starts");
        let stderr = child.stderr.take();
        let url = format!("http://127.0.0.1:{port}");
        let unread =
            Self { process: Process(child), stderr, url, client: crate::support::client() };
        wait_for("the engine", SOON, async || unread.get("/ready").await.is_some()).await;
        unread
    }

    /// The body of a success.
    async fn get(&self, path: &str) -> Option<String> {
        let asked = self.client.get(format!("{}{path}", self.url)).timeout(SOON).send().await;
        let answer = asked.ok()?.error_for_status().ok()?;
        answer.text().await.ok()
    }

    /// Asks `each` questions one after the other from each of 32 clients; how many were answered.
    async fn ask(&self, each: usize) -> usize {
        let client = async || {
            let mut answered = 0;
            for _ in 0..each {
                let body = json!({"model": "m", "prompt": "hello", "max_tokens": 1}).to_string();
                let request = self
                    .client
                    .post(format!("{}/v1/completions", self.url))
                    .body(body)
                    .timeout(SOON);
                let answer = request.header("content-type", "application/json").send().await;
                answered += usize::from(answer.is_ok_and(|answer| answer.status() == 200));
            }
            answered
        };
        join_all((0..32).map(|_| client())).await.into_iter().sum()
    }

    async fn dropped(&self, cause: &str) -> u64 {
        let metrics = self.get("/metrics").await.expect("metrics");
        let line = format!("chiasm_log_lines_dropped_total{{cause=\"{cause}\"}} ");
        let value =
            metrics.lines().find_map(|found| found.strip_prefix(&line)).expect("the metric");
        value.parse().expect("a number")
    }
}

#[tokio::test]
async fn a_reader_that_is_gone_costs_lines_and_no_request() {
    let mut server = Unread::start("info").await;
    drop(server.stderr.take());
    assert_eq!(server.ask(5).await, 32 * 5);
    wait_for("lost lines", SOON, async || server.dropped("unwritten").await > 0).await;
    assert_eq!(server.ask(5).await, 32 * 5);
}

#[tokio::test]
async fn a_reader_that_is_stuck_costs_lines_and_no_request() {
    let mut server = Unread::start("debug").await;
    // More lines than the pipe and the queue hold.
    assert_eq!(server.ask(400).await, 32 * 400);
    assert!(server.dropped("full").await > 0);
    assert!(server.get("/health").await.is_some());
    // Nor does it keep the process from ending.
    send_signal(server.process.0.id(), "TERM");
    let patience = Instant::now() + SOON;
    while server.process.0.try_wait().expect("a child").is_none() {
        assert!(Instant::now() < patience, "it does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
