//! `kill -9` of frontends and engines at random moments under load.
//!
//! Simulated engines run as separate processes and check every slot that they read. When a frontend
//! dies, its engines are restarted or taken over by the next one.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{Process, Server, chiasm, client, demo_model, free_port, wait_for};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::PICTURES;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;

const ENGINES: usize = 2;
const CLIENTS: usize = 4;
/// The number of pictures that fit a receiver cache.
const CACHED: usize = 3;
/// The raw patches of a picture: 320 patches of 1,176 values.
const PICTURE_BYTES: usize = 320 * 1176;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the number of kills; `CHIASM_TEST_KILLS` overrides the default for long runs.
fn kills() -> usize {
    std::env::var("CHIASM_TEST_KILLS").map_or(100, |kills| kills.parse().expect("a number"))
}

/// Returns the size of this many pictures in GiB, as a flag's value.
fn gib(pictures: usize) -> String {
    format!("{}", (pictures * (PICTURE_BYTES + 8192)) as f64 / (1_u64 << 30) as f64)
}

/// A frontend and its engines, as processes that can be killed.
struct TestHarness {
    model: String,
    addresses: Vec<String>,
    engines: Vec<Process>,
    frontend: Server,
    /// The process ids of earlier frontends.
    ended: Vec<u32>,
    /// The state folder shared by all frontends.
    state: TempDir,
    /// The number of engines that earlier frontends have taken over.
    taken_over: usize,
    /// For each engine, the number of "ready" lines in the frontend's log once its latest process
    /// is ready.
    expected_ready_lines: [usize; ENGINES],
}

/// The fate of the engines when their frontend is replaced.
#[derive(Clone, Copy, PartialEq)]
enum EngineFate {
    Restarted,
    TakenOver,
}

impl TestHarness {
    fn start() -> Self {
        let model = demo_model().display().to_string();
        let addresses: Vec<_> =
            (0..ENGINES).map(|_| format!("tcp://127.0.0.1:{}", free_port())).collect();
        let state = tempfile::tempdir().expect("a folder");
        let frontend = frontend(&model, &addresses, &state);
        let engines = addresses.iter().map(|address| engine(&model, address)).collect();
        Self {
            model,
            addresses,
            engines,
            frontend,
            ended: Vec::new(),
            state,
            taken_over: 0,
            expected_ready_lines: [1; ENGINES],
        }
    }

    /// Asserts that all engines run. A simulated engine exits if a slot is written to while it is
    /// lent.
    fn check_engines(&mut self) {
        for engine in &mut self.engines {
            let status = engine.0.try_wait().expect("a status");
            assert!(status.is_none(), "an engine has exited by itself: {status:?}");
        }
    }

    fn kill_engine(&mut self, index: usize) {
        self.engines[index].end();
        self.expected_ready_lines[index] = self.ready_lines(index) + 1;
        self.engines[index] = engine(&self.model, &self.addresses[index]);
    }

    /// Returns the number of log lines so far that report engine `index` as ready.
    fn ready_lines(&self, index: usize) -> usize {
        self.frontend.count_logged(&format!(" ready worker=worker_{index} "))
    }

    /// Waits until all running engines are ready. `/ready` alone is not enough: killed engines
    /// count as ready until the frontend detects their death.
    async fn wait_all_ready(&self) {
        let all_ready = async || {
            (0..ENGINES).all(|index| self.ready_lines(index) >= self.expected_ready_lines[index])
        };
        wait_for("log lines about ready engines", TIMEOUT, all_ready).await;
        self.frontend.wait_ready(ENGINES as u64, TIMEOUT).await;
    }

    /// Ends the frontend with a signal and starts another one.
    fn replace_frontend(&mut self, signal: &str, fate: EngineFate) {
        self.taken_over += self.frontend.count_logged(TAKEN_OVER);
        self.ended.push(self.frontend.pid());
        self.frontend.signal_and_wait(signal);
        if fate == EngineFate::Restarted {
            self.engines.clear();
        }
        self.frontend = frontend(&self.model, &self.addresses, &self.state);
        self.expected_ready_lines = [1; ENGINES];
        if fate == EngineFate::Restarted {
            self.engines =
                self.addresses.iter().map(|address| engine(&self.model, address)).collect();
        }
    }

