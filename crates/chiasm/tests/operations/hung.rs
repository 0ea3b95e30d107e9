//! Hung engines, simulated by SIGSTOP: requests move to other engines, and the engine is used again
//! once it continues.

use std::process::Stdio;

use serde_json::{Value, json};

use super::TIMEOUT;
use crate::support::{Process, Server, chiasm, demo_model, free_port, send_signal, wait_for};

/// A frontend with short engine timeouts and two simulated engines as separate processes. The
/// timeouts are longer than any pause of a healthy engine.
struct TestHarness {
    server: Server,
    engines: [Process; 2],
}

impl TestHarness {
    async fn start() -> Self {
        let model = demo_model().display().to_string();
        let addresses = [(); 2].map(|()| format!("tcp://127.0.0.1:{}", free_port()));
        let attach = addresses.join(",");
        let args =
            [&model, "--served-model-name", "m", "--attach", &attach, "--policy", "round-robin"];
        let short_timeouts = ["--engine-timeout", "0.5", "--engine-hang-timeout", "1.5"];
        let server = Server::start(&[&args[..], &short_timeouts].concat());
        let engine = |address: &String| {
            let command = [
                "sim-engine",
                "--handshake",
                address,
                "--model",
                &model,
                "--sim-decode-rate",
                "50",
            ];
            Process(
                chiasm(&command)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .expect("an engine"),
            )
        };
        let engines = [engine(&addresses[0]), engine(&addresses[1])];
        server.wait_ready(2, TIMEOUT).await;
        Self { server, engines }
    }

    fn signal(&self, worker: usize, signal: &str) {
        send_signal(self.engines[worker].0.id(), signal);
    }

    async fn condition(&self, worker: usize) -> Value {
        let response = self
            .server
            .client
            .get(format!("{}/workers", self.server.url))
            .send()
            .await
            .expect("an answer");
        crate::support::json(response).await["workers"][worker]["condition"].clone()
    }

    async fn wait_condition(&self, worker: usize, condition: &str) {
        wait_for(condition, TIMEOUT, async || self.condition(worker).await == condition).await;
    }
}

fn body(text: &str, tokens: u32) -> Value {
    json!({"model": "m", "prompt": text, "max_tokens": tokens, "ignore_eos": true})
}

#[tokio::test]
async fn requests_move_away_from_hung_engine() {
    let harness = TestHarness::start().await;
    let server = &harness.server;
    // One stream on each engine, both with first tokens.
    let stream =
        json!({"model": "m", "prompt": "a", "max_tokens": 100, "ignore_eos": true, "stream": true});
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut response = server.open("/v1/completions", &stream).await;
        response.chunk().await.expect("a first chunk");
        streams.push(response);
    }
    harness.signal(0, "STOP");
    let b = body("b", 3);
    let c = body("c", 3);
    let moved =
        tokio::join!(server.post("/v1/completions", &b), server.post("/v1/completions", &c));
    for answer in [&moved.0, &moved.1] {
        answer.ok();
        assert_eq!(answer.header("x-chiasm-worker"), "worker_1");
    }
    harness.wait_condition(0, "hung").await;
    assert_eq!(server.ready_workers().await, 1);
    assert_eq!(
        server.metric("chiasm_worker_condition{worker=\"worker_0\",condition=\"hung\"}").await,
        1.0
    );
    assert!(server.metric("chiasm_retries_total{cause=\"suspect\"}").await >= 1.0);
    // New requests avoid the hung engine.
    for text in ["d", "e", "f"] {
        assert_eq!(
            server.post("/v1/completions", &body(text, 1)).await.header("x-chiasm-worker"),
            "worker_1"
        );
    }

    harness.signal(0, "CONT");
    harness.wait_condition(0, "answers").await;
    server.wait_ready(2, TIMEOUT).await;
    // Streams that were interrupted by the hang are complete.
    for response in streams {
        let rest = response.text().await.expect("the rest");
        assert!(
            rest.contains("\"finish_reason\":\"length\"") && rest.ends_with("data: [DONE]\n\n"),
            "{rest}"
        );
    }
    assert_eq!(server.metric("chiasm_engine_deaths_total").await, 0.0);
    let workers = [
        server.post("/v1/completions", &body("g", 1)).await,
        server.post("/v1/completions", &body("h", 1)).await,
    ]
    .map(|answer| answer.header("x-chiasm-worker"));
    assert!(workers.contains(&"worker_0".to_owned()), "{workers:?}");
}

#[tokio::test]
async fn requests_are_refused_while_all_engines_hang() {
    let harness = TestHarness::start().await;
    [0, 1].into_iter().for_each(|worker| harness.signal(worker, "STOP"));
    wait_for("end of readiness", TIMEOUT, async || harness.server.ready_workers().await == 0).await;
    assert_eq!(harness.server.post("/v1/completions", &body("a", 1)).await.refused(503), "");
    [0, 1].into_iter().for_each(|worker| harness.signal(worker, "CONT"));
    harness.server.wait_ready(2, TIMEOUT).await;
    harness.server.post("/v1/completions", &body("a", 1)).await.ok();
}

#[tokio::test]
async fn request_timeout_ends_answer_with_an_error() {
    let model = demo_model().display().to_string();
    let server = Server::start(&[
        &model,
        "--served-model-name",
        "m",
        "--sim",
        "1",
        "--sim-decode-rate",
        "10",
        "--sim-prefill-rate",
        "10",
        "--first-token-timeout",
        "1",
        "--request-timeout",
        "2",
    ]);
    server.wait_ready(1, TIMEOUT).await;
    let mut stream = body("a", 1000);
    stream["stream"] = json!(true);
    let text = server.open("/v1/completions", &stream).await.text().await.expect("a body");
    assert!(text.contains("\"code\":\"timeout\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    // The engine needs ten seconds for this prompt.
    let long = body(&"word ".repeat(100), 1);
    assert_eq!(server.post("/v1/completions", &long).await.status, 504);
    let line = server.wait_for_log("blocks overlap endpoint=\"completions\" status=504");
    assert!(line.contains("plan_ms="), "{line}");
    wait_for("abort", TIMEOUT, async || server.metric("chiasm_in_flight_requests").await == 0.0)
        .await;
}
