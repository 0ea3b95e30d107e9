//! A minute of hostile traffic from many connections: memory stays flat, and well-behaved requests
//! are served all the while.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::hostile_origin::{HOSTILE, HostileOrigin};
use crate::support::{Process, Server, chiasm, demo_model, free_port};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, STORM};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_secs(60);

/// Caches are full and pools are as large as they get.
const WARM: Duration = Duration::from_secs(20);

/// Clients that mean no good.
const ATTACKERS: usize = 48;

/// What the allocator may add to memory after that. All that is counted may take [`BUDGET`] in all.
const GROWTH: u64 = 64 << 20;

const BUDGET: u64 = 96 << 20;

/// Each of the two caches.
const CACHE: u64 = 16 << 20;

/// Longest time for a well-behaved request on a machine that is busy with the others.
const PATIENCE: Duration = Duration::from_secs(10);

fn about(question: &str, urls: &[String]) -> Value {
    let mut parts = vec![json!({"type": "text", "text": question})];
    parts.extend(urls.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}})));
    json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]})
}

fn data_url(bytes: &[u8]) -> String {
    format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
}

/// One request that no sane client sends, or that asks for something that no sane origin has.
fn hostile(rng: &mut SmallRng, origin: &HostileOrigin) -> Value {
    let bomb: &[u8] = include_bytes!("../../chiasm-media/tests/goldens/png-bomb.png");
    let hostile_url = |rng: &mut SmallRng| {
        let (path, _) = HOSTILE.choose(rng).expect("there are some");
        // Another URL each time: nothing that was learned of the last one helps.
        format!("{}?{}", origin.url(path), rng.random::<u32>())
    };
    match rng.random_range(0..10) {
        0..4 => about("What is this?", &[hostile_url(rng)]),
        4 => about("And these?", &(0..8).map(|_| hostile_url(rng)).collect::<Vec<_>>()),
        5 => about(
            "Something new",
            &[format!("{}?{}", origin.url("/distinct"), rng.random::<u32>())],
        ),
        6 => about("A bomb", &[data_url(bomb)]),
        7 => about("Ten thousand", &vec!["data:,".to_owned(); 10_000]),
        8 => {
            // A large file that nobody has seen.
            let mut picture = STORM.jpeg.to_vec();
            picture.resize(rng.random_range(1 << 18..1 << 21), rng.random());
            picture.extend(rng.random::<[u8; 8]>());
            about("Something large", &[data_url(&picture)])
        }
        _ => {
            let mut url = data_url(DAWN.jpeg);
            let cut = rng.random_range(30..url.len());
            url.truncate(cut);
            about("Something broken", &[url])
        }
    }
}

/// Sends one hostile request after another; some are given up before they are answered.
async fn attack(
    seed: u64,
    server: Arc<Server>,
    origin: Arc<HostileOrigin>,
    until: Instant,
    answered: Arc<AtomicUsize>,
) {
    let mut rng = SmallRng::seed_from_u64(seed);
    while Instant::now() < until {
        let body = hostile(&mut rng, &origin);
        if rng.random_bool(0.2) {
            let patience = Duration::from_millis(rng.random_range(1..200));
            let _ = tokio::time::timeout(patience, server.chat(&body)).await;
            continue;
        }
        let answer = server.chat(&body).await;
        let status = answer.status;
        assert!(status != 500 && status < 600, "seed {seed}: {status} {}", answer.text);
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minute_of_hostile_traffic_leaves_memory_flat_and_others_served() {
    let origin = Arc::new(HostileOrigin::start().await);
    let model = demo_model().display().to_string();
    let (budget, cache) = (BUDGET.to_string(), CACHE.to_string());
    let handshake = format!("tcp://127.0.0.1:{}", free_port());
    // An engine of its own: what it keeps of its last 10,000 events is not the frontend's memory.
    let engine =
        ["sim-engine", "--handshake", &handshake, "--model", &model, "--sim-speedup", "1000"];
    let mut engine = chiasm(&[&engine[..], &["--receiver-cache-gb", "0.03"]].concat());
    let _engine = Process(engine.stderr(Stdio::null()).spawn().expect("an engine"));
    let flags = [
        &model,
        "--served-model-name",
        "m",
        "--attach",
        &handshake,
        "--allow-private-media",
        "--allowed-media-domains",
        "127.0.0.1",
        "--media-timeout",
        "2",
        "--media-first-byte-timeout",
        "1",
        "--media-min-rate",
        "1000",
        "--max-image-bytes",
        "4000000",
        "--media-cache-bytes",
        &cache,
        "--processed-cache-bytes",
        &cache,
        "--receiver-cache-gb",
        "0.03",
        "--mm-arena-gb",
        "0.06",
        "--max-bytes-in-flight",
        &budget,
    ];
    let server = Arc::new(Server::start(&flags));
    server.wait_ready(1, Duration::from_secs(20)).await;

    let started = Instant::now();
    let until = started + MINUTE;
    let answered = Arc::<AtomicUsize>::default();
    let attackers: Vec<_> = (0..ATTACKERS as u64)
        .map(|seed| {
            tokio::spawn(attack(seed, server.clone(), origin.clone(), until, answered.clone()))
        })
        .collect();

    let (mut served, mut slowest) = (0, Duration::ZERO);
    let (mut warm, mut most) = (0, 0);
    let good = [data_url(DAWN.jpeg), origin.url("/good")];
    while Instant::now() < until {
        let asked = Instant::now();
        let question = format!("Question {served}?");
        let answer = server.chat(&about(&question, &good[served % 2..][..1])).await;
        answer.ok();
        slowest = slowest.max(asked.elapsed());
        served += 1;
        let (now, held) = (server.resident(), server.metric("chiasm_held_bytes").await);
        assert!(held <= (BUDGET + 2 * CACHE) as f64, "{held} bytes are held");
        if started.elapsed() < WARM {
            warm = warm.max(now)
        } else {
            most = most.max(now)
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for attacker in attackers {
        attacker.await.expect("each was answered");
    }
    let hostile = answered.load(Ordering::Relaxed);
    println!(
        "{hostile} hostile and {served} good requests, {slowest:?} at most; {} then {} MiB",
        warm >> 20,
        most >> 20
    );
    assert!(
        hostile > 500 && served > 20,
        "{hostile} hostile and {served} good requests are no soak"
    );
    assert!(slowest < PATIENCE, "a good request took {slowest:?}");
    assert!(most < warm + GROWTH, "memory grew from {} to {} MiB", warm >> 20, most >> 20);

    // What was held for them is given back, down to what the cache keeps.
    crate::support::wait_for("memory given back", Duration::from_secs(20), async || {
        server.metric("chiasm_held_bytes").await
            <= server.metric("chiasm_media_cache_bytes").await + CACHE as f64
    })
    .await;
    assert_eq!(server.metric("chiasm_media_decoder_panics_total").await, 0.0);
    assert_eq!(server.metric("chiasm_engine_deaths_total").await, 0.0);
}
