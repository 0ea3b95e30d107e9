//! An engine that is stopped in the middle of everything, as by SIGSTOP or a GPU that hangs:
//! requests go elsewhere, and it comes back by itself.

use std::process::Stdio;

use serde_json::{Value, json};

use super::SOON;
use crate::support::{Process, Server, chiasm, demo_model, free_port, send_signal, wait_for};

/// Two simulated engines as processes of their own. Longer silences than they make by themselves
/// are short here.
struct Stand {
    server: Server,
    engines: [Process; 2],
}

impl Stand {
    async fn start() -> Self {
        let model = demo_model().display().to_string();
        let addresses = [(); 2].map(|()| format!("tcp://127.0.0.1:{}", free_port()));
        let attach = addresses.join(",");
        let args =
            [&model, "--served-model-name", "m", "--attach", &attach, "--policy", "round-robin"];
        let impatient = ["--engine-timeout", "0.5", "--engine-hang-timeout", "1.5"];
        let server = Server::start(&[&args[..], &impatient].concat());
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
        server.wait_ready(2, SOON).await;
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

    async fn becomes(&self, worker: usize, condition: &str) {
        wait_for(condition, SOON, async || self.condition(worker).await == condition).await;
    }
}

fn ask(text: &str, tokens: u32) -> Value {
    json!({"model": "m", "prompt": text, "max_tokens": tokens, "ignore_eos": true})
}

#[tokio::test]
async fn requests_leave_an_engine_that_hangs_and_it_comes_back() {
    let stand = Stand::start().await;
    let server = &stand.server;
    // One request to each engine, by turns. The streams have their first tokens.
    let stream =
        json!({"model": "m", "prompt": "a", "max_tokens": 100, "ignore_eos": true, "stream": true});
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut response = server.open("/v1/completions", &stream).await;
        response.chunk().await.expect("a first chunk");
        streams.push(response);
    }
    stand.signal(0, "STOP");
    let (b, c) = (ask("b", 3), ask("c", 3));
    let moved =
        tokio::join!(server.post("/v1/completions", &b), server.post("/v1/completions", &c));
    for answer in [&moved.0, &moved.1] {
        answer.ok();
        assert_eq!(answer.header("x-chiasm-worker"), "worker_1");
    }
    stand.becomes(0, "hung").await;
    assert_eq!(server.ready_workers().await, 1);
    assert_eq!(
        server.metric("chiasm_worker_condition{worker=\"worker_0\",condition=\"hung\"}").await,
        1.0
    );
    assert!(server.metric("chiasm_retries_total{cause=\"suspect\"}").await >= 1.0);
    // Nothing new goes there, so nothing new waits.
    for text in ["d", "e", "f"] {
        assert_eq!(
            server.post("/v1/completions", &ask(text, 1)).await.header("x-chiasm-worker"),
            "worker_1"
        );
    }

    stand.signal(0, "CONT");
    stand.becomes(0, "answers").await;
    server.wait_ready(2, SOON).await;
    // Who was in the middle of an answer has lost nothing.
    for response in streams {
        let rest = response.text().await.expect("the rest");
        assert!(
            rest.contains("\"finish_reason\":\"length\"") && rest.ends_with("data: [DONE]\n\n"),
            "{rest}"
        );
    }
    assert_eq!(server.metric("chiasm_engine_deaths_total").await, 0.0);
    let workers = [
        server.post("/v1/completions", &ask("g", 1)).await,
        server.post("/v1/completions", &ask("h", 1)).await,
    ]
    .map(|answer| answer.header("x-chiasm-worker"));
    assert!(workers.contains(&"worker_0".to_owned()), "{workers:?}");
}

#[tokio::test]
async fn when_all_engines_hang_clients_are_told() {
    let stand = Stand::start().await;
    [0, 1].into_iter().for_each(|worker| stand.signal(worker, "STOP"));
    wait_for("end of readiness", SOON, async || stand.server.ready_workers().await == 0).await;
    assert_eq!(stand.server.post("/v1/completions", &ask("a", 1)).await.refused(503), "");
    [0, 1].into_iter().for_each(|worker| stand.signal(worker, "CONT"));
    stand.server.wait_ready(2, SOON).await;
    stand.server.post("/v1/completions", &ask("a", 1)).await.ok();
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_told_so() {
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
    server.wait_ready(1, SOON).await;
    let stream = json!({"model": "m", "prompt": "a", "max_tokens": 1000, "ignore_eos": true, "stream": true});
    let told = server.open("/v1/completions", &stream).await.text().await.expect("a body");
    assert!(told.contains("\"code\":\"timeout\"") && told.ends_with("data: [DONE]\n\n"), "{told}");
    // The engine computes this for ten seconds.
    let long = ask(&"word ".repeat(100), 1);
    assert_eq!(server.post("/v1/completions", &long).await.status, 504);
    wait_for("abort", SOON, async || server.metric("chiasm_in_flight_requests").await == 0.0).await;
}
