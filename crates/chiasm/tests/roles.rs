//! Simulated engines that only encode, prefill or decode. They check what they hand over to each
//! other.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{
    Answer, Process, Server, chiasm, demo_model, free_port, json, scenario_run, wait_for,
};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::PICTURES;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Flags with which the router always sends stages to dedicated engines.
const ALWAYS_SPLIT: [&str; 4] = ["--disturb-weight", "1000", "--hop-weight", "0"];

async fn serve(engines: &str, workers: u64, extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let args = [&model, "--served-model-name", "m", "--sim", engines, "--allow-private-media"];
    let server = Server::start(&[&args, extra].concat());
    server.wait_ready(workers, TIMEOUT).await;
    server
}

/// Returns a request with a prompt of about `words` words.
fn text_body(topic: usize, words: usize) -> Value {
    let text =
        format!("Tell me of {topic}. {}", "All that there is to tell of it. ".repeat(words / 8));
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 24})
}

/// Returns a request about a picture. `salt` keeps its blocks apart from those of other requests.
fn picture_body(index: usize, salt: u64) -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(PICTURES[index].jpeg));
    let content = json!([
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]);
    json!({
        "model": "m",
        "max_tokens": 64,
        "cache_salt": salt.to_string(),
        "messages": [{"role": "user", "content": content}],
    })
}

/// Returns `body` with additional fields.
fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(fields);
    body
}

/// Returns the worker that computed the prompt, if it differs from the one that answered.
fn prefill_worker(answer: &Answer) -> Option<String> {
    answer
        .headers
        .get("x-chiasm-prefill-worker")
        .map(|worker| worker.to_str().expect("text").to_owned())
}

/// Returns the worker that encoded pictures, if it differs from the one that computed the prompt.
fn encode_worker(answer: &Answer) -> Option<String> {
    answer
        .headers
        .get("x-chiasm-encode-worker")
        .map(|worker| worker.to_str().expect("text").to_owned())
}

