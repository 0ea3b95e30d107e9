//! What the frontend knows of its engines' caches, how far that can be trusted, and what follows from it for a client.
#![allow(clippy::expect_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use serde_json::{Value, json};
use support::{Answer, Server, demo_model, wait_for};

const SOON: Duration = Duration::from_secs(20);

async fn serve(engines: u64, extra: &[&str]) -> Server {
    let (model, count) = (demo_model().display().to_string(), engines.to_string());
    let mut args = vec![model.as_str(), "--served-model-name", "m", "--sim", &count];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(engines, SOON).await;
    server
}

/// Some hundred tokens of prompt.
fn ask(about: &str) -> Value {
    let text = format!("Tell me about {about}. ").repeat(40);
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4})
}

async fn workers(server: &Server) -> Vec<Value> {
    let response = server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    let text = response.text().await.expect("text");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    report["workers"].as_array().expect("a list").clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Blocks that the engine says it found, of those that the answer's header says it was predicted to have.
fn predicted_and_found(answer: &Answer) -> (usize, usize) {
    let overlap = answer.header("x-chiasm-overlap");
    let predicted = overlap.split('/').next().and_then(|blocks| blocks.parse().ok()).expect("a number of blocks");
    let found = number(&answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) as usize / 16;
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
                let promised: u64 = workers(&server).await.iter().map(|w| number(&w["promised_blocks"])).sum();
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
        assert!(worker["kv_events"]["lag_seconds"].as_f64().is_some_and(|lag| lag < 10.0), "{worker}");
        let id = worker["id"].as_str().expect("a name");
        let label = |name: &str| format!("chiasm_{name}{{worker=\"{id}\"");
        assert_eq!(
            server.metric(&label("kv_events_applied_total")).await,
            number(&worker["kv_events"]["applied"]) as f64
        );
        assert_eq!(server.metric(&format!("{},state=\"exact\"}}", label("worker_knowledge"))).await, 1.0);
    }
}

#[tokio::test]
async fn an_engine_without_events_is_served_in_approximate_mode_and_says_so() {
    let server = serve(2, &["--sim-speedup", "1000", "--sim-no-kv-events"]).await;
    wait_for("a warning for each", SOON, async || server.lines_logged("approximate mode") >= 2).await;
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

/// One engine whose batches of events 1 and 2 get lost; five different prompts twice over. What the router claims must be
/// there whatever was lost.
async fn lose_events(extra: &[&str], knowledge: &str) -> Value {
    let server = serve(1, &[&["--sim-speedup", "1000", "--sim-lose-kv-batches", "1..3"], extra].concat()).await;
    for about in ["owls", "moons", "rivers", "stones", "winds"].repeat(2) {
        let answer = server.chat(&ask(about)).await;
        answer.ok();
        let (predicted, found) = predicted_and_found(&answer);
        assert!(predicted <= found, "{predicted} of {found}");
    }
    let high = "chiasm_overlap_error_blocks_total{too=\"high\"";
    assert_eq!(server.metric(high).await, 0.0);
    let expected = async || workers(&server).await.iter().all(|worker| worker["knowledge"] == knowledge);
    wait_for(knowledge, SOON, expected).await;
    // From here on it is known again, whatever comes before it in the prompt.
    for round in 0..2 {
        let answer = server.chat(&ask("owls, after all that")).await;
        let (predicted, found) = predicted_and_found(&answer);
        assert!(predicted <= found && (round == 0 || predicted > 0), "{predicted} of {found}");
        let settled = async || workers(&server).await.iter().all(|worker| number(&worker["promised_blocks"]) == 0);
        wait_for("confirmed blocks", SOON, settled).await;
    }
    workers(&server).await[0]["kv_events"].clone()
}

#[tokio::test]
async fn lost_events_are_replayed() {
    let counts = lose_events(&[], "exact").await;
    assert_eq!((number(&counts["gaps"]), number(&counts["dropped"]), number(&counts["resets"])), (1, 0, 0), "{counts}");
    assert!(number(&counts["replays"]) > 0);
}

#[tokio::test]
async fn events_that_no_replay_brings_make_the_router_forget_and_learn_again() {
    let counts = lose_events(&["--sim-replay-batches", "0"], "approximate").await;
    assert_eq!((number(&counts["gaps"]), number(&counts["dropped"]), number(&counts["resets"])), (1, 2, 1), "{counts}");
}

#[tokio::test]
async fn a_belief_that_is_wrong_shows() {
    // 64 blocks: the next prompt drives the one before out, while the router believes for a while that it is there.
    let small = ["--sim-blocks", "64", "--sim-max-model-len", "1000", "--sim-no-kv-events", "--sim-speedup", "1000"];
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
        let response = request.header("content-type", "application/json").body(ask("x").to_string()).send().await;
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
    let waiting =
        tokio::spawn(
            async move { client.post(url).header("content-type", "application/json").body(body).send().await },
        );
    let pending = async || workers(&server).await.iter().any(|worker| number(&worker["pending_tokens"]) >= 100);
    wait_for("a busy engine", SOON, pending).await;
    let refused = server.chat(&ask("moons")).await;
    assert_eq!(refused.status, 529, "{}", refused.text);
    assert_eq!(refused.json()["error"]["code"], "engines_busy");
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(server.metric("chiasm_busy_refusals_total").await, 1.0);
    waiting.abort();
}
