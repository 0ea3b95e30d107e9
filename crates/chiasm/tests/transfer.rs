//! How images reach simulated engines: in every mode the same answers, item by item in the right
//! way.

use std::path::Path;
use std::time::Duration;

use crate::support::{Answer, Server, demo_model, scenario_run, wait_for};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, DUSK, NIGHT, NOON, PICTURES, Picture, SNOW, STORM};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
/// Bytes of the smaller pictures' raw patches: 320 patches of 1,176 values.
const PICTURE_BYTES: u64 = 320 * 1176;

/// A server before simulated engines whose answers come at once.
async fn serve(engines: u64, mode: &str, extra: &[&str]) -> Server {
    let (model, count) = (demo_model().display().to_string(), engines.to_string());
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", &count, "--allow-private-media"];
    args.extend(["--mm-transfer", mode, "--sim-decode-rate", "2000"]);
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(engines, SOON).await;
    server
}

/// A request with these pictures; `salt` keeps its blocks apart from those of others.
fn pictures(salt: &str, pictures: &[Picture]) -> Value {
    let part = |picture: &Picture| {
        let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg));
        json!({"type": "image_url", "image_url": {"url": url}})
    };
    let content: Vec<Value> = pictures.iter().map(part).collect();
    json!({"model": "m", "max_tokens": 256, "cache_salt": salt, "messages": [{"role": "user", "content": content}]})
}

