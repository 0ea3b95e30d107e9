//! The frontend's knowledge of engines' caches: exact, approximate, lost and restored, and its
//! effects on routing.

use std::time::Duration;

use crate::support::{Answer, Process, Server, chiasm, demo_model, free_port, wait_for};
use serde_json::{Value, json};
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(20);

async fn serve(engines: u64, extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let count = engines.to_string();
    let mut args = vec![model.as_str(), "--served-model-name", "m", "--sim", &count];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(engines, TIMEOUT).await;
    wait_until_caught_up(&server).await;
    server
}

/// Waits until no worker is catching up. Engines of these tests replay few batches or none, so
/// events from before the subscription would be lost.
async fn wait_until_caught_up(server: &Server) {
    let caught_up =
        async || workers(server).await.iter().all(|worker| worker["knowledge"] != "catching-up");
    wait_for("exact or approximate knowledge", TIMEOUT, caught_up).await;
}

/// Returns a request with a prompt of some hundred tokens.
fn body_about(topic: &str) -> Value {
    let text = format!("Tell me about {topic}. ").repeat(40);
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4})
}

async fn workers(server: &Server) -> Vec<Value> {
    let response =
        server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    let text = response.text().await.expect("text");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    report["workers"].as_array().expect("a list").clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Returns the number of blocks that the router predicted, and of those cached in the engine.
fn overlap_in_blocks(answer: &Answer) -> (usize, usize) {
    let overlap = answer.header("x-chiasm-overlap");
    let predicted = overlap
        .split('/')
        .next()
        .and_then(|blocks| blocks.parse().ok())
        .expect("a number of blocks");
    let cached =
        number(&answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) as usize / 16;
    (predicted, cached)
}

#[tokio::test]
async fn events_give_exact_predictions() {
    let server = serve(2, &["--sim-speedup", "1000"]).await;
    let is_exact =
        async || workers(&server).await.iter().all(|worker| worker["knowledge"] == "exact");
    wait_for("exact knowledge", TIMEOUT, is_exact).await;
    for round in 0..3 {
        for topic in ["owls", "moons"] {
            let answer = server.chat(&body_about(topic)).await;
            answer.ok();
            let (predicted, cached) = overlap_in_blocks(&answer);
            assert_eq!(predicted, cached);
            assert_eq!(predicted > 0, round > 0);
            // Events about stored blocks may arrive after the answer.
            let is_settled = async || {
                let promised: u64 =
                    workers(&server).await.iter().map(|w| number(&w["promised_blocks"])).sum();
                promised == 0
            };
            wait_for("confirmed blocks", TIMEOUT, is_settled).await;
        }
    }
    for direction in ["high", "low"] {
        let labels = format!("{{too=\"{direction}\",state=\"exact\"}}");
        let name = format!("chiasm_overlap_error_blocks_total{labels}");
        assert_eq!(server.metric(&name).await, 0.0, "{name}");
    }
    let report = workers(&server).await;
    let applied: u64 = report.iter().map(|worker| number(&worker["kv_events"]["applied"])).sum();
    let known: u64 = report.iter().map(|worker| number(&worker["known_blocks"])).sum();
    assert!(applied > 0 && known > 0, "{report:?}");
    for worker in &report {
        assert_eq!((number(&worker["requests"]), number(&worker["pending_tokens"])), (0, 0));
        assert_eq!(number(&worker["kv_events"]["dropped"]), 0);
        assert!(
            worker["kv_events"]["lag_seconds"].as_f64().is_some_and(|lag| lag < 10.0),
            "{worker}"
        );
        let id = worker["id"].as_str().expect("a name");
        let label = |name: &str| format!("chiasm_{name}{{worker=\"{id}\"");
        assert_eq!(
            server.metric(&label("kv_events_applied_total")).await,
            number(&worker["kv_events"]["applied"]) as f64
        );
        assert_eq!(
            server.metric(&format!("{},state=\"exact\"}}", label("worker_knowledge"))).await,
            1.0
        );
    }
}

#[tokio::test]
async fn engine_without_events_is_known_approximately() {
    let server = serve(2, &["--sim-speedup", "1000", "--sim-no-kv-events"]).await;
    wait_for("a warning for each engine", TIMEOUT, async || {
        server.count_logged("approximate mode") >= 2
    })
    .await;
    assert_eq!(server.count_logged("approximate mode"), 2);
    assert!(workers(&server).await.iter().all(|worker| worker["knowledge"] == "approximate"));
    let first = server.chat(&body_about("owls")).await;
    assert_eq!(overlap_in_blocks(&first), (0, 0));
    for _ in 0..5 {
        let again = server.chat(&body_about("owls")).await;
        let (predicted, cached) = overlap_in_blocks(&again);
        assert!(predicted > 0 && cached > 0);
        assert_eq!(again.header("x-chiasm-worker"), first.header("x-chiasm-worker"));
    }
    let high = "chiasm_overlap_error_blocks_total{too=\"high\",state=\"approximate\"}";
    assert_eq!(server.metric(high).await, 0.0, "the engine has evicted nothing");
}

/// Sends prompts to an engine whose batches of events 1 and 2 get lost. Checks that predictions are
/// never too high, and returns the worker's event counts.
async fn lose_events(extra: &[&str], knowledge: &str) -> Value {
    let server =
        serve(1, &[&["--sim-speedup", "1000", "--sim-lose-kv-batches", "1..3"], extra].concat())
            .await;
    for topic in ["owls", "moons", "rivers", "stones", "winds"].repeat(2) {
        let answer = server.chat(&body_about(topic)).await;
        answer.ok();
        let (predicted, cached) = overlap_in_blocks(&answer);
        assert!(predicted <= cached, "{predicted} of {cached}");
    }
    let high = "chiasm_overlap_error_blocks_total{too=\"high\"";
    assert_eq!(server.metric(high).await, 0.0);
    let is_expected =
        async || workers(&server).await.iter().all(|worker| worker["knowledge"] == knowledge);
    wait_for(knowledge, TIMEOUT, is_expected).await;
    // New blocks are known again, even after blocks that are not.
    for round in 0..2 {
        let answer = server.chat(&body_about("owls, after all that")).await;
        let (predicted, cached) = overlap_in_blocks(&answer);
        assert!(predicted <= cached && (round == 0 || predicted > 0), "{predicted} of {cached}");
        let is_settled = async || {
            workers(&server).await.iter().all(|worker| number(&worker["promised_blocks"]) == 0)
        };
        wait_for("confirmed blocks", TIMEOUT, is_settled).await;
    }
    workers(&server).await[0]["kv_events"].clone()
}

#[tokio::test]
async fn lost_events_are_replayed() {
    let counts = lose_events(&[], "exact").await;
    assert_eq!(
        (number(&counts["gaps"]), number(&counts["dropped"]), number(&counts["resets"])),
        (1, 0, 0),
        "{counts}"
    );
    assert!(number(&counts["replays"]) > 0);
}

#[tokio::test]
async fn events_without_replay_reset_the_index() {
    let counts = lose_events(&["--sim-replay-batches", "0"], "approximate").await;
    assert_eq!(
        (number(&counts["gaps"]), number(&counts["dropped"]), number(&counts["resets"])),
        (1, 2, 1),
        "{counts}"
    );
}

#[tokio::test]
async fn wrong_approximate_prediction_is_counted() {
    // With 64 blocks, each prompt evicts the previous prompt. The router predicts for a while that
    // the previous prompt is still cached.
    let small = [
        "--sim-blocks",
        "64",
        "--sim-max-model-len",
        "1000",
        "--sim-no-kv-events",
        "--sim-speedup",
        "1000",
    ];
    let server = serve(1, &small).await;
    let prompt = |text: &str| json!({"model": "m", "prompt": text.repeat(900), "max_tokens": 100});
    for text in ["a", "b", "a", "b", "a"] {
        server.post("/v1/completions", &prompt(text)).await.ok();
    }
    let high = "chiasm_overlap_error_blocks_total{too=\"high\",state=\"approximate\"}";
    assert!(server.metric(high).await > 0.0, "the engine's count differs from the prediction");
}

#[tokio::test]
async fn session_stays_on_one_worker() {
    let server = serve(4, &["--sim-speedup", "1000", "--policy", "random"]).await;
    let send = async |session: Option<&str>| {
        let request = server.client.post(format!("{}/v1/chat/completions", server.url));
        let request = match session {
            Some(session) => request.header("x-session-id", session),
            None => request,
        };
        let response = request
            .header("content-type", "application/json")
            .body(body_about("x").to_string())
            .send()
            .await;
        let response = response.expect("an answer");
        assert_eq!(response.status(), 200);
        response.headers()["x-chiasm-worker"].to_str().expect("text").to_owned()
    };
    let first = send(Some("alice")).await;
    for _ in 0..12 {
        assert_eq!(send(Some("alice")).await, first);
    }
    let mut others = Vec::new();
    for _ in 0..24 {
        others.push(send(None).await);
    }
    assert!(others.iter().any(|worker| *worker != first), "{others:?}");
}

#[tokio::test]
async fn busy_engines_refuse_with_the_configured_status() {
    let slow = ["--sim-prefill-rate", "50", "--busy-pending-tokens", "100", "--busy-status", "529"];
    let server = serve(1, &slow).await;
    let body = body_about("owls").to_string();
    let url = format!("{}/v1/chat/completions", server.url);
    let client = server.client.clone();
    let waiting = tokio::spawn(async move {
        client.post(url).header("content-type", "application/json").body(body).send().await
    });
    let is_busy = async || {
        workers(&server).await.iter().any(|worker| number(&worker["pending_tokens"]) >= 100)
    };
    wait_for("a busy engine", TIMEOUT, is_busy).await;
    let refused = server.chat(&body_about("moons")).await;
    assert_eq!(refused.status, 529, "{}", refused.text);
    assert_eq!(refused.json()["error"]["code"], "engines_busy");
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(server.metric("chiasm_busy_refusals_total").await, 1.0);
    waiting.abort();
}

/// An attached engine that replays only its last three batches, and the state folder of its
/// frontends.
struct AttachedEngine {
    model: String,
    address: String,
    engine: Process,
    state: TempDir,
}

impl AttachedEngine {
    fn start() -> Self {
        let model = demo_model().display().to_string();
        let address = format!("tcp://127.0.0.1:{}", free_port());
        let engine = Self::engine(&model, &address);
        Self { model, address, engine, state: tempfile::tempdir().expect("a folder") }
    }

    fn engine(model: &str, address: &str) -> Process {
        let args =
            ["sim-engine", "--handshake", address, "--model", model, "--sim-replay-batches", "3"];
        let flags = ["--receiver-cache-gb", "4", "--sim-speedup", "1000"];
        Process(chiasm(&[&args[..], &flags].concat()).spawn().expect("chiasm starts"))
    }

    /// Starts a frontend and waits until it has caught up.
    async fn frontend(&self) -> Server {
        let state = self.state.path().display().to_string();
        let args = [
            &self.model,
            "--served-model-name",
            "m",
            "--attach",
            &self.address,
            "--state-dir",
            &state,
        ];
        let server = Server::start(&[&args[..], &["--receiver-cache-gb", "4"]].concat());
        server.wait_ready(1, TIMEOUT).await;
        wait_until_caught_up(&server).await;
        server
    }

    /// Returns the number of files with kept knowledge.
    fn kept_files(&self) -> usize {
        std::fs::read_dir(self.state.path().join("kv")).expect("a folder").count()
    }
}

const TOPICS: [&str; 8] =
    ["owls", "moons", "rivers", "stones", "winds", "roots", "clouds", "shells"];

/// Sends a prompt about each topic. Returns the numbers of predicted and of cached blocks.
async fn send_all_topics(server: &Server) -> (usize, usize) {
    let mut all_predicted = 0;
    let mut all_cached = 0;
    for topic in TOPICS {
        let answer = server.chat(&body_about(topic)).await;
        answer.ok();
        let (predicted, cached) = overlap_in_blocks(&answer);
        all_predicted += predicted;
        all_cached += cached;
    }
    (all_predicted, all_cached)
}

/// Waits until knowledge of all workers has this state and no promises are open.
async fn wait_for_knowledge(server: &Server, knowledge: &str) {
    let is_expected =
        async || workers(server).await.iter().all(|worker| worker["knowledge"] == knowledge);
    wait_for(knowledge, TIMEOUT, is_expected).await;
    let is_settled =
        async || workers(server).await.iter().all(|worker| number(&worker["promised_blocks"]) == 0);
    wait_for("confirmed blocks", TIMEOUT, is_settled).await;
}

#[tokio::test]
async fn exact_knowledge_survives_an_orderly_restart() {
    let attached = AttachedEngine::start();
    let server = attached.frontend().await;
    send_all_topics(&server).await;
    wait_for_knowledge(&server, "exact").await;
    let (predicted, cached) = send_all_topics(&server).await;
    assert!(predicted > 0 && predicted == cached);
    assert!(server.terminate(TIMEOUT).await);
    assert_eq!(attached.kept_files(), 1);

    let server = attached.frontend().await;
    wait_for_knowledge(&server, "exact").await;
    server.wait_for_log("KV events continue from the index of the previous process");
    assert_eq!(attached.kept_files(), 0, "the file is used once");
    assert_eq!(send_all_topics(&server).await, (cached, cached));
    assert_eq!(server.count_logged("missed the first KV events: knowledge"), 0);
}

#[tokio::test]
async fn crash_leaves_approximate_knowledge() {
    let attached = AttachedEngine::start();
    let mut server = attached.frontend().await;
    send_all_topics(&server).await;
    wait_for_knowledge(&server, "exact").await;
    server.signal_and_wait("KILL");
    assert_eq!(attached.kept_files(), 0);
    let server = attached.frontend().await;
    wait_for_knowledge(&server, "approximate").await;
    server.wait_for_log("missed the first KV events: knowledge");

    // Approximate knowledge stays approximate over the next restart.
    send_all_topics(&server).await;
    assert!(server.terminate(TIMEOUT).await);
    let server = attached.frontend().await;
    wait_for_knowledge(&server, "approximate").await;
    server.wait_for_log("an earlier process missed the first KV events");
    let (predicted, cached) = send_all_topics(&server).await;
    assert!(0 < predicted && predicted <= cached, "{predicted} of {cached}");
}

#[tokio::test]
async fn restarted_engine_discards_kept_knowledge() {
    let mut attached = AttachedEngine::start();
    let server = attached.frontend().await;
    send_all_topics(&server).await;
    wait_for_knowledge(&server, "exact").await;
    assert!(server.terminate(TIMEOUT).await);
    attached.engine.end();
    attached.engine = AttachedEngine::engine(&attached.model, &attached.address);
    let server = attached.frontend().await;
    wait_for_knowledge(&server, "exact").await;
    assert_eq!(number(&workers(&server).await[0]["known_blocks"]), 0);
    let (predicted, cached) = overlap_in_blocks(&server.chat(&body_about("owls")).await);
    assert_eq!((predicted, cached), (0, 0));
}

#[tokio::test]
async fn damaged_file_of_kept_knowledge_is_ignored() {
    let attached = AttachedEngine::start();
    let server = attached.frontend().await;
    send_all_topics(&server).await;
    wait_for_knowledge(&server, "exact").await;
    assert!(server.terminate(TIMEOUT).await);
    let folder = std::fs::read_dir(attached.state.path().join("kv")).expect("a folder");
    for entry in folder.map(|entry| entry.expect("a file")) {
        std::fs::write(entry.path(), "chiasm kv kept 1 and nothing more").expect("written");
    }
    let server = attached.frontend().await;
    wait_for_knowledge(&server, "approximate").await;
    server.wait_for_log("ignoring the saved index of a KV cache");
    assert_eq!(attached.kept_files(), 0);
}
