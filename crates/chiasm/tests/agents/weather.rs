//! Requests to two frontends of several agents, while agents and frontends are killed, stopped and
//! restarted.
//!
//! `CHIASM_TEST_SEED` seeds the choice of faults; the test prints its value.
//! `CHIASM_TEST_FAULTS` is the number of faults.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::cluster::{Agent, Cluster};
use super::failures::count_answered;
use super::{TIMEOUT, workers};
use crate::support::{self, Server, demo_model, wait_for};

/// The default number of faults.
const DEFAULT_FAULTS: usize = 25;
/// The number of clients per frontend.
const CLIENTS: usize = 4;
/// The time after which a request counts as hung: longer than any of its deadlines.
const HANG_TIMEOUT: Duration = Duration::from_secs(60);
const PICTURES: [&str; 3] = ["dawn", "noon", "storm"];
/// The number of prompts without a picture.
const TEXT_PROMPTS: usize = 12;
/// The values of `max_tokens`.
const TOKENS: [u32; 2] = [3, 24];
/// Flags for fast simulated engines.
const QUICK: [&str; 6] = ["--sim", "1", "--sim-decode-rate", "200", "--sim-image-ms", "2"];
/// The value of `--agent-media` for each frontend.
const MEDIA: [&str; 2] = ["auto", "tensors"];

/// Prompts, identified by number, and their correct answers.
struct Prompts {
    /// The correct answers, by prompt.
    expected: Vec<ExpectedAnswer>,
    pictures: Vec<String>,
}

/// The correct answer to a prompt: simulated engines repeat a description of the images and the
/// number of cached tokens.
#[derive(Default)]
struct ExpectedAnswer {
    /// The text before the number of cached tokens.
    images: String,
    /// The text after the number of cached tokens. The number itself depends on earlier requests.
    cached: String,
}

impl ExpectedAnswer {
    /// Returns `true` if `answer`, which may be cut off anywhere, is correct.
    fn matches(&self, answer: &str) -> bool {
        let mut rest = answer;
        loop {
            for (text, is_before_number) in [(&*self.images, true), (&*self.cached, false)] {
                let Some(more) = rest.strip_prefix(text) else { return text.starts_with(rest) };
                rest = if is_before_number {
                    more.trim_start_matches(|c: char| c.is_ascii_digit())
                } else {
                    more
                };
            }
        }
    }
}

impl Prompts {
    /// Records the answers of an undisturbed server.
    async fn record() -> Arc<Self> {
        let model = demo_model().display().to_string();
        let server = Server::start(&[&[&model, "--served-model-name", "m"], &QUICK[..]].concat());
        server.wait_ready(1, TIMEOUT).await;
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/images");
        let picture = |name: &str| {
            let bytes = std::fs::read(folder.join(format!("{name}.jpg"))).expect("a picture");
            format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
        };
        let mut prompts = Self { expected: Vec::new(), pictures: PICTURES.map(picture).into() };
        for prompt in 0..TEXT_PROMPTS + PICTURES.len() {
            let body = server.chat(&prompts.body(prompt, 100, false)).await.ok();
            let text = body["choices"][0]["message"]["content"].as_str().expect("text");
            let images = format!("{}; ", text.split_once("; ").expect("two parts").0);
            let cached =
                format!(" of {} prompt tokens were cached", body["usage"]["prompt_tokens"]);
            let expected = ExpectedAnswer { images, cached };
            assert!(expected.matches(text), "'{text}'");
            prompts.expected.push(expected);
        }
        Arc::new(prompts)
    }

    fn body(&self, prompt: usize, tokens: u32, stream: bool) -> Value {
        let text = format!("question {prompt} of many ").repeat(1 + prompt % 4 * 8);
        let mut content = vec![json!({"type": "text", "text": text})];
        let picture = prompt.checked_sub(TEXT_PROMPTS).and_then(|index| self.pictures.get(index));
        if let Some(url) = picture {
            content.insert(0, json!({"type": "image_url", "image_url": {"url": url}}));
        }
        json!({
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "ignore_eos": true,
            "stream": stream,
        })
    }
}

/// The outcomes of all requests.
#[derive(Debug, Default)]
struct Tally {
    correct: AtomicUsize,
    /// Streams that ended after a token, with an error event or without an end.
    cut: AtomicUsize,
    /// The texts of errors before any token.
    refused: Mutex<Vec<String>>,
    /// Requests lost with their frontend.
    lost: AtomicUsize,
}

