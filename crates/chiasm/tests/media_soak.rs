//! A minute of hostile traffic from many connections: memory stays bounded, and well-behaved
//! requests are served all the time.

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

const DURATION: Duration = Duration::from_secs(60);

/// The time after which caches are full and pools have their final size.
const WARM_UP: Duration = Duration::from_secs(20);

/// The number of hostile clients.
const ATTACKERS: usize = 48;

/// The maximum growth of memory after the warm-up, for allocator overhead.
const MAX_GROWTH_BYTES: u64 = 64 << 20;

/// The value of `--max-bytes-in-flight`.
const IN_FLIGHT_BYTES: u64 = 96 << 20;

/// The size of each of the two caches.
const CACHE_BYTES: u64 = 16 << 20;

/// The deadline for a well-behaved request on a machine that is busy with the hostile ones.
const TIMEOUT: Duration = Duration::from_secs(10);

fn image_request(question: &str, urls: &[String]) -> Value {
    let mut parts = vec![json!({"type": "text", "text": question})];
    parts.extend(urls.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}})));
    json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]})
}

fn data_url(bytes: &[u8]) -> String {
    format!("data:image/jpeg;base64,{}", STANDARD.encode(bytes))
}

/// Returns a malformed or oversized request, or one for a URL of the hostile origin.
fn hostile(rng: &mut SmallRng, origin: &HostileOrigin) -> Value {
    let bomb: &[u8] = include_bytes!("../../chiasm-media/tests/goldens/png-bomb.png");
    let hostile_url = |rng: &mut SmallRng| {
        let (path, _) = HOSTILE.choose(rng).expect("not empty");
        // A new URL each time, so that cached errors don't help.
        format!("{}?{}", origin.url(path), rng.random::<u32>())
    };
    match rng.random_range(0..10) {
        0..4 => image_request("What is this?", &[hostile_url(rng)]),
        4 => image_request("And these?", &(0..8).map(|_| hostile_url(rng)).collect::<Vec<_>>()),
        5 => image_request(
            "Something new",
            &[format!("{}?{}", origin.url("/distinct"), rng.random::<u32>())],
        ),
        6 => image_request("A bomb", &[data_url(bomb)]),
        7 => image_request("Ten thousand", &vec!["data:,".to_owned(); 10_000]),
        8 => {
            // A large new file.
            let mut picture = STORM.jpeg.to_vec();
            picture.resize(rng.random_range(1 << 18..1 << 21), rng.random());
            picture.extend(rng.random::<[u8; 8]>());
            image_request("Something large", &[data_url(&picture)])
        }
        _ => {
            let mut url = data_url(DAWN.jpeg);
            let cut = rng.random_range(30..url.len());
            url.truncate(cut);
            image_request("Something broken", &[url])
        }
    }
}

/// Sends hostile requests until `until`, and cancels some before they are answered.
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
            let timeout = Duration::from_millis(rng.random_range(1..200));
            let _ = tokio::time::timeout(timeout, server.chat(&body)).await;
            continue;
        }
        let answer = server.chat(&body).await;
        let status = answer.status;
        assert!(status != 500 && status < 600, "seed {seed}: {status} {}", answer.text);
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_traffic_leaves_memory_bounded() {
    let origin = Arc::new(HostileOrigin::start().await);
    let model = demo_model().display().to_string();
    let in_flight = IN_FLIGHT_BYTES.to_string();
    let cache = CACHE_BYTES.to_string();
    let handshake = format!("tcp://127.0.0.1:{}", free_port());
    // The engine is a separate process, as it keeps its last 10,000 events in memory.
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
        &in_flight,
    ];
    let server = Arc::new(Server::start(&flags));
    server.wait_ready(1, Duration::from_secs(20)).await;

    let started = Instant::now();
    let until = started + DURATION;
    let answered = Arc::<AtomicUsize>::default();
    let attackers: Vec<_> = (0..ATTACKERS as u64)
        .map(|seed| {
            tokio::spawn(attack(seed, server.clone(), origin.clone(), until, answered.clone()))
        })
        .collect();

    let mut served = 0;
    let mut slowest = Duration::ZERO;
    let mut warm_bytes = 0;
    let mut max_bytes = 0;
    let good = [data_url(DAWN.jpeg), origin.url("/good")];
    while Instant::now() < until {
        let sent_at = Instant::now();
        let question = format!("Question {served}?");
        let answer = server.chat(&image_request(&question, &good[served % 2..][..1])).await;
        answer.ok();
        slowest = slowest.max(sent_at.elapsed());
        served += 1;
        let resident = server.resident();
        let held = server.metric("chiasm_held_bytes").await;
        assert!(held <= (IN_FLIGHT_BYTES + 2 * CACHE_BYTES) as f64, "{held} bytes are held");
        if started.elapsed() < WARM_UP {
            warm_bytes = warm_bytes.max(resident)
        } else {
            max_bytes = max_bytes.max(resident)
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    for attacker in attackers {
        attacker.await.expect("every hostile request was answered");
    }
    let hostile = answered.load(Ordering::Relaxed);
    println!(
        "{hostile} hostile and {served} good requests, {slowest:?} at most; {} then {} MiB",
        warm_bytes >> 20,
        max_bytes >> 20
    );
    assert!(
        hostile > 500 && served > 20,
        "{hostile} hostile and {served} good requests are too few"
    );
    assert!(slowest < TIMEOUT, "a good request took {slowest:?}");
    assert!(
        max_bytes < warm_bytes + MAX_GROWTH_BYTES,
        "memory grew from {} to {} MiB",
        warm_bytes >> 20,
        max_bytes >> 20
    );

    // All memory is released, except what the caches keep.
    crate::support::wait_for("memory to be released", Duration::from_secs(20), async || {
        server.metric("chiasm_held_bytes").await
            <= server.metric("chiasm_media_cache_bytes").await + CACHE_BYTES as f64
    })
    .await;
    assert_eq!(server.metric("chiasm_media_decoder_panics_total").await, 0.0);
    assert_eq!(server.metric("chiasm_engine_deaths_total").await, 0.0);
}
