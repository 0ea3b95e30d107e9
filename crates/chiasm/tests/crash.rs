//! kill -9 of frontends and engines at random moments under load, with simulated engines as
//! processes of their own that check every slot they read. Engines go with their frontend or are
//! taken over by the next one.

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
/// Pictures that a receiver cache holds.
const CACHED: usize = 3;
const PICTURE_BYTES: usize = 320 * 1176;
const PATIENCE: Duration = Duration::from_secs(30);

/// Hundreds by hand.
fn kills() -> usize {
    std::env::var("CHIASM_TEST_KILLS").map_or(100, |kills| kills.parse().expect("a number"))
}

fn gib(pictures: usize) -> String {
    format!("{}", (pictures * (PICTURE_BYTES + 8192)) as f64 / (1_u64 << 30) as f64)
}

/// A frontend and its engines, all processes that can be killed.
struct Stand {
    model: String,
    addresses: Vec<String>,
    engines: Vec<Process>,
    frontend: Server,
    /// The process ids of the frontends before this one.
    ended: Vec<u32>,
    /// What each frontend leaves for the next one.
    state: TempDir,
    taken_over: usize,
    /// For each engine how many lines of the frontend's log tell of a ready engine once the last
    /// one that was started is.
    awaited: [usize; ENGINES],
}

/// What becomes of the engines when their frontend ends.
#[derive(Clone, Copy, PartialEq)]
enum Engines {
    Restarted,
    TakenOver,
}

impl Stand {
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
            awaited: [1; ENGINES],
        }
    }

    /// A simulated engine ends by itself when a slot was written to while it was lent.
    fn check_engines(&mut self) {
        for engine in &mut self.engines {
            let ended = engine.0.try_wait().expect("it can be asked");
            assert!(ended.is_none(), "an engine that nobody killed has ended: {ended:?}");
        }
    }

    fn kill_engine(&mut self, index: usize) {
        self.engines[index].end();
        self.awaited[index] = self.times_ready(index) + 1;
        self.engines[index] = engine(&self.model, &self.addresses[index]);
    }

    fn times_ready(&self, index: usize) -> usize {
        self.frontend.lines_logged(&format!(" ready worker=worker_{index} "))
    }

    /// Waits until the engines that now run are ready. Those that were killed count as ready until
    /// the frontend notices.
    async fn settle(&self) {
        let all = async || (0..ENGINES).all(|index| self.times_ready(index) >= self.awaited[index]);
        wait_for("word of the engines that were started", PATIENCE, all).await;
        self.frontend.wait_ready(ENGINES as u64, PATIENCE).await;
    }

    /// Ends the frontend by a signal and starts another one.
    fn replace_frontend(&mut self, signal: &str, engines: Engines) {
        self.taken_over += self.frontend.lines_logged(TAKEN_OVER);
        self.ended.push(self.frontend.pid());
        self.frontend.end_by(signal);
        if engines == Engines::Restarted {
            self.engines.clear();
        }
        self.frontend = frontend(&self.model, &self.addresses, &self.state);
        self.awaited = [1; ENGINES];
        if engines == Engines::Restarted {
            self.engines =
                self.addresses.iter().map(|address| engine(&self.model, address)).collect();
        }
    }

    /// Returns the names of the arenas that frontends of this test have left.
    fn abandoned(&self) -> Vec<String> {
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

/// What a frontend logs of each engine that it has taken over.
const TAKEN_OVER: &str = "took over an engine";

fn frontend(model: &str, addresses: &[String], state: &TempDir) -> Server {
    let (cache, arena, attach) = (gib(CACHED), gib(CACHED + 5), addresses.join(","));
    let args =
        [model, "--served-model-name", "m", "--attach", &attach, "--receiver-cache-gb", &cache];
    let state = state.path().display().to_string();
    let more = [
        "--mm-arena-gb",
        &arena,
        "--mm-transfer",
        "shm",
        "--state-dir",
        &state,
        "--drain-timeout",
        "0.2",
    ];
    Server::start(&[&args[..], &more].concat())
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
        "model": "m", "max_tokens": 256, "cache_salt": salt.to_string(), "stream": stream,
        "messages": [{"role": "user", "content": content}],
    })
}

/// What an engine says of pictures that it saw rightly, in each's own words.
struct Truth(HashMap<usize, String>);