/// Returns the text of an answer.
fn text(answer: &Answer) -> String {
    answer.ok()["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

async fn workers(server: &Server) -> Vec<Value> {
    let workers: Value =
        json(server.client.get(format!("{}/workers", server.url)).send().await.expect("workers"))
            .await;
    workers["workers"].as_array().expect("a list").clone()
}

#[tokio::test]
async fn scenarios_are_routed_stage_by_stage() {
    let server = serve("encode=1,prefill=2,decode=2", 5, &ALWAYS_SPLIT).await;
    scenario_run::play_all(&server, "m", 16, 8).await;
    assert!(server.metric("chiasm_encoded_items_total").await > 5.0);
    assert_eq!(server.metric("chiasm_unencoded_items_total").await, 0.0);
    assert!(server.metric("chiasm_prefilled_requests_total").await > 10.0);
    assert_eq!(server.metric("chiasm_overlap_error_blocks_total").await, 0.0);
}

#[tokio::test]
async fn prompt_is_handed_over_to_the_decode_engine() {
    let server = serve("prefill=1,decode=1", 2, &ALWAYS_SPLIT).await;
    let answer = server.chat(&text_body(1, 400)).await;
    let prompt = answer.ok()["usage"]["prompt_tokens"].as_u64().expect("a count");
    // All but the last prompt token were computed by the prefill engine.
    assert_eq!(
        text(&answer),
        format!("no images; {} of {prompt} prompt tokens were cached", prompt - 1)
    );
    assert_eq!(
        (prefill_worker(&answer).as_deref(), &*answer.header("x-chiasm-worker")),
        (Some("worker_0"), "worker_1")
    );
    assert_eq!(answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(answer.header("server-timing").contains("prefill;dur="));
    server.wait_for_log("prefill_worker=worker_0");
    let all = workers(&server).await;
    assert_eq!([&all[0]["role"], &all[1]["role"]], ["prefill", "decode"]);
    // Streams are split, too, and so are pictures, whose tensors both engines have.
    let streamed = server.chat(&with(text_body(2, 400), json!({"stream": true}))).await;
    assert!(streamed.chunks().len() > 2 && prefill_worker(&streamed).is_some());
    let with_picture = server.chat(&picture_body(0, 1)).await;
    assert!(text(&with_picture).starts_with("1 image ") && prefill_worker(&with_picture).is_some());
    // A prompt that was handed over serves one choice only, and no request that needs the whole
    // prompt computed.
    for fields in
        [json!({"n": 2}), json!({"prompt_logprobs": 1}), json!({"skip_reading_prefix_cache": true})]
    {
        let whole = server.chat(&with(text_body(3, 400), fields)).await;
        whole.ok();
        assert_eq!(prefill_worker(&whole), None);
    }
    assert_eq!(server.metric("chiasm_retries_total").await, 0.0);
    wait_for("the release of handed-over blocks", TIMEOUT, async || {
        workers(&server)
            .await
            .iter()
            .all(|worker| worker["engine"]["kv_usage"] == 0.0 && worker["requests"] == 0)
    })
    .await;
}

#[tokio::test]
async fn picture_is_encoded_once_for_all_engines() {
    let server = serve("encode=1,prefill=2,decode=1", 4, &ALWAYS_SPLIT).await;
    let first = server.chat(&picture_body(0, 1)).await;
    assert!(text(&first).starts_with("1 image "));
    assert_eq!(
        (encode_worker(&first).as_deref(), prefill_worker(&first).is_some()),
        (Some("worker_0"), true)
    );
    assert!(first.header("server-timing").contains("encode;dur="));
    server.wait_for_log("encode_worker=worker_0");
    // With other salts no blocks match. Every engine finds the embeddings.
    for salt in 2..8 {
        let again = server.chat(&picture_body(0, salt)).await;
        assert_eq!(
            (encode_worker(&again), text(&again).split(';').next()),
            (None, text(&first).split(';').next())
        );
    }
    assert_eq!(server.metric("chiasm_encoded_items_total").await, 1.0);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
    let text_only = server.chat(&text_body(1, 400)).await;
    text_only.ok();
    assert_eq!(encode_worker(&text_only), None);
    let all = workers(&server).await;
    assert_eq!([&all[0]["role"], &all[1]["role"]], ["encode", "prefill"]);
}

#[tokio::test]
async fn concurrent_requests_encode_a_picture_once() {
    let server = serve(
        "encode=2,aggregated=2",
        4,
        &[&ALWAYS_SPLIT[..], &["--sim-image-ms", "300"]].concat(),
    )
    .await;
    let send = async |salt| server.chat(&picture_body(1, salt)).await;
    let answers = futures_util::future::join_all((0..6).map(send)).await;
    let workers: std::collections::BTreeSet<_> = answers.iter().filter_map(encode_worker).collect();
    assert_eq!(workers.len(), 1, "{workers:?}");
    answers.iter().for_each(|answer| assert!(text(answer).starts_with("1 image ")));
}

#[tokio::test]
async fn idle_decode_engine_computes_its_own_prompt() {
    let server = serve("prefill=1,decode=1", 2, &[]).await;
    let first = server.chat(&text_body(1, 400)).await;
    first.ok();
    assert_eq!((prefill_worker(&first), &*first.header("x-chiasm-worker")), (None, "worker_1"));
}

/// A frontend and its engines, as processes that can be killed.
struct TestHarness {
    engines: Vec<(&'static str, String, Process)>,
    frontend: Server,
    /// The folder in which engines share embeddings.
    store: tempfile::TempDir,
}

impl TestHarness {
    async fn start() -> Self {
        let model = demo_model().display().to_string();
        let roles = ["encode", "prefill", "prefill", "decode", "decode"];
        let addresses = roles.map(|_| format!("tcp://127.0.0.1:{}", free_port()));
        let attach: Vec<_> = roles
            .iter()
            .zip(&addresses)
            .map(|(role, address)| format!("{role}={address}"))
            .collect();
        let attach = attach.join(",");
        let args =
            [&model, "--served-model-name", "m", "--attach", &attach, "--receiver-cache-gb", "0.1"];
        let frontend = Server::start(&[&args[..], &ALWAYS_SPLIT].concat());
        let store = tempfile::tempdir().expect("a folder");
        let engines = roles.iter().zip(addresses).map(|(role, address)| {
            let process = engine(role, &address, store.path());
            (*role, address, process)
        });
        let harness = Self { engines: engines.collect(), frontend, store };
        harness.frontend.wait_ready(5, TIMEOUT).await;
        harness
    }
}

fn engine(role: &str, address: &str, store: &Path) -> Process {
    let model = demo_model().display().to_string();
    let args =
        ["sim-engine", "--handshake", address, "--model", &model, "--receiver-cache-gb", "0.1"];
    let fast = ["--sim-prompt-lease", "1", "--sim-decode-rate", "2000", "--sim-image-ms", "2"];
    let role_flag = if role == "encode" { "--sim-encodes" } else { "--sim-kv-connector" };
    let mut engine = chiasm(&args);
    engine.args(fast).args([role_flag, "--sim-embeddings"]).arg(store);
    Process(engine.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("an engine"))
}

/// Returns the number of kills; `CHIASM_TEST_ROLE_KILLS` overrides the default for long runs.
fn kills() -> usize {
    std::env::var("CHIASM_TEST_ROLE_KILLS").map_or(20, |kills| kills.parse().expect("a number"))
}

#[tokio::test]
async fn engine_deaths_lose_no_request_without_tokens() {
    let mut harness = TestHarness::start().await;
    let frontend = &harness.frontend;
    let mut expected = Vec::new();
    for index in 0..PICTURES.len() {
        let text = text(&frontend.chat(&picture_body(index, 0)).await);
        expected.push(text.split(';').next().expect("a description").to_owned());
    }
    let stop = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..4)
        .map(|seed| {
            let client = frontend.client.clone();
            let url = format!("{}/v1/chat/completions", frontend.url);
            let expected = expected.clone();
            let stop = stop.clone();
            let answered = answered.clone();
            tokio::spawn(async move {
                let mut random = SmallRng::seed_from_u64(seed);
                while !stop.load(Ordering::Relaxed) {
                    let index = random.random_range(0..expected.len());
                    let body = picture_body(index, random.random_range(1..1_000_000));
                    let request = client
                        .post(&url)
                        .header("content-type", "application/json")
                        .body(body.to_string());
                    let answer = Answer::read(request.send().await.expect("an answer")).await;
                    let text = text(&answer);
                    let prefix = &expected[index];
                    assert!(text.starts_with(prefix), "'{text}' is not '{prefix}'");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let mut random = SmallRng::seed_from_u64(7);
    for _ in 0..kills() {
        tokio::time::sleep(Duration::from_millis(random.random_range(20..200))).await;
        let index = random.random_range(0..harness.engines.len());
        let ready = harness.frontend.count_logged(&format!(" ready worker=worker_{index} "));
        let (role, address, process) = &mut harness.engines[index];
        process.end();
        *process = engine(role, address, harness.store.path());
        let frontend = &harness.frontend;
        let is_back =
            async || frontend.count_logged(&format!(" ready worker=worker_{index} ")) > ready;
        wait_for("the new engine", TIMEOUT, is_back).await;
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("no wrong or lost answer");
    }
    assert!(answered.load(Ordering::Relaxed) > kills());
    let frontend = &harness.frontend;
    assert!(frontend.metric("chiasm_prefilled_requests_total").await > 0.0);
    assert!(frontend.metric("chiasm_encoded_items_total").await > 0.0);
    // Prompts that were never fetched are released when their lease ends.
    wait_for("the release of all blocks", TIMEOUT, async || {
        // An engine that was just started may not have reported its usage yet.
        let holds = |worker: &Value| worker["engine"]["kv_usage"].as_f64().unwrap_or(0.0) > 0.0;
        let is_idle = |worker: &Value| !holds(worker) && worker["requests"] == 0;
        let workers = workers(frontend).await;
        workers.len() == 5 && workers.iter().all(is_idle)
    })
    .await;
    for (.., engine) in &mut harness.engines {
        assert!(engine.0.try_wait().expect("a status").is_none(), "an engine has exited by itself");
    }
}
