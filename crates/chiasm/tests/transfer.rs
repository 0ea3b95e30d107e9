//! The transfer of images to simulated engines: all modes give the same answers, and each item is
//! transferred as expected.

use std::path::Path;
use std::time::Duration;

use crate::support::{Answer, Server, demo_model, scenario_run, wait_for};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, DUSK, NIGHT, NOON, PICTURES, Picture, SNOW, STORM};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(20);
/// The raw patches of the smaller pictures: 320 patches of 1,176 values.
const PICTURE_BYTES: u64 = 320 * 1176;

/// Starts a server with fast simulated engines.
async fn serve(engines: u64, mode: &str, extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let count = engines.to_string();
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", &count, "--allow-private-media"];
    args.extend(["--mm-transfer", mode, "--sim-decode-rate", "2000"]);
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(engines, TIMEOUT).await;
    server
}

/// Returns a request with these pictures. `salt` keeps its blocks apart from those of others.
fn pictures(salt: &str, pictures: &[Picture]) -> Value {
    let part = |picture: &Picture| {
        let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg));
        json!({"type": "image_url", "image_url": {"url": url}})
    };
    let content: Vec<Value> = pictures.iter().map(part).collect();
    json!({
        "model": "m",
        "max_tokens": 256,
        "cache_salt": salt,
        "messages": [{"role": "user", "content": content}],
    })
}

/// Returns the engine's description of the pictures with digests of their pixels, without the
/// number of cached tokens.
fn description(answer: &Answer) -> String {
    let text = answer.ok()["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    description_in(&text)
}

fn description_in(text: &str) -> String {
    text.split(';').next().unwrap_or_default().to_owned()
}

/// Returns the numbers of items so far that were cached, sent in shared memory and sent inline.
async fn transfers(server: &Server) -> [f64; 3] {
    let count =
        async |mode| server.metric(&format!("chiasm_mm_transfer_total{{mode=\"{mode}\"}}")).await;
    [count("cached").await, count("shm").await, count("inline").await]
}

async fn decoded(server: &Server) -> f64 {
    server.metric("chiasm_media_decoded_total").await
}

#[tokio::test]
async fn transfer_modes_give_the_same_answers() {
    let images: usize = chiasm::scenarios::all()
        .iter()
        .flat_map(|scenario| &scenario.turns)
        .map(|turn| turn.images())
        .sum();
    let mut answers = Vec::new();
    for mode in ["auto", "shm", "inline", "off"] {
        let server = serve(2, mode, &[]).await;
        let texts = scenario_run::play_all(&server, "m", 16, 128).await;
        let texts: Vec<String> = texts.iter().map(|text| description_in(text)).collect();
        assert!(
            texts.iter().any(|text| text.starts_with("3 images 280x224 (80 tokens, ")),
            "{texts:?}"
        );
        answers.push(texts);

        let [cached, shm, inline] = transfers(&server).await;
        assert_eq!(cached + shm + inline, images as f64, "{mode}");
        match mode {
            "auto" | "shm" => assert!(
                cached > 0.0 && shm > 0.0 && inline == 0.0,
                "{mode}: {cached} {shm} {inline}"
            ),
            "inline" => assert!(
                cached > 0.0 && shm == 0.0 && inline > 0.0,
                "{mode}: {cached} {shm} {inline}"
            ),
            _ => assert_eq!((cached, shm, inline), (0.0, 0.0, images as f64)),
        }
        // Cached images are not decoded. An image that is in a prompt twice is decoded once.
        let decoded = decoded(&server).await;
        match mode {
            "off" => assert!(decoded > shm + cached && decoded <= inline),
            _ => assert!(decoded <= shm + inline, "{mode}: {decoded} decoded for {shm} + {inline}"),
        }
        assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    }
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:#?}");
}

#[tokio::test]
async fn image_in_receiver_cache_is_neither_decoded_nor_sent() {
    let server = serve(1, "auto", &[]).await;
    let first = server.chat(&pictures("a", &[DAWN])).await;
    assert_eq!(first.header("x-chiasm-transfer"), "shm");
    assert_eq!((transfers(&server).await, decoded(&server).await), ([0.0, 1.0, 0.0], 1.0));
    let again = server.chat(&pictures("b", &[DAWN])).await;
    assert_eq!(again.header("x-chiasm-transfer"), "cached");
    assert_eq!((transfers(&server).await, decoded(&server).await), ([1.0, 1.0, 0.0], 1.0));
    assert_eq!(description(&first), description(&again));

    // Three of four pictures are cached; the third one is new.
    server.chat(&pictures("c", &[NOON, DUSK])).await.ok();
    let mixed = server.chat(&pictures("d", &[DUSK, DAWN, SNOW, NOON])).await;
    assert_eq!(mixed.header("x-chiasm-transfer"), "shm");
    assert_eq!((transfers(&server).await, decoded(&server).await), ([4.0, 4.0, 0.0], 4.0));
    let inline = serve(1, "inline", &[]).await;
    assert_eq!(
        description(&mixed),
        description(&inline.chat(&pictures("d", &[DUSK, DAWN, SNOW, NOON])).await)
    );
}

/// Two of four pictures fit the arena. The others are sent inline, and the order stays correct.
#[tokio::test]
async fn items_without_a_slot_keep_their_order() {
    let all = [DAWN, NIGHT, STORM, SNOW];
    let two_pictures_gb =
        format!("{}", (2 * PICTURE_BYTES.next_multiple_of(4096)) as f64 / (1_u64 << 30) as f64);
    let server = serve(1, "auto", &["--mm-arena-gb", &two_pictures_gb, "--cpu-threads", "1"]).await;
    let answer = server.chat(&pictures("a", &all)).await;
    assert_eq!(answer.header("x-chiasm-transfer"), "inline");
    assert_eq!(transfers(&server).await, [0.0, 2.0, 2.0]);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total{cause=\"arena_full\"}").await, 2.0);
    let inline = serve(1, "inline", &[]).await;
    assert_eq!(description(&answer), description(&inline.chat(&pictures("a", &all)).await));

    let small = serve(1, "auto", &["--mm-arena-gb", "0.0001"]).await;
    assert_eq!(description(&answer), description(&small.chat(&pictures("a", &all)).await));
    assert_eq!(transfers(&small).await, [0.0, 0.0, 4.0]);
    assert_eq!(
        small.metric("chiasm_mm_transfer_fallback_total{cause=\"larger_than_arena\"}").await,
        4.0
    );
    small.wait_for_log("logged once per cause");
    assert_eq!(small.count_logged("logged once per cause"), 1);
}