impl Truth {
    async fn learn() -> Self {
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
        server.wait_ready(1, PATIENCE).await;
        let mut words = HashMap::new();
        for index in 0..PICTURES.len() {
            let answer = server.chat(&body(&[index], 0, false)).await.ok();
            let text =
                answer["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
            let seen = text.split(';').next().unwrap_or_default();
            words.insert(index, seen.strip_prefix("1 image ").expect("one image").to_owned());
        }
        let mut distinct: Vec<_> = words.values().collect();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), PICTURES.len(), "the pictures can be told apart");
        Self(words)
    }

    /// How the answer must begin, up to what was cached.
    fn of(&self, pictures: &[usize]) -> String {
        let each: Vec<_> = pictures.iter().map(|index| self.0[index].as_str()).collect();
        format!(
            "{} image{} {};",
            pictures.len(),
            if pictures.len() == 1 { "" } else { "s" },
            each.join(", ")
        )
    }
}

#[derive(Default)]
struct Tally {
    right: AtomicUsize,
    told: AtomicUsize,
    cut_off: AtomicUsize,
    frontend_kills: AtomicUsize,
}

/// Sends requests until told to stop. Every answer is right, a clear error, or cut off by the end
/// of the frontend.
async fn load(
    seed: u64,
    truth: Arc<Truth>,
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
        // Before the address is read: one that was read first could be of a frontend whose kill is
        // counted by then.
        let before = tally.frontend_kills.load(Ordering::SeqCst);
        let to = format!("{}/v1/chat/completions", *url.borrow());
        let request =
            client.post(to).header("content-type", "application/json").body(body.to_string());
        let answer = async {
            let response = request.send().await?;
            let status = response.status().as_u16();
            Ok::<_, reqwest::Error>((status, response.text().await?))
        };
        match answer.await {
            Ok((status, text)) => {
                check(status, &text, body["stream"] == true, &truth.of(&pictures), &tally);
                if status != 200 {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
            Err(error) => {
                let after = tally.frontend_kills.load(Ordering::SeqCst);
                assert!(
                    after > before || after % 2 == 1,
                    "no frontend was killed, and yet: {error}"
                );
                tally.cut_off.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

fn check(status: u16, text: &str, stream: bool, expected: &str, tally: &Tally) {
    if status != 200 {
        assert!(matches!(status, 500 | 502 | 503), "{status}: {text}");
        let error: Value = serde_json::from_str(text).expect("an error in JSON");
        assert!(
            error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()),
            "{text}"
        );
        tally.told.fetch_add(1, Ordering::Relaxed);
        return;
    }
    if !stream {
        let answer: Value = serde_json::from_str(text).expect("JSON");
        let said = answer["choices"][0]["message"]["content"].as_str().expect("text");
        assert!(said.starts_with(expected), "'{said}' is not '{expected}'");
        tally.right.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let events: Vec<Value> = text
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    let said: String = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str())
        .collect();
    let finished = events.iter().any(|event| event["choices"][0]["finish_reason"].is_string());
    match finished {
        true => assert!(said.starts_with(expected), "'{said}' is not '{expected}'"),
        // The engine died in the middle.
        false => {
            assert!(
                said.starts_with(expected) || expected.starts_with(&said),
                "'{said}' is not of '{expected}'"
            );
            assert!(
                events.iter().any(|event| event["error"]["message"].is_string()),
                "no word of the error: {text}"
            );
        }
    }
    let counter = if finished { &tally.right } else { &tally.told };
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Shows all pictures and checks what is said of them.
async fn shows_pictures(frontend: &Server, truth: &Truth, salt: u64) {
    for index in 0..PICTURES.len() {
        let answer = frontend.chat(&body(&[index], salt, false)).await.ok();
        let said = answer["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
        assert!(said.starts_with(&truth.of(&[index])), "{said}");
    }
}

/// Leading blocks of a prompt that the frontend takes its engines to hold, once it knows all that
/// they have told.
async fn known_blocks(frontend: &Server, prompt: &Value) -> u64 {
    let exact = async || {
        let Ok(response) = frontend.client.get(format!("{}/workers", frontend.url)).send().await
        else {
            return false;
        };
        let workers: Value = crate::support::json(response).await;
        workers["workers"]
            .as_array()
            .is_some_and(|all| all.iter().all(|worker| worker["knowledge"] == "exact"))
    };
    wait_for("exact knowledge", PATIENCE, exact).await;
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
async fn a_frontend_that_is_started_again_keeps_its_engines() {
    let truth = Truth::learn().await;
    let mut stand = Stand::start();
    stand.frontend.wait_ready(ENGINES as u64, PATIENCE).await;
    shows_pictures(&stand.frontend, &truth, 1).await;
    let words = "All that an engine has told is told again. ".repeat(20);
    let prompt =
        json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": words}]});
    assert_eq!(known_blocks(&stand.frontend, &prompt).await, 0);
    for signal in ["KILL", "TERM"] {
        // Answers that nobody will read to their ends.
        let endless = json!({"model": "m", "prompt": "x", "max_tokens": 8000, "ignore_eos": true, "stream": true, "n": 4});
        let mut streams = Vec::new();
        for _ in 0..8 {
            let mut stream = stand.frontend.open("/v1/completions", &endless).await;
            stream.chunk().await.expect("a first chunk");
            streams.push(stream);
        }
        stand.replace_frontend(signal, Engines::TakenOver);
        drop(streams);
        let frontend = &stand.frontend;
        frontend.wait_ready(ENGINES as u64, PATIENCE).await;
        let taken_over = async || frontend.lines_logged(TAKEN_OVER) == ENGINES;
        wait_for("word of the engines", PATIENCE, taken_over).await;
        assert!(known_blocks(frontend, &prompt).await > 0, "after {signal}");
        // Nothing is taken to be in the engines' caches that is not.
        shows_pictures(frontend, &truth, 1).await;
        shows_pictures(frontend, &truth, 2).await;
        assert_eq!(frontend.metric("chiasm_mm_cache_misses_total").await, 0.0);
        // What the engines did for the last frontend has ended.
        let running = async || frontend.metric("chiasm_worker_running_requests").await;
        wait_for("idle engines", PATIENCE, async || running().await == 0.0).await;
        stand.check_engines();
        assert_eq!(stand.abandoned(), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killing_anybody_at_any_moment_leaks_nothing_and_mixes_nothing_up() {
    let seed = std::env::var("CHIASM_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(rand::random);
    eprintln!("CHIASM_TEST_SEED={seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let truth = Arc::new(Truth::learn().await);
    let mut stand = Stand::start();
    stand.frontend.wait_ready(ENGINES as u64, PATIENCE).await;
    let (url, urls) = watch::channel(stand.frontend.url.clone());
    let (stop, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(Tally::default()));
    let mut clients: Vec<_> = (0..CLIENTS as u64)
        .map(|client| {
            tokio::spawn(load(
                seed ^ client,
                truth.clone(),
                urls.clone(),
                stop.clone(),
                tally.clone(),
            ))
        })
        .collect();

    // Engines whose frontend ends while they introduce themselves are lost to the next one, with
    // real ones too.
    let mut settled = true;
    let kills = kills();
    for kill in 0..kills {
        let frontend = random.random_ratio(1, 5);
        if frontend {
            let signal = if random.random_ratio(1, 3) { "TERM" } else { "KILL" };
            let stay = settled && random.random_ratio(2, 3);
            // Odd while there is none.
            tally.frontend_kills.fetch_add(1, Ordering::SeqCst);
            stand.replace_frontend(
                signal,
                if stay { Engines::TakenOver } else { Engines::Restarted },
            );
            url.send_replace(stand.frontend.url.clone());
            tally.frontend_kills.fetch_add(1, Ordering::SeqCst);
        } else {
            stand.kill_engine(random.random_range(0..ENGINES));
        }
        // Some kills hit those that are just starting, handing over and opening arenas.
        settled = random.random_ratio(3, 4);
        if settled {
            stand.settle().await;
        }
        tokio::time::sleep(Duration::from_millis(random.random_range(0..300))).await;
        if let Some(client) = clients.iter_mut().find(|client| client.is_finished()) {
            panic!("a client failed by kill {kill}: {:?}", client.await);
        }
        stand.check_engines();
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.expect("a client that found nothing wrong");
    }
    let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let (right, told, cut_off) = (count(&tally.right), count(&tally.told), count(&tally.cut_off));
    eprintln!("{right} right, {told} with an error, {cut_off} cut off by the end of a frontend");
    assert!(right > kills, "{right} right, {told} with an error, {cut_off} cut off");
    assert!(stand.taken_over > 0, "no frontend has taken over an engine");

    // No slot is lost: what is in use is what the engines' caches hold, once they have been sent
    // something else.
    stand.frontend.wait_ready(ENGINES as u64, PATIENCE).await;
    wait_for("slots to come back", PATIENCE, async || {
        let words = rand::random::<u64>().to_string();
        let text = json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": words}]});
        stand.frontend.chat(&text).await;
        let mut slots = 0.0_f64;
        for worker in 0..ENGINES {
            slots =
                slots.max(stand.frontend.metric(&format!("chiasm_arena_slots{{worker=\"worker_{worker}\"}}")).await);
        }
        slots <= CACHED as f64
    })
    .await;
    stand.check_engines();
    // Whatever the last kills have left was removed by the frontend that started after them.
    assert_eq!(stand.abandoned(), Vec::<String>::new());
}