    /// Returns the names of arenas that earlier frontends have left in `/dev/shm`.
    fn abandoned_arenas(&self) -> Vec<String> {
        let names = std::fs::read_dir("/dev/shm").expect("/dev/shm").flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter(|name| {
                let pid = name.strip_prefix("chiasm.").and_then(|rest| rest.split('.').next());
                pid.and_then(|pid| pid.parse().ok()).is_some_and(|pid| self.ended.contains(&pid))
            })
            .collect()
    }
}

/// The log line about an engine that was taken over.
const TAKEN_OVER: &str = "took over an engine";

fn frontend(model: &str, addresses: &[String], state: &TempDir) -> Server {
    let cache = gib(CACHED);
    let arena = gib(CACHED + 5);
    let attach = addresses.join(",");
    let args =
        [model, "--served-model-name", "m", "--attach", &attach, "--receiver-cache-gb", &cache];
    let state = state.path().display().to_string();
    let flags = [
        "--mm-arena-gb",
        &arena,
        "--mm-transfer",
        "shm",
        "--state-dir",
        &state,
        "--drain-timeout",
        "0.2",
    ];
    Server::start(&[&args[..], &flags].concat())
}

fn engine(model: &str, address: &str) -> Process {
    let cache = gib(CACHED);
    let args =
        ["sim-engine", "--handshake", address, "--model", model, "--receiver-cache-gb", &cache];
    let fast = ["--sim-decode-rate", "2000", "--sim-image-ms", "2"];
    Process(
        chiasm(&args)
            .args(fast)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("an engine"),
    )
}

fn body(pictures: &[usize], salt: u64, stream: bool) -> Value {
    let part = |&index: &usize| {
        let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(PICTURES[index].jpeg));
        json!({"type": "image_url", "image_url": {"url": url}})
    };
    let content: Vec<Value> = pictures.iter().map(part).collect();
    json!({
        "model": "m",
        "max_tokens": 256,
        "cache_salt": salt.to_string(),
        "stream": stream,
        "messages": [{"role": "user", "content": content}],
    })
}

/// An engine's correct description of each picture, by the picture's index.
struct ExpectedAnswers(HashMap<usize, String>);

impl ExpectedAnswers {
    /// Asks an undisturbed server about each picture.
    async fn record() -> Self {
        let model = demo_model().display().to_string();
        let server = Server::start(&[
            &model,
            "--served-model-name",
            "m",
            "--sim",
            "1",
            "--mm-transfer",
            "off",
        ]);
        server.wait_ready(1, TIMEOUT).await;
        let mut descriptions = HashMap::new();
        for index in 0..PICTURES.len() {
            let answer = server.chat(&body(&[index], 0, false)).await.ok();
            let text =
                answer["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
            let first_part = text.split(';').next().unwrap_or_default();
            let description = first_part.strip_prefix("1 image ").expect("one image");
            descriptions.insert(index, description.to_owned());
        }
        let mut distinct: Vec<_> = descriptions.values().collect();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), PICTURES.len(), "descriptions of pictures differ");
        Self(descriptions)
    }

    /// Returns the start of the correct answer, before the number of cached tokens.
    fn prefix(&self, pictures: &[usize]) -> String {
        let descriptions: Vec<_> = pictures.iter().map(|index| self.0[index].as_str()).collect();
        let plural = if pictures.len() == 1 { "" } else { "s" };
        format!("{} image{plural} {};", pictures.len(), descriptions.join(", "))
    }
}

/// The results of all requests.
#[derive(Default)]
struct Tally {
    correct: AtomicUsize,
    errors: AtomicUsize,
    cut_off: AtomicUsize,
    /// Twice the number of replaced frontends; odd during a replacement.
    frontend_kills: AtomicUsize,
}

