//! A log reader that is gone or stuck does not affect requests.

use std::process::{ChildStderr, Stdio};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;

use super::TIMEOUT;
use crate::support::{Process, chiasm, free_port, send_signal, wait_for};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/model");

/// A `chiasm serve` process whose log goes into a pipe that is never read.
struct UnreadServer {
    process: Process,
    stderr: Option<ChildStderr>,
    url: String,
    client: reqwest::Client,
}

impl UnreadServer {
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
        let server =
            Self { process: Process(child), stderr, url, client: crate::support::client() };
        wait_for("the engine", TIMEOUT, async || server.get("/ready").await.is_some()).await;
        server
    }

    /// Returns the body of a successful answer.
    async fn get(&self, path: &str) -> Option<String> {
        let answer = self.client.get(format!("{}{path}", self.url)).timeout(TIMEOUT).send().await;
        let answer = answer.ok()?.error_for_status().ok()?;
        answer.text().await.ok()
    }

    /// Sends `per_client` requests from each of 32 clients. Returns how many were answered.
    async fn send_requests(&self, per_client: usize) -> usize {
        let client = async || {
            let mut answered = 0;
            for _ in 0..per_client {
                let body = json!({"model": "m", "prompt": "hello", "max_tokens": 1}).to_string();
                let request = self
                    .client
                    .post(format!("{}/v1/completions", self.url))
                    .body(body)
                    .timeout(TIMEOUT);
                let answer = request.header("content-type", "application/json").send().await;
                answered += usize::from(answer.is_ok_and(|answer| answer.status() == 200));
            }
            answered
        };
        join_all((0..32).map(|_| client())).await.into_iter().sum()
    }

    /// Returns the number of log lines dropped for `cause`.
    async fn dropped_lines(&self, cause: &str) -> u64 {
        let metrics = self.get("/metrics").await.expect("metrics");
        let name = format!("chiasm_log_lines_dropped_total{{cause=\"{cause}\"}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&name)).expect("the metric");
        value.parse().expect("a number")
    }
}

#[tokio::test]
async fn closed_log_pipe_drops_lines_but_no_request() {
    let mut server = UnreadServer::start("info").await;
    drop(server.stderr.take());
    assert_eq!(server.send_requests(5).await, 32 * 5);
    wait_for("lost lines", TIMEOUT, async || server.dropped_lines("unwritten").await > 0).await;
    assert_eq!(server.send_requests(5).await, 32 * 5);
}

#[tokio::test]
async fn stuck_log_reader_drops_lines_but_no_request() {
    let mut server = UnreadServer::start("debug").await;
    // More lines than the pipe and the queue hold.
    assert_eq!(server.send_requests(400).await, 32 * 400);
    assert!(server.dropped_lines("full").await > 0);
    assert!(server.get("/health").await.is_some());
    // The process can still shut down.
    send_signal(server.process.0.id(), "TERM");
    let deadline = Instant::now() + TIMEOUT;
    while server.process.0.try_wait().expect("a child").is_none() {
        assert!(Instant::now() < deadline, "the process does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