/// Uses a receiver cache of two pictures in an arena of eight, so that evicted slots are reused.
#[tokio::test]
async fn slots_are_freed_when_the_engine_evicts() {
    let gib = |pictures: u64| {
        format!("{}", (pictures * (PICTURE_BYTES + 8192)) as f64 / (1_u64 << 30) as f64)
    };
    let server =
        serve(1, "auto", &["--receiver-cache-gb", &gib(2), "--mm-arena-gb", &gib(8)]).await;
    let plain = serve(1, "inline", &["--receiver-cache-gb", &gib(2)]).await;
    for round in 0..40_usize {
        let body =
            pictures(&format!("r{round}"), &[PICTURES[round % 6], PICTURES[(round * 5 + 1) % 6]]);
        let answer = server.chat(&body).await;
        assert_ne!(answer.header("x-chiasm-transfer"), "inline", "round {round}");
        assert_eq!(description(&answer), description(&plain.chat(&body).await), "round {round}");
    }
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    let worker = |name: &str| format!("{name}{{worker=\"worker_0\"}}");
    // Two cached pictures, and two of the last request.
    wait_for("slots to be freed", TIMEOUT, async || {
        server.metric(&worker("chiasm_arena_slots")).await <= 4.0
    })
    .await;
    assert!(server.metric(&worker("chiasm_arena_used_bytes")).await >= (2 * PICTURE_BYTES) as f64);
}

#[tokio::test]
async fn engine_without_plugin_gets_images_inline() {
    let server = serve(1, "auto", &["--sim-no-plugin"]).await;
    let answer = server.chat(&pictures("a", &[DAWN, DUSK])).await;
    assert_eq!(answer.header("x-chiasm-transfer"), "inline");
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total{cause=\"no_arena\"}").await, 2.0);
    assert!(
        server
            .wait_for_log("takes media in messages only worker=worker_0 error=")
            .contains("install python/chiasm_vllm")
    );
    assert_eq!(server.count_logged("takes media in messages only"), 1);
}

#[tokio::test]
async fn engine_without_plugin_is_unused_in_shm_mode() {
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--sim", "1", "--mm-transfer", "shm", "--sim-no-plugin"]);
    wait_for("a reason", TIMEOUT, async || server.count_logged("install python/chiasm_vllm") > 0)
        .await;
    assert_eq!(server.ready_workers().await, 0);
}

#[tokio::test]
async fn small_dev_shm_is_refused_in_shm_mode() {
    let model = demo_model().display().to_string();
    let args = [
        "serve",
        &model,
        "--sim",
        "2",
        "--port",
        "0",
        "--mm-transfer",
        "shm",
        "--mm-arena-gb",
        "1e6",
    ];
    let output = crate::support::chiasm(&args).output().expect("chiasm runs");
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("/dev/shm has ") && stderr.contains("--mm-arena-gb"), "{stderr}");
}

/// An arena's name is removed once the engine has opened it, so that a crash leaves nothing behind.
#[tokio::test]
async fn open_arenas_have_no_name() {
    let server = serve(2, "shm", &[]).await;
    server.chat(&pictures("a", &[DAWN])).await.ok();
    let prefix = format!("chiasm.{}.", server.pid());
    let names = std::fs::read_dir(Path::new("/dev/shm")).expect("/dev/shm").flatten();
    let left: Vec<_> =
        names.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).collect();
    assert!(left.is_empty(), "{left:?}");
}