/// Sends requests to the frontend at `url`, which may change, until `stop` is set.
async fn run_client(
    prompts: Arc<Prompts>,
    url: Arc<Mutex<String>>,
    tally: Arc<Tally>,
    stop: Arc<AtomicBool>,
    seed: u64,
) {
    let client = support::client();
    let mut rng = SmallRng::seed_from_u64(seed);
    while !stop.load(Relaxed) {
        let prompt = rng.random_range(0..prompts.expected.len());
        let tokens = TOKENS[rng.random_range(0..2)];
        let stream = rng.random_bool(0.5);
        let body = prompts.body(prompt, tokens, stream);
        let url = format!("{}/v1/chat/completions", url.lock().expect("not poisoned"));
        let request = client
            .post(url)
            .header("content-type", "application/json")
            .body(body.to_string())
            .send();
        let answer = async {
            let answer = request.await?;
            Ok::<_, reqwest::Error>((answer.status().as_u16(), answer.text().await?))
        };
        let answer = tokio::time::timeout(HANG_TIMEOUT, answer).await.expect("no request hangs");
        match answer {
            Err(_) => {
                tally.lost.fetch_add(1, Relaxed);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok((200, text)) => {
                let (content, is_cut) =
                    if stream { parse_stream(&text) } else { (parse_whole(&text, tokens), false) };
                assert!(
                    prompts.expected[prompt].matches(&content) && (is_cut || !content.is_empty()),
                    "prompt {prompt}: '{content}'"
                );
                let count = if is_cut { &tally.cut } else { &tally.correct };
                count.fetch_add(1, Relaxed);
            }
            Ok((status, text)) => {
                assert!([502, 503, 504].contains(&status), "{status}: {text}");
                tally.refused.lock().expect("not poisoned").push(text);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Returns the content of a whole answer, which must have `tokens` tokens.
fn parse_whole(text: &str, tokens: u32) -> String {
    let body: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(body["usage"]["completion_tokens"], tokens);
    body["choices"][0]["message"]["content"].as_str().expect("text").to_owned()
}

/// Returns the content of a stream, and `true` if the stream is cut: by an error event, or without
/// an end because its frontend died.
fn parse_stream(text: &str) -> (String, bool) {
    let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let mut content = String::new();
    let mut is_done = false;
    let mut has_error = false;
    for event in events {
        is_done |= event == "[DONE]";
        let event: Value = serde_json::from_str(event).unwrap_or_default();
        has_error |= event.get("error").is_some();
        content.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    (content, has_error || !is_done)
}

/// Agents, frontends and their clients.
struct TestHarness {
    cluster: Cluster,
    agents: Vec<Agent>,
    frontends: Vec<Server>,
    urls: Vec<Arc<Mutex<String>>>,
    addresses: String,
    tally: Arc<Tally>,
    stop: Arc<AtomicBool>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

fn agent_flags() -> Vec<&'static str> {
    [&QUICK[..], &["--take-tensors"]].concat()
}

impl TestHarness {
    async fn new(agents: u8, seed: u64) -> Self {
        let cluster = Cluster::new();
        let flags = agent_flags();
        let agents: Vec<_> = (1..=agents).map(|machine| cluster.agent(machine, &flags)).collect();
        let addresses: Vec<_> = agents.iter().map(|agent| agent.address.clone()).collect();
        let addresses = addresses.join(",");
        let serve = |media| cluster.serve_at(&addresses, &["--agent-media", media]);
        let frontends: Vec<_> = MEDIA.into_iter().map(serve).collect();
        for frontend in &frontends {
            frontend.wait_ready(agents.len() as u64, TIMEOUT).await;
        }
        let urls: Vec<_> =
            frontends.iter().map(|frontend| Arc::new(Mutex::new(frontend.url.clone()))).collect();
        let prompts = Prompts::record().await;
        let tally = Arc::<Tally>::default();
        let stop = Arc::<AtomicBool>::default();
        let client = |number: usize| {
            let url = urls[number % urls.len()].clone();
            let seed = seed ^ number as u64;
            tokio::spawn(run_client(prompts.clone(), url, tally.clone(), stop.clone(), seed))
        };
        let clients = (0..CLIENTS * urls.len()).map(client).collect();
        Self { cluster, agents, frontends, urls, addresses, tally, stop, clients }
    }

    fn restart_agent(&mut self, number: usize) {
        let (host, port) = self.agents[number]
            .address
            .rsplit_once(':')
            .map(|(h, p)| (h.to_owned(), p.to_owned()))
            .expect("host:port");
        self.agents[number] = self.cluster.agent_at(&host, &port, &agent_flags());
    }

    fn restart_frontend(&mut self, number: usize) {
        self.frontends[number] =
            self.cluster.serve_at(&self.addresses, &["--agent-media", MEDIA[number]]);
        *self.urls[number].lock().expect("not poisoned") = self.frontends[number].url.clone();
    }

    async fn wait_all_ready(&self) {
        for frontend in &self.frontends {
            frontend.wait_ready(self.agents.len() as u64, TIMEOUT).await;
        }
    }

    /// Stops the clients and checks that none of their requests is left in frontends and engines.
    async fn stop_clients(&mut self) {
        self.stop.store(true, Relaxed);
        for client in self.clients.drain(..) {
            client.await.expect("a client got an unexpected answer");
        }
        self.wait_all_ready().await;
        for frontend in &self.frontends {
            let is_idle =
                |worker: &Value| worker["requests"] == 0 && worker["engine"]["running"] == 0;
            wait_for("the end of all requests", TIMEOUT, async || {
                workers(frontend).await.iter().all(is_idle)
            })
            .await;
            assert_eq!(count_answered(frontend, 16).await, 16);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults_cause_no_hang_or_wrong_token() {
    let setting = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seed = setting("CHIASM_TEST_SEED").unwrap_or_else(rand::random);
    let faults = setting("CHIASM_TEST_FAULTS").map_or(DEFAULT_FAULTS, |faults| faults as usize);
    eprintln!("CHIASM_TEST_SEED={seed} CHIASM_TEST_FAULTS={faults}");
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut harness = TestHarness::new(3, seed).await;
    let mut restarts = 0;
    for _ in 0..faults {
        tokio::time::sleep(Duration::from_millis(rng.random_range(50..500))).await;
        let agent = rng.random_range(0..harness.agents.len());
        let frontend = rng.random_range(0..harness.frontends.len());
        let pause = Duration::from_millis(rng.random_range(50..3500));
        match rng.random_range(0..5) {
            0 => {
                harness.agents[agent].kill();
                harness.restart_agent(agent);
            }
            1 => {
                harness.agents[agent].signal("TERM");
                assert!(harness.agents[agent].wait());
                harness.restart_agent(agent);
            }
            2 => {
                harness.agents[agent].signal("STOP");
                tokio::time::sleep(pause).await;
                harness.agents[agent].signal("CONT");
            }
            3 => {
                harness.frontends[frontend].signal_and_wait("KILL");
                restarts += 1;
                harness.restart_frontend(frontend);
            }
            _ => {
                support::send_signal(harness.frontends[frontend].pid(), "STOP");
                tokio::time::sleep(pause / 3).await;
                support::send_signal(harness.frontends[frontend].pid(), "CONT");
            }
        }
    }
    harness.stop_clients().await;
    eprintln!("{:?}", harness.tally);
    let Tally { correct, lost, .. } = &*harness.tally;
    assert!(correct.load(Relaxed) > faults * 4);
    assert!(
        restarts > 0 || lost.load(Relaxed) == 0,
        "requests were lost although no frontend was killed"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restart_fails_no_request() {
    let mut harness = TestHarness::new(4, 7).await;
    for agent in 0..harness.agents.len() {
        let before = harness.tally.correct.load(Relaxed);
        harness.agents[agent].signal("TERM");
        assert!(harness.agents[agent].wait());
        harness.restart_agent(agent);
        harness.wait_all_ready().await;
        let has_answers = async || harness.tally.correct.load(Relaxed) > before + 20;
        wait_for("answers", TIMEOUT, has_answers).await;
    }
    harness.stop_clients().await;
    let Tally { cut, refused, lost, .. } = &*harness.tally;
    let refused = refused.lock().expect("not poisoned");
    assert!(
        refused.is_empty() && cut.load(Relaxed) == 0 && lost.load(Relaxed) == 0,
        "{:?}",
        harness.tally
    );
}
