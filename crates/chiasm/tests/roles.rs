//! Simulated engines that encode, prefill or decode alone, which check what they hand to each
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

const SOON: Duration = Duration::from_secs(30);
/// Whatever is not computed yet is computed by engines that are there for it.
const ALWAYS: [&str; 4] = ["--disturb-weight", "1000", "--hop-weight", "0"];

async fn serve(engines: &str, workers: u64, extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let args = [&model, "--served-model-name", "m", "--sim", engines, "--allow-private-media"];
    let server = Server::start(&[&args, extra].concat());
    server.wait_ready(workers, SOON).await;
    server
}

/// A prompt of some tokens per word.
fn ask(topic: usize, words: usize) -> Value {
    let text =
        format!("Tell me of {topic}. {}", "All that there is to tell of it. ".repeat(words / 8));
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 24})
}

fn picture(index: usize, question: u64) -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(PICTURES[index].jpeg));
    json!({"model": "m", "max_tokens": 64, "cache_salt": question.to_string(), "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"},
    ]}]})
}

fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(fields);
    body
}

/// Who computed the prompt, if not whoever answered.
fn prefilled(answer: &Answer) -> Option<String> {
    answer
        .headers
        .get("x-chiasm-prefill-worker")
        .map(|worker| worker.to_str().expect("text").to_owned())
}

/// Who encoded pictures, if not whoever computed the prompt.
fn encoded(answer: &Answer) -> Option<String> {
    answer
        .headers
        .get("x-chiasm-encode-worker")
        .map(|worker| worker.to_str().expect("text").to_owned())
}