/// What the engine says that it saw, with a digest of each picture's pixels, and without what was
/// cached.
fn seen(answer: &Answer) -> String {
    let text = answer.ok()["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    seen_in(&text)
}

fn seen_in(text: &str) -> String {
    text.split(';').next().unwrap_or_default().to_owned()
}

/// Items so far, by how they travelled.
async fn travelled(server: &Server) -> [f64; 3] {
    let count =
        async |mode| server.metric(&format!("chiasm_mm_transfer_total{{mode=\"{mode}\"}}")).await;
    [count("cached").await, count("shm").await, count("inline").await]
}

async fn decoded(server: &Server) -> f64 {
    server.metric("chiasm_media_decoded_total").await
}

#[tokio::test]
async fn every_mode_gives_the_same_answers() {
    let images: usize = chiasm::scenarios::all()
        .iter()
        .flat_map(|scenario| &scenario.turns)
        .map(|turn| turn.images())
        .sum();
    let mut answers = Vec::new();
    for mode in ["auto", "shm", "inline", "off"] {
        let server = serve(2, mode, &[]).await;
        let texts = scenario_run::play_all(&server, "m", 16, 128).await;
        let texts: Vec<String> = texts.iter().map(|text| seen_in(text)).collect();
        assert!(
            texts.iter().any(|text| text.starts_with("3 images 280x224 (80 tokens, ")),
            "{texts:?}"
        );
        answers.push(texts);

        let [cached, shm, inline] = travelled(&server).await;
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
        // An image that the engine holds is not decoded. One that stands twice in a prompt is
        // decoded once.
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
async fn what_the_engine_holds_is_neither_decoded_nor_sent() {
    let server = serve(1, "auto", &[]).await;
    let first = server.chat(&pictures("a", &[DAWN])).await;
    assert_eq!(first.header("x-chiasm-transfer"), "shm");
    assert_eq!((travelled(&server).await, decoded(&server).await), ([0.0, 1.0, 0.0], 1.0));
    let again = server.chat(&pictures("b", &[DAWN])).await;
    assert_eq!(again.header("x-chiasm-transfer"), "cached");
    assert_eq!((travelled(&server).await, decoded(&server).await), ([1.0, 1.0, 0.0], 1.0));
    assert_eq!(seen(&first), seen(&again));

    // Three of four are there; the new one stands third.
    server.chat(&pictures("c", &[NOON, DUSK])).await.ok();
    let mixed = server.chat(&pictures("d", &[DUSK, DAWN, SNOW, NOON])).await;
    assert_eq!(mixed.header("x-chiasm-transfer"), "shm");
    assert_eq!((travelled(&server).await, decoded(&server).await), ([4.0, 4.0, 0.0], 4.0));
    let inline = serve(1, "inline", &[]).await;
    assert_eq!(seen(&mixed), seen(&inline.chat(&pictures("d", &[DUSK, DAWN, SNOW, NOON])).await));
}

/// Two of four pictures find room. The others travel in the message, and each is where it belongs.
#[tokio::test]
async fn items_that_find_no_slot_are_not_mixed_up() {
    let all = [DAWN, NIGHT, STORM, SNOW];
    let two =
        format!("{}", (2 * PICTURE_BYTES.next_multiple_of(4096)) as f64 / (1_u64 << 30) as f64);
    let server = serve(1, "auto", &["--mm-arena-gb", &two, "--cpu-threads", "1"]).await;
    let answer = server.chat(&pictures("a", &all)).await;
    assert_eq!(answer.header("x-chiasm-transfer"), "inline");
    assert_eq!(travelled(&server).await, [0.0, 2.0, 2.0]);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total{cause=\"arena_full\"}").await, 2.0);
    let inline = serve(1, "inline", &[]).await;
    assert_eq!(seen(&answer), seen(&inline.chat(&pictures("a", &all)).await));

    let small = serve(1, "auto", &["--mm-arena-gb", "0.0001"]).await;
    assert_eq!(seen(&answer), seen(&small.chat(&pictures("a", &all)).await));
    assert_eq!(travelled(&small).await, [0.0, 0.0, 4.0]);
    assert_eq!(
        small.metric("chiasm_mm_transfer_fallback_total{cause=\"larger_than_arena\"}").await,
        4.0
    );
    small.logged("told once for each cause");
    assert_eq!(small.lines_logged("told once for each cause"), 1);
}

/// A receiver cache of two pictures in an arena of eight: evicted slots are used again, and none is
/// lost.
#[tokio::test]
async fn slots_come_back_when_the_engine_evicts() {
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
        assert_eq!(seen(&answer), seen(&plain.chat(&body).await), "round {round}");
    }
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    let worker = |name: &str| format!("{name}{{worker=\"worker_0\"}}");
    // What is cached, and what the last request brought.
    wait_for("slots to come back", SOON, async || {
        server.metric(&worker("chiasm_arena_slots")).await <= 4.0
    })
    .await;
    assert!(server.metric(&worker("chiasm_arena_used_bytes")).await >= (2 * PICTURE_BYTES) as f64);
}

#[tokio::test]
async fn an_engine_without_the_plugin_is_served_all_the_same() {
    let server = serve(1, "auto", &["--sim-no-plugin"]).await;
    let answer = server.chat(&pictures("a", &[DAWN, DUSK])).await;
    assert_eq!(answer.header("x-chiasm-transfer"), "inline");
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total{cause=\"no_arena\"}").await, 2.0);
    assert!(
        server
            .logged("takes media in messages only worker=worker_0 error=")
            .contains("install python/chiasm_vllm")
    );
    assert_eq!(server.lines_logged("takes media in messages only"), 1);
}

#[tokio::test]
async fn an_engine_without_the_plugin_is_not_used_if_shared_memory_is_demanded() {
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--sim", "1", "--mm-transfer", "shm", "--sim-no-plugin"]);
    wait_for("a reason", SOON, async || server.lines_logged("install python/chiasm_vllm") > 0)
        .await;
    assert_eq!(server.ready_workers().await, 0);
}

#[tokio::test]
async fn too_small_a_shared_memory_ends_the_start_if_it_is_demanded() {
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
    let output = crate::support::chiasm(&args).output().expect("it ends");
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("/dev/shm has ") && said.contains("--mm-arena-gb"), "{said}");
}

/// Once the engine has opened its arena there is no name left, so nothing to leave behind.
#[tokio::test]
async fn no_arena_has_a_name_while_it_is_used() {
    let server = serve(2, "shm", &[]).await;
    server.chat(&pictures("a", &[DAWN])).await.ok();
    let prefix = format!("chiasm.{}.", server.pid());
    let names = std::fs::read_dir(Path::new("/dev/shm")).expect("/dev/shm").flatten();
    let left: Vec<_> =
        names.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).collect();
    assert!(left.is_empty(), "{left:?}");
}