/// Sends requests until `stop` is set. Asserts that every answer is correct, a valid error, or cut
/// off by the end of the frontend.
async fn run_client(
    seed: u64,
    expected: Arc<ExpectedAnswers>,
    url: watch::Receiver<String>,
    stop: Arc<AtomicBool>,
    tally: Arc<Tally>,
) {
    let client = client();
    let mut random = SmallRng::seed_from_u64(seed);
    while !stop.load(Ordering::Relaxed) {
        let pictures: Vec<usize> = (0..random.random_range(1..=3))
            .map(|_| random.random_range(0..PICTURES.len()))
            .collect();
        let body = body(&pictures, random.random(), random.random());
        // Read before the URL: otherwise the kill of that URL's frontend might be counted already.
        let before = tally.frontend_kills.load(Ordering::SeqCst);
        let url = format!("{}/v1/chat/completions", *url.borrow());
        let request =
            client.post(url).header("content-type", "application/json").body(body.to_string());
        let answer = async {
            let response = request.send().await?;
            let status = response.status().as_u16();
            Ok::<_, reqwest::Error>((status, response.text().await?))
        };
        match answer.await {
            Ok((status, text)) => {
                check(status, &text, body["stream"] == true, &expected.prefix(&pictures), &tally);
                if status != 200 {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
            Err(error) => {
                let after = tally.frontend_kills.load(Ordering::SeqCst);
                assert!(
                    after > before || after % 2 == 1,
                    "the connection broke although no frontend was killed: {error}"
                );
                tally.cut_off.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Asserts that an answer starts with `prefix` or is a valid error, and counts it.
fn check(status: u16, text: &str, stream: bool, prefix: &str, tally: &Tally) {
    if status != 200 {
        assert!(matches!(status, 500 | 502 | 503), "{status}: {text}");
        let error: Value = serde_json::from_str(text).expect("an error in JSON");
        assert!(
            error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()),
            "{text}"
        );
        tally.errors.fetch_add(1, Ordering::Relaxed);
        return;
    }
    if !stream {
        let answer: Value = serde_json::from_str(text).expect("JSON");
        let content = answer["choices"][0]["message"]["content"].as_str().expect("text");
        assert!(content.starts_with(prefix), "'{content}' is not '{prefix}'");
        tally.correct.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let events: Vec<Value> = text
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    let content: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    if events.iter().any(|event| event["choices"][0]["finish_reason"].is_string()) {
        assert!(content.starts_with(prefix), "'{content}' is not '{prefix}'");
        tally.correct.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // The engine died during the stream.
    assert!(
        content.starts_with(prefix) || prefix.starts_with(&content),
        "'{content}' is no part of '{prefix}'"
    );
    assert!(
        events.iter().any(|event| event["error"]["message"].is_string()),
        "no error event: {text}"
    );
    tally.errors.fetch_add(1, Ordering::Relaxed);
}

/// Asks about all pictures and checks the answers.
async fn check_pictures(frontend: &Server, expected: &ExpectedAnswers, salt: u64) {
    for index in 0..PICTURES.len() {
        let answer = frontend.chat(&body(&[index], salt, false)).await.ok();
        let content = answer["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
        assert!(content.starts_with(&expected.prefix(&[index])), "{content}");
    }
}

/// Waits until knowledge of all engines is exact. Returns the number of predicted blocks of a
/// prompt.
async fn predicted_blocks(frontend: &Server, prompt: &Value) -> u64 {
    let is_exact = async || {
        let Ok(response) = frontend.client.get(format!("{}/workers", frontend.url)).send().await
        else {
            return false;
        };
        let workers: Value = crate::support::json(response).await;
        workers["workers"]
            .as_array()
            .is_some_and(|all| all.iter().all(|worker| worker["knowledge"] == "exact"))
    };
    wait_for("exact knowledge", TIMEOUT, is_exact).await;
    let answer = frontend.chat(prompt).await;
    answer.ok();
    answer
        .header("x-chiasm-overlap")
        .split('/')
        .next()
        .and_then(|blocks| blocks.parse().ok())
        .expect("a number of blocks")
}

#[tokio::test]
async fn restarted_frontend_keeps_its_engines() {
    let expected = ExpectedAnswers::record().await;
    let mut harness = TestHarness::start();
    harness.frontend.wait_ready(ENGINES as u64, TIMEOUT).await;
    check_pictures(&harness.frontend, &expected, 1).await;
    let words = "All that an engine has told is told again. ".repeat(20);
    let prompt =
        json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": words}]});
    assert_eq!(predicted_blocks(&harness.frontend, &prompt).await, 0);
    for signal in ["KILL", "TERM"] {
        // Long answers that are never read to their end.
        let endless = json!({
            "model": "m",
            "prompt": "x",
            "max_tokens": 8000,
            "ignore_eos": true,
            "stream": true,
            "n": 4,
        });
        let mut streams = Vec::new();
        for _ in 0..8 {
            let mut stream = harness.frontend.open("/v1/completions", &endless).await;
            stream.chunk().await.expect("a first chunk");
            streams.push(stream);
        }
        harness.replace_frontend(signal, EngineFate::TakenOver);
        drop(streams);
        let frontend = &harness.frontend;
        frontend.wait_ready(ENGINES as u64, TIMEOUT).await;
        let taken_over = async || frontend.count_logged(TAKEN_OVER) == ENGINES;
        wait_for("log lines about both engines", TIMEOUT, taken_over).await;
        assert!(predicted_blocks(frontend, &prompt).await > 0, "after {signal}");
        // The frontend's mirror claims nothing that is missing in the engines' receiver caches.
        check_pictures(frontend, &expected, 1).await;
        check_pictures(frontend, &expected, 2).await;
        assert_eq!(frontend.metric("chiasm_mm_cache_misses_total").await, 0.0);
        // Requests of the last frontend have ended.
        let running = async || frontend.metric("chiasm_worker_running_requests").await;
        wait_for("idle engines", TIMEOUT, async || running().await == 0.0).await;
        harness.check_engines();
        assert_eq!(harness.abandoned_arenas(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_kills_leak_no_slots_or_arenas() {
    let seed = std::env::var("CHIASM_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(rand::random);
    eprintln!("CHIASM_TEST_SEED={seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let expected = Arc::new(ExpectedAnswers::record().await);
    let mut harness = TestHarness::start();
    harness.frontend.wait_ready(ENGINES as u64, TIMEOUT).await;
    let (url, urls) = watch::channel(harness.frontend.url.clone());
    let stop = Arc::new(AtomicBool::new(false));
    let tally = Arc::new(Tally::default());
    let mut clients: Vec<_> = (0..CLIENTS as u64)
        .map(|client| {
            tokio::spawn(run_client(
                seed ^ client,
                expected.clone(),
                urls.clone(),
                stop.clone(),
                tally.clone(),
            ))
        })
        .collect();

    // An engine whose frontend ends during the handshake can't be taken over, not even a real one.
    let mut all_ready = true;
    let kills = kills();
    for kill in 0..kills {
        let frontend = random.random_ratio(1, 5);
        if frontend {
            let signal = if random.random_ratio(1, 3) { "TERM" } else { "KILL" };
            let stay = all_ready && random.random_ratio(2, 3);
            tally.frontend_kills.fetch_add(1, Ordering::SeqCst);
            harness.replace_frontend(
                signal,
                if stay { EngineFate::TakenOver } else { EngineFate::Restarted },
            );
            url.send_replace(harness.frontend.url.clone());
            tally.frontend_kills.fetch_add(1, Ordering::SeqCst);
        } else {
            harness.kill_engine(random.random_range(0..ENGINES));
        }
        // Without waiting, some kills hit processes that are starting, handing over or opening
        // arenas.
        all_ready = random.random_ratio(3, 4);
        if all_ready {
            harness.wait_all_ready().await;
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(0..300))).await;
        if let Some(client) = clients.iter_mut().find(|client| client.is_finished()) {
            panic!("a client failed by kill {kill}: {:?}", client.await);
        }
        harness.check_engines();
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("only expected answers");
    }
    let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let correct = count(&tally.correct);
    let errors = count(&tally.errors);
    let cut_off = count(&tally.cut_off);
    eprintln!("{correct} correct, {errors} errors, {cut_off} cut off by the end of a frontend");
    assert!(correct > kills, "{correct} correct, {errors} errors, {cut_off} cut off");
    assert!(harness.taken_over > 0, "no frontend has taken over an engine");

    // No slot has leaked: once the engines have got other requests, only the items in their caches
    // use slots.
    harness.frontend.wait_ready(ENGINES as u64, TIMEOUT).await;
    wait_for("slots to be freed", TIMEOUT, async || {
        let words = rand::random::<u64>().to_string();
        let messages = json!([{"role": "user", "content": words}]);
        let text = json!({"model": "m", "max_tokens": 1, "messages": messages});
        harness.frontend.chat(&text).await;
        let mut slots = 0.0_f64;
        for worker in 0..ENGINES {
            let name = format!("chiasm_arena_slots{{worker=\"worker_{worker}\"}}");
            slots = slots.max(harness.frontend.metric(&name).await);
        }
        slots <= CACHED as f64
    })
    .await;
    harness.check_engines();
    // Arenas left by the last kills were removed by the frontend that started after them.
    assert_eq!(harness.abandoned_arenas(), Vec::<String>::new());
}
