//! Requests to two frontends of several agents while agents and frontends are killed, stopped and
//! restarted.
//!
//! `CHIASM_TEST_SEED`, which is printed, chooses the faults, `CHIASM_TEST_FAULTS` how many there
//! are.

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
use super::failures::answered;
use super::{SOON, workers};
use crate::support::{self, Server, demo_model, wait_for};

/// Faults of a run that nobody has asked for more of.
const FAULTS: usize = 25;
/// Clients of each frontend.
const CLIENTS: usize = 4;
/// Longer than any deadline of a request here.
const HANGS: Duration = Duration::from_secs(60);
const PICTURES: [&str; 3] = ["dawn", "noon", "storm"];
/// Prompts without a picture.
const TEXTS: usize = 12;
const TOKENS: [u32; 2] = [3, 24];
const QUICK: [&str; 6] = ["--sim", "1", "--sim-decode-rate", "200", "--sim-image-ms", "2"];
/// How each of the frontends sends images.
const MEDIA: [&str; 2] = ["auto", "tensors"];

/// What is asked: prompts by their numbers, and what the right answers are.
struct Questions {
    /// By prompt.
    right: Vec<Right>,
    pictures: Vec<String>,
}

/// What simulated engines say of a prompt, again and again: what they see, and how many of its
/// tokens were cached.
#[derive(Default)]
struct Right {
    sees: String,
    /// What comes after the number of cached tokens, which depends on what an engine was asked
    /// before.
    cached: String,
}

impl Right {
    /// Whether an answer, as long as it is, is right.
    fn agrees(&self, said: &str) -> bool {
        let mut rest = said;
        loop {
            for (text, is_number) in [(&*self.sees, true), (&*self.cached, false)] {
                let Some(more) = rest.strip_prefix(text) else { return text.starts_with(rest) };
                rest = if is_number {
                    more.trim_start_matches(|c: char| c.is_ascii_digit())
                } else {
                    more
                };
            }
        }
    }
}

impl Questions {
    /// The answers of a server that nothing happens to.
    async fn ask_all() -> Arc<Self> {
        let model = demo_model().display().to_string();
        let calm = Server::start(&[&[&model, "--served-model-name", "m"], &QUICK[..]].concat());
        calm.wait_ready(1, SOON).await;
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/images");
        let picture = |name: &str| {
            let bytes = std::fs::read(folder.join(format!("{name}.jpg"))).expect("a picture");
            format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
        };
        let mut questions = Self { right: Vec::new(), pictures: PICTURES.map(picture).into() };
        for prompt in 0..TEXTS + PICTURES.len() {
            let body = calm.chat(&questions.body(prompt, 100, false)).await.ok();
            let said = body["choices"][0]["message"]["content"].as_str().expect("text");
            let sees = format!("{}; ", said.split_once("; ").expect("two parts").0);
            let cached =
                format!(" of {} prompt tokens were cached", body["usage"]["prompt_tokens"]);
            let right = Right { sees, cached };
            assert!(right.agrees(said), "'{said}'");
            questions.right.push(right);
        }
        Arc::new(questions)
    }

    fn body(&self, prompt: usize, tokens: u32, stream: bool) -> Value {
        let text = format!("question {prompt} of many ").repeat(1 + prompt % 4 * 8);
        let mut content = vec![json!({"type": "text", "text": text})];
        if let Some(url) = prompt.checked_sub(TEXTS).and_then(|picture| self.pictures.get(picture))
        {
            content.insert(0, json!({"type": "image_url", "image_url": {"url": url}}));
        }
        let messages = json!([{"role": "user", "content": content}]);
        json!({"model": "m", "messages": messages, "max_tokens": tokens, "ignore_eos": true, "stream": stream})
    }
}

/// What became of requests.
#[derive(Debug, Default)]
struct Tally {
    right: AtomicUsize,
    /// Streams that had a token and ended with an error that says so.
    cut: AtomicUsize,
    /// Answered with an error, before any token.
    refused: Mutex<Vec<String>>,
    /// Lost with their frontend.
    lost: AtomicUsize,
}

