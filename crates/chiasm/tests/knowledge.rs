//! What the frontend knows of its engines' caches, how far that can be trusted, and what follows
//! from it for a client.

use std::time::Duration;

use crate::support::{Answer, Process, Server, chiasm, demo_model, free_port, wait_for};
use serde_json::{Value, json};
use tempfile::TempDir;

const SOON: Duration = Duration::from_secs(20);

async fn serve(engines: u64, extra: &[&str]) -> Server {
    let (model, count) = (demo_model().display().to_string(), engines.to_string());
    let mut args = vec![model.as_str(), "--served-model-name", "m", "--sim", &count];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(engines, SOON).await;
    wait_until_caught_up(&server).await;
    server
}

/// Waits until no worker is catching up. Events from before the subscription would be lost: the
/// engines of these tests replay few batches or none.
async fn wait_until_caught_up(server: &Server) {
    let caught_up =
        async || workers(server).await.iter().all(|worker| worker["knowledge"] != "catching-up");
    wait_for("exact or approximate knowledge", SOON, caught_up).await;
}

/// Some hundred tokens of prompt.
fn ask(about: &str) -> Value {
    let text = format!("Tell me about {about}. ").repeat(40);
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
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Blocks that the engine says it found, of those that the answer's header says it was predicted to
/// have.
fn predicted_and_found(answer: &Answer) -> (usize, usize) {
    let overlap = answer.header("x-chiasm-overlap");
    let predicted = overlap
        .split('/')
        .next()
        .and_then(|blocks| blocks.parse().ok())
        .expect("a number of blocks");
    let found =
        number(&answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) as usize / 16;
    (predicted, found)
}

#[tokio::test]
async fn an_engine_with_events_is_known_exactly_and_the_predictions_are_right() {
    let server = serve(2, &["--sim-speedup", "1000"]).await;
    let exact = async || workers(&server).await.iter().all(|worker| worker["knowledge"] == "exact");
    wait_for("exact knowledge", SOON, exact).await;
    for round in 0..3 {
        for about in ["owls", "moons"] {
            let answer = server.chat(&ask(about)).await;
            answer.ok();
            let (predicted, found) = predicted_and_found(&answer);
            assert_eq!(predicted, found);
            assert_eq!(predicted > 0, round > 0);
            // What it stored is told, perhaps after the answer.
            let settled = async || {
                let promised: u64 =
                    workers(&server).await.iter().map(|w| number(&w["promised_blocks"])).sum();
                promised == 0
            };
            wait_for("confirmed blocks", SOON, settled).await;
        }
    }
    for too in ["high", "low"] {
        let name = format!("chiasm_overlap_error_blocks_total{{too=\"{too}\",state=\"exact\"}}");
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
async fn an_engine_without_events_is_served_in_approximate_mode_and_says_so() {
    let server = serve(2, &["--sim-speedup", "1000", "--sim-no-kv-events"]).await;
    wait_for("a warning for each", SOON, async || server.lines_logged("approximate mode") >= 2)
        .await;
    assert_eq!(server.lines_logged("approximate mode"), 2);
    assert!(workers(&server).await.iter().all(|worker| worker["knowledge"] == "approximate"));
    let first = server.chat(&ask("owls")).await;
    assert_eq!(predicted_and_found(&first), (0, 0));
    for _ in 0..5 {
        let again = server.chat(&ask("owls")).await;
        let (predicted, found) = predicted_and_found(&again);
        assert!(predicted > 0 && found > 0);
        assert_eq!(again.header("x-chiasm-worker"), first.header("x-chiasm-worker"));
    }
    let high = "chiasm_overlap_error_blocks_total{too=\"high\",state=\"approximate\"}";
    assert_eq!(server.metric(high).await, 0.0, "the engine had room for all of it");
}

/// One engine whose batches of events 1 and 2 get lost; five different prompts twice over. What the
/// router claims must be there whatever was lost.
async fn lose_events(extra: &[&str], knowledge: &str) -> Value {
    let server =
        serve(1, &[&["--sim-speedup", "1000", "--sim-lose-kv-batches", "1..3"], extra].concat())
            .await;
    for about in ["owls", "moons", "rivers", "stones", "winds"].repeat(2) {
        let answer = server.chat(&ask(about)).await;
        answer.ok();
        let (predicted, found) = predicted_and_found(&answer);
        assert!(predicted <= found, "{predicted} of {found}");
    }
    let high = "chiasm_overlap_error_blocks_total{too=\"high\"";
    assert_eq!(server.metric(high).await, 0.0);
    let expected =
        async || workers(&server).await.iter().all(|worker| worker["knowledge"] == knowledge);
    wait_for(knowledge, SOON, expected).await;
    // From here on it is known again, whatever comes before it in the prompt.
    for round in 0..2 {
        let answer = server.chat(&ask("owls, after all that")).await;
        let (predicted, found) = predicted_and_found(&answer);
        assert!(predicted <= found && (round == 0 || predicted > 0), "{predicted} of {found}");
        let settled = async || {
            workers(&server).await.iter().all(|worker| number(&worker["promised_blocks"]) == 0)
        };
        wait_for("confirmed blocks", SOON, settled).await;
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
async fn events_that_no_replay_brings_make_the_router_forget_and_learn_again() {
    let counts = lose_events(&["--sim-replay-batches", "0"], "approximate").await;
    assert_eq!(
        (number(&counts["gaps"]), number(&counts["dropped"]), number(&counts["resets"])),
        (1, 2, 1),
        "{counts}"
    );
}

#[tokio::test]
async fn a_belief_that_is_wrong_shows() {
    // 64 blocks: the next prompt drives the one before out, while the router believes for a while
    // that it is there.
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
    assert!(server.metric(high).await > 0.0, "the engine's count and the belief differ");
}

#[tokio::test]
async fn a_session_stays_on_one_worker() {
    let server = serve(4, &["--sim-speedup", "1000", "--policy", "random"]).await;
    let ask_in = async |session: Option<&str>| {
        let request = server.client.post(format!("{}/v1/chat/completions", server.url));
        let request = match session {
            Some(session) => request.header("x-session-id", session),
            None => request,
        };
        let response = request
            .header("content-type", "application/json")
            .body(ask("x").to_string())
            .send()
            .await;
        let response = response.expect("an answer");
        assert_eq!(response.status(), 200);
        response.headers()["x-chiasm-worker"].to_str().expect("text").to_owned()
    };
    let first = ask_in(Some("alice")).await;
    for _ in 0..12 {
        assert_eq!(ask_in(Some("alice")).await, first);
    }
    let mut others = Vec::new();
    for _ in 0..24 {
        others.push(ask_in(None).await);
    }
    assert!(others.iter().any(|worker| *worker != first), "{others:?}");
}

#[tokio::test]
async fn when_all_engines_are_busy_a_request_is_refused_as_configured() {
    let slow = ["--sim-prefill-rate", "50", "--busy-pending-tokens", "100", "--busy-status", "529"];
    let server = serve(1, &slow).await;
    let body = ask("owls").to_string();
    let url = format!("{}/v1/chat/completions", server.url);
    let client = server.client.clone();
    let waiting = tokio::spawn(async move {
        client.post(url).header("content-type", "application/json").body(body).send().await
    });
    let pending = async || {
        workers(&server).await.iter().any(|worker| number(&worker["pending_tokens"]) >= 100)
    };
    wait_for("a busy engine", SOON, pending).await;
    let refused = server.chat(&ask("moons")).await;
    assert_eq!(refused.status, 529, "{}", refused.text);
    assert_eq!(refused.json()["error"]["code"], "engines_busy");
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(server.metric("chiasm_busy_refusals_total").await, 1.0);
    waiting.abort();
}

/// An attached engine that replays only its last few batches, and the state folder that its
/// frontends share.
struct Attached {
    model: String,
    address: String,
    engine: Process,
    state: TempDir,
}

impl Attached {
    fn start() -> Self {
        let model = demo_model().display().to_string();
        let address = format!("tcp://127.0.0.1:{}", free_port());
        let engine = Self::engine(&model, &address);
        Self { model, address, engine, state: tempfile::tempdir().expect("a folder") }
    }

    fn engine(model: &str, address: &str) -> Process {
        let args =
            ["sim-engine", "--handshake", address, "--model", model, "--sim-replay-batches", "3"];
        let more = ["--receiver-cache-gb", "4", "--sim-speedup", "1000"];
        Process(chiasm(&[&args[..], &more].concat()).spawn().expect("chiasm starts"))
    }

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
        server.wait_ready(1, SOON).await;
        wait_until_caught_up(&server).await;
        server
    }

    fn left_files(&self) -> usize {
        std::fs::read_dir(self.state.path().join("kv")).expect("a folder").count()
    }
}

const TOPICS: [&str; 8] =
    ["owls", "moons", "rivers", "stones", "winds", "roots", "clouds", "shells"];

/// Asks about all topics. Returns the blocks that were predicted and those that were found.
async fn ask_about_all(server: &Server) -> (usize, usize) {
    let mut all_predicted = 0;
    let mut all_found = 0;
    for about in TOPICS {
        let answer = server.chat(&ask(about)).await;
        answer.ok();
        let (predicted, found) = predicted_and_found(&answer);
        all_predicted += predicted;
        all_found += found;
    }
    (all_predicted, all_found)
}

async fn wait_for_knowledge(server: &Server, knowledge: &str) {
    let known =
        async || workers(server).await.iter().all(|worker| worker["knowledge"] == knowledge);
    wait_for(knowledge, SOON, known).await;
    let settled =
        async || workers(server).await.iter().all(|worker| number(&worker["promised_blocks"]) == 0);
    wait_for("confirmed blocks", SOON, settled).await;
}

#[tokio::test]
async fn exact_knowledge_survives_an_orderly_restart() {
    let attached = Attached::start();
    let server = attached.frontend().await;
    ask_about_all(&server).await;
    wait_for_knowledge(&server, "exact").await;
    let (predicted, found) = ask_about_all(&server).await;
    assert!(predicted > 0 && predicted == found);
    assert!(server.terminate(SOON).await);
    assert_eq!(attached.left_files(), 1);

    let server = attached.frontend().await;
    wait_for_knowledge(&server, "exact").await;
    server.logged("its KV events go on from what the process before this one knew");
    assert_eq!(attached.left_files(), 0, "it is used once");
    assert_eq!(ask_about_all(&server).await, (found, found));
    assert_eq!(server.lines_logged("first KV events are lost"), 0);
}

#[tokio::test]
async fn crash_leaves_approximate_knowledge_and_says_so() {
    let attached = Attached::start();
    let mut server = attached.frontend().await;
    ask_about_all(&server).await;
    wait_for_knowledge(&server, "exact").await;
    server.end_by("KILL");
    assert_eq!(attached.left_files(), 0);
    let server = attached.frontend().await;
    wait_for_knowledge(&server, "approximate").await;
    server.logged("first KV events are lost");

    // Approximate knowledge stays approximate over the next restart.
    ask_about_all(&server).await;
    assert!(server.terminate(SOON).await);
    let server = attached.frontend().await;
    wait_for_knowledge(&server, "approximate").await;
    server.logged("first KV events were lost before");
    let (predicted, found) = ask_about_all(&server).await;
    assert!(0 < predicted && predicted <= found, "{predicted} of {found}");
}

#[tokio::test]
async fn engine_that_was_restarted_meanwhile_is_known_anew() {
    let mut attached = Attached::start();
    let server = attached.frontend().await;
    ask_about_all(&server).await;
    wait_for_knowledge(&server, "exact").await;
    assert!(server.terminate(SOON).await);
    attached.engine.end();
    attached.engine = Attached::engine(&attached.model, &attached.address);
    let server = attached.frontend().await;
    wait_for_knowledge(&server, "exact").await;
    assert_eq!(number(&workers(&server).await[0]["known_blocks"]), 0);
    let (predicted, found) = predicted_and_found(&server.chat(&ask("owls")).await);
    assert_eq!((predicted, found), (0, 0));
}

#[tokio::test]
async fn damaged_file_of_the_last_frontend_is_ignored() {
    let attached = Attached::start();
    let server = attached.frontend().await;
    ask_about_all(&server).await;
    wait_for_knowledge(&server, "exact").await;
    assert!(server.terminate(SOON).await);
    let folder = std::fs::read_dir(attached.state.path().join("kv")).expect("a folder");
    for entry in folder.map(|entry| entry.expect("a file")) {
        std::fs::write(entry.path(), "chiasm kv kept 1 and nothing more").expect("written");
    }
    let server = attached.frontend().await;
    wait_for_knowledge(&server, "approximate").await;
    server.logged("what was known of an engine's KV cache is ignored");
    assert_eq!(attached.left_files(), 0);
}