fn said(answer: &Answer) -> String {
    answer.ok()["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

async fn workers(server: &Server) -> Vec<Value> {
    let workers: Value =
        json(server.client.get(format!("{}/workers", server.url)).send().await.expect("workers"))
            .await;
    workers["workers"].as_array().expect("a list").clone()
}

#[tokio::test]
async fn the_ten_scenarios_go_where_they_should_stage_by_stage() {
    let server = serve("encode=1,prefill=2,decode=2", 5, &ALWAYS).await;
    scenario_run::play_all(&server, "m", 16, 8).await;
    assert!(server.metric("chiasm_encoded_items_total").await > 5.0);
    assert_eq!(server.metric("chiasm_unencoded_items_total").await, 0.0);
    assert!(server.metric("chiasm_prefilled_requests_total").await > 10.0);
    assert_eq!(server.metric("chiasm_overlap_error_blocks_total").await, 0.0);
}

#[tokio::test]
async fn a_prompt_is_computed_by_one_engine_and_answered_by_another() {
    let server = serve("prefill=1,decode=1", 2, &ALWAYS).await;
    let answer = server.chat(&ask(1, 400)).await;
    let prompt = answer.ok()["usage"]["prompt_tokens"].as_u64().expect("a count");
    // All but the last token came from there.
    assert_eq!(
        said(&answer),
        format!("no images; {} of {prompt} prompt tokens were cached", prompt - 1)
    );
    assert_eq!(
        (prefilled(&answer).as_deref(), &*answer.header("x-chiasm-worker")),
        (Some("worker_0"), "worker_1")
    );
    assert_eq!(answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(answer.header("server-timing").contains("prefill;dur="));
    server.logged("prefill_worker=worker_0");
    let all = workers(&server).await;
    assert_eq!([&all[0]["role"], &all[1]["role"]], ["prefill", "decode"]);
    // Streams too, and pictures, whose tensors both engines have.
    let streamed = server.chat(&with(ask(2, 400), json!({"stream": true}))).await;
    assert!(streamed.chunks().len() > 2 && prefilled(&streamed).is_some());
    let seen = server.chat(&picture(0, 1)).await;
    assert!(said(&seen).starts_with("1 image ") && prefilled(&seen).is_some());
    // What is left of a prompt is good for one continuation, and not for who wants it computed.
    for fields in
        [json!({"n": 2}), json!({"prompt_logprobs": 1}), json!({"skip_reading_prefix_cache": true})]
    {
        let whole = server.chat(&with(ask(3, 400), fields)).await;
        whole.ok();
        assert_eq!(prefilled(&whole), None);
    }
    assert_eq!(server.metric("chiasm_retries_total").await, 0.0);
    wait_for("blocks that were left to be let go of", SOON, async || {
        workers(&server)
            .await
            .iter()
            .all(|worker| worker["engine"]["kv_usage"] == 0.0 && worker["requests"] == 0)
    })
    .await;
}

#[tokio::test]
async fn a_picture_is_encoded_once_for_all_engines() {
    let server = serve("encode=1,prefill=2,decode=1", 4, &ALWAYS).await;
    let first = server.chat(&picture(0, 1)).await;
    assert!(said(&first).starts_with("1 image "));
    assert_eq!((encoded(&first).as_deref(), prefilled(&first).is_some()), (Some("worker_0"), true));
    assert!(first.header("server-timing").contains("encode;dur="));
    server.logged("encode_worker=worker_0");
    // Nobody shares its blocks; wherever it goes, the embeddings are there.
    for question in 2..8 {
        let again = server.chat(&picture(0, question)).await;
        assert_eq!(
            (encoded(&again), said(&again).split(';').next()),
            (None, said(&first).split(';').next())
        );
    }
    assert_eq!(server.metric("chiasm_encoded_items_total").await, 1.0);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
    let text = server.chat(&ask(1, 400)).await;
    text.ok();
    assert_eq!(encoded(&text), None);
    let all = workers(&server).await;
    assert_eq!([&all[0]["role"], &all[1]["role"]], ["encode", "prefill"]);
}

#[tokio::test]
async fn several_who_ask_about_a_picture_at_once_have_it_encoded_once() {
    let server =
        serve("encode=2,aggregated=2", 4, &[&ALWAYS[..], &["--sim-image-ms", "300"]].concat())
            .await;
    let ask = async |question| server.chat(&picture(1, question)).await;
    let answers = futures_util::future::join_all((0..6).map(ask)).await;
    let by: std::collections::BTreeSet<_> = answers.iter().filter_map(encoded).collect();
    assert_eq!(by.len(), 1, "{by:?}");
    answers.iter().for_each(|answer| assert!(said(answer).starts_with("1 image ")));
}

#[tokio::test]
async fn an_idle_engine_computes_what_it_answers_and_what_it_holds_stays_there() {
    let server = serve("prefill=1,decode=1", 2, &[]).await;
    let first = server.chat(&ask(1, 400)).await;
    first.ok();
    assert_eq!((prefilled(&first), &*first.header("x-chiasm-worker")), (None, "worker_1"));
}

/// Engines as processes that can be killed, and their frontend.
struct Stand {
    engines: Vec<(&'static str, String, Process)>,
    frontend: Server,
    /// Where engines leave embeddings for each other.
    store: tempfile::TempDir,
}

impl Stand {
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
        let frontend = Server::start(&[&args[..], &ALWAYS].concat());
        let store = tempfile::tempdir().expect("a folder");
        let engines = roles.iter().zip(addresses).map(|(role, address)| {
            let process = engine(role, &address, store.path());
            (*role, address, process)
        });
        let stand = Self { engines: engines.collect(), frontend, store };
        stand.frontend.wait_ready(5, SOON).await;
        stand
    }
}

fn engine(role: &str, address: &str, store: &Path) -> Process {
    let model = demo_model().display().to_string();
    let args =
        ["sim-engine", "--handshake", address, "--model", &model, "--receiver-cache-gb", "0.1"];
    let fast = ["--sim-prompt-lease", "1", "--sim-decode-rate", "2000", "--sim-image-ms", "2"];
    let does = if role == "encode" { "--sim-encodes" } else { "--sim-kv-connector" };
    let mut engine = chiasm(&args);
    engine.args(fast).args([does, "--sim-embeddings"]).arg(store);
    Process(engine.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("an engine"))
}

/// Kills of engines: hundreds by hand.
fn kills() -> usize {
    std::env::var("CHIASM_TEST_ROLE_KILLS").map_or(20, |kills| kills.parse().expect("a number"))
}

#[tokio::test]
async fn no_request_is_lost_before_its_first_token_whoever_dies() {
    let mut stand = Stand::start().await;
    let frontend = &stand.frontend;
    let mut truth = Vec::new();
    for index in 0..PICTURES.len() {
        let text = said(&frontend.chat(&picture(index, 0)).await);
        truth.push(text.split(';').next().expect("what was seen").to_owned());
    }
    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|seed| {
            let (client, url) =
                (frontend.client.clone(), format!("{}/v1/chat/completions", frontend.url));
            let (truth, stop, answered) = (truth.clone(), stop.clone(), answered.clone());
            tokio::spawn(async move {
                let mut random = SmallRng::seed_from_u64(seed);
                while !stop.load(Ordering::Relaxed) {
                    let index = random.random_range(0..truth.len());
                    let body = picture(index, random.random_range(1..1_000_000));
                    let request = client
                        .post(&url)
                        .header("content-type", "application/json")
                        .body(body.to_string());
                    let answer = Answer::of(request.send().await.expect("an answer")).await;
                    let text = said(&answer);
                    assert!(text.starts_with(&truth[index]), "'{text}' is not '{}'", truth[index]);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let mut random = SmallRng::seed_from_u64(7);
    for _ in 0..kills() {
        tokio::time::sleep(Duration::from_millis(random.random_range(20..200))).await;
        let index = random.random_range(0..stand.engines.len());
        let ready = stand.frontend.lines_logged(&format!(" ready worker=worker_{index} "));
        let (role, address, process) = &mut stand.engines[index];
        process.end();
        *process = engine(role, address, stand.store.path());
        let frontend = &stand.frontend;
        let is_back =
            async || frontend.lines_logged(&format!(" ready worker=worker_{index} ")) > ready;
        wait_for("the engine that was started", SOON, is_back).await;
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("no answer was wrong or lost");
    }
    assert!(answered.load(Ordering::Relaxed) > kills());
    let frontend = &stand.frontend;
    assert!(frontend.metric("chiasm_prefilled_requests_total").await > 0.0);
    assert!(frontend.metric("chiasm_encoded_items_total").await > 0.0);
    // What nobody came for is let go of when its lease ends.
    wait_for("nothing to be held", SOON, async || {
        // One that was started last, and encodes, may have had nothing to do yet.
        let holds = |worker: &Value| worker["engine"]["kv_usage"].as_f64().unwrap_or(0.0) > 0.0;
        let idle = |worker: &Value| !holds(worker) && worker["requests"] == 0;
        let all = workers(frontend).await;
        all.len() == 5 && all.iter().all(idle)
    })
    .await;
    for (.., engine) in &mut stand.engines {
        assert!(
            engine.0.try_wait().expect("it can be asked").is_none(),
            "an engine that nobody killed has ended"
        );
    }
}