/// Asks a frontend, wherever it is at the moment, until it is told to stop.
async fn ask_on(
    questions: Arc<Questions>,
    url: Arc<Mutex<String>>,
    tally: Arc<Tally>,
    stop: Arc<AtomicBool>,
    seed: u64,
) {
    let client = support::client();
    let mut rng = SmallRng::seed_from_u64(seed);
    while !stop.load(Relaxed) {
        let prompt = rng.random_range(0..questions.right.len());
        let (tokens, stream) = (TOKENS[rng.random_range(0..2)], rng.random_bool(0.5));
        let body = questions.body(prompt, tokens, stream);
        let to = format!("{}/v1/chat/completions", url.lock().expect("not poisoned"));
        let asked = client
            .post(to)
            .header("content-type", "application/json")
            .body(body.to_string())
            .send();
        let answered = async {
            let answer = asked.await?;
            Ok::<_, reqwest::Error>((answer.status().as_u16(), answer.text().await?))
        };
        let answered = tokio::time::timeout(HANGS, answered).await.expect("no request hangs");
        match answered {
            Err(_) => {
                tally.lost.fetch_add(1, Relaxed);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok((200, text)) => {
                let (said, failed) =
                    if stream { of_stream(&text) } else { of_whole(&text, tokens) };
                assert!(
                    questions.right[prompt].agrees(&said) && (failed || !said.is_empty()),
                    "prompt {prompt}: '{said}'"
                );
                let count = if failed { &tally.cut } else { &tally.right };
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

fn of_whole(text: &str, tokens: u32) -> (String, bool) {
    let body: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(body["usage"]["completion_tokens"], tokens);
    (body["choices"][0]["message"]["content"].as_str().expect("text").to_owned(), false)
}

/// The text of a stream, and whether it failed: by an error that it tells, or without an end, as it
/// was lost with its frontend.
fn of_stream(text: &str) -> (String, bool) {
    let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let (mut said, mut is_done, mut has_error) = (String::new(), false, false);
    for event in events {
        is_done |= event == "[DONE]";
        let event: Value = serde_json::from_str(event).unwrap_or_default();
        has_error |= event.get("error").is_some();
        said.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    (said, has_error || !is_done)
}

/// Agents, frontends and clients.
struct Stand {
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

impl Stand {
    async fn new(agents: u8, seed: u64) -> Self {
        let cluster = Cluster::new();
        let flags = agent_flags();
        let agents: Vec<_> = (1..=agents).map(|machine| cluster.agent(machine, &flags)).collect();
        let addresses: Vec<_> = agents.iter().map(|agent| agent.address.clone()).collect();
        let addresses = addresses.join(",");
        let serve = |media| cluster.serve_at(&addresses, &["--agent-media", media]);
        let frontends: Vec<_> = MEDIA.into_iter().map(serve).collect();
        for frontend in &frontends {
            frontend.wait_ready(agents.len() as u64, SOON).await;
        }
        let urls: Vec<_> =
            frontends.iter().map(|frontend| Arc::new(Mutex::new(frontend.url.clone()))).collect();
        let questions = Questions::ask_all().await;
        let (tally, stop) = (Arc::<Tally>::default(), Arc::<AtomicBool>::default());
        let client = |number: usize| {
            let url = urls[number % urls.len()].clone();
            let asks =
                ask_on(questions.clone(), url, tally.clone(), stop.clone(), seed ^ number as u64);
            tokio::spawn(asks)
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

    async fn all_ready(&self) {
        for frontend in &self.frontends {
            frontend.wait_ready(self.agents.len() as u64, SOON).await;
        }
    }

    /// Ends the clients, and checks that nothing is left of their requests, in frontends and in
    /// engines.
    async fn calm(&mut self) {
        self.stop.store(true, Relaxed);
        for client in self.clients.drain(..) {
            client.await.expect("a client that saw what it must not");
        }
        self.all_ready().await;
        for frontend in &self.frontends {
            let is_idle =
                |worker: &Value| worker["requests"] == 0 && worker["engine"]["running"] == 0;
            wait_for("the end of all requests", SOON, async || {
                workers(frontend).await.iter().all(is_idle)
            })
            .await;
            assert_eq!(answered(frontend, 16).await, 16);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_dies_no_request_hangs_and_no_token_is_wrong() {
    let setting = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seed = setting("CHIASM_TEST_SEED").unwrap_or_else(rand::random);
    let faults = setting("CHIASM_TEST_FAULTS").map_or(FAULTS, |faults| faults as usize);
    eprintln!("CHIASM_TEST_SEED={seed} CHIASM_TEST_FAULTS={faults}");
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut stand = Stand::new(3, seed).await;
    let mut restarts = 0;
    for _ in 0..faults {
        tokio::time::sleep(Duration::from_millis(rng.random_range(50..500))).await;
        let (agent, frontend) =
            (rng.random_range(0..stand.agents.len()), rng.random_range(0..stand.frontends.len()));
        let pause = Duration::from_millis(rng.random_range(50..3500));
        match rng.random_range(0..5) {
            0 => {
                stand.agents[agent].kill();
                stand.restart_agent(agent);
            }
            1 => {
                stand.agents[agent].signal("TERM");
                assert!(stand.agents[agent].wait());
                stand.restart_agent(agent);
            }
            2 => {
                stand.agents[agent].signal("STOP");
                tokio::time::sleep(pause).await;
                stand.agents[agent].signal("CONT");
            }
            3 => {
                stand.frontends[frontend].end_by("KILL");
                restarts += 1;
                stand.restart_frontend(frontend);
            }
            _ => {
                support::send_signal(stand.frontends[frontend].pid(), "STOP");
                tokio::time::sleep(pause / 3).await;
                support::send_signal(stand.frontends[frontend].pid(), "CONT");
            }
        }
    }
    stand.calm().await;
    eprintln!("{:?}", stand.tally);
    let Tally { right, lost, .. } = &*stand.tally;
    assert!(right.load(Relaxed) > faults * 4);
    assert!(
        restarts > 0 || lost.load(Relaxed) == 0,
        "requests were lost with a frontend that lived"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_fails_no_request() {
    let mut stand = Stand::new(4, 7).await;
    for agent in 0..stand.agents.len() {
        let before = stand.tally.right.load(Relaxed);
        stand.agents[agent].signal("TERM");
        assert!(stand.agents[agent].wait());
        stand.restart_agent(agent);
        stand.all_ready().await;
        let asked = async || stand.tally.right.load(Relaxed) > before + 20;
        wait_for("answers", SOON, asked).await;
    }
    stand.calm().await;
    let Tally { cut, refused, lost, .. } = &*stand.tally;
    let refused = refused.lock().expect("not poisoned");
    assert!(
        refused.is_empty() && cut.load(Relaxed) == 0 && lost.load(Relaxed) == 0,
        "{:?}",
        stand.tally
    );
}
