//! The forms in which images reach agents that could decode them: encoded files or tensors.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use chiasm::scenarios::DAWN;
use futures_util::future::join_all;
use libjpeg_turbo_rs::{Encoder, PixelFormat};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::relay::Relay;
use super::{BLOCK, FAST, TIMEOUT, workers};
use crate::support::{Answer, Server, demo_model, scenario_run, send_signal, wait_for};

/// Returns a different file with the same pixels for each name: `name` is appended to the picture.
fn variant(picture: &[u8], name: &str) -> Vec<u8> {
    [picture, name.as_bytes()].concat()
}

/// Encodes a JPEG of this size in pixels.
fn photo(width: usize, height: usize) -> Vec<u8> {
    let pixels: Vec<u8> = (0..3 * width * height).map(|at| (at / 7 % 251) as u8).collect();
    Encoder::new(&pixels, width, height, PixelFormat::Rgb).encode().expect("a JPEG")
}

fn body(pictures: &[Vec<u8>]) -> Value {
    let image = |picture: &Vec<u8>| {
        let url = format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(picture));
        json!({"type": "image_url", "image_url": {"url": url}})
    };
    let text = json!({"type": "text", "text": "what is it?"});
    let parts: Vec<Value> = pictures.iter().map(image).chain([text]).collect();
    json!({"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 100})
}

async fn chat(server: &Server, pictures: &[Vec<u8>]) -> Answer {
    server.chat(&body(pictures)).await
}

/// Returns an engine's description of the pictures, with a digest of their pixels.
async fn description(server: &Server, pictures: &[Vec<u8>]) -> Value {
    chat(server, pictures).await.ok()["choices"][0]["message"]["content"].clone()
}

/// Returns the numbers of images sent as files and as tensors.
async fn sent_items(server: &Server) -> [usize; 2] {
    let count = async |form: &str| {
        server.metric(&format!("chiasm_media_sent_items_total{{form=\"{form}\"}}")).await as usize
    };
    [count("encoded").await, count("tensors").await]
}

/// Returns the number of images whose transfer fell back to another form for `cause`.
async fn fallbacks(server: &Server, cause: &str) -> usize {
    server.metric(&format!("chiasm_mm_transfer_fallback_total{{cause=\"{cause}\"}}")).await as usize
}

fn local(flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    Server::start(&[&[&*model, "--served-model-name", "m"], flags].concat())
}

#[tokio::test]
async fn answers_do_not_depend_on_the_media_form() {
    let local = local(&[&["--allow-private-media", "--sim", "4"], &FAST[..]].concat());
    local.wait_ready(4, TIMEOUT).await;
    let expected = scenario_run::play_all(&local, "m", BLOCK, 64).await;
    let cluster = Cluster::new();
    let flags = [&["--sim", "2", "--take-tensors"], &FAST[..]].concat();
    let mut machine = 0;
    for (media, used_forms) in
        [("encoded", [true, false]), ("tensors", [false, true]), ("auto", [true, false])]
    {
        let agents = [machine + 1, machine + 2].map(|machine| cluster.agent(machine, &flags));
        machine += 2;
        let server = cluster.serve(&agents, &["--allow-private-media", "--agent-media", media]);
        server.wait_ready(4, TIMEOUT).await;
        assert_eq!(scenario_run::play_all(&server, "m", BLOCK, 64).await, expected, "{media}");
        assert_eq!(sent_items(&server).await.map(|items| items > 0), used_forms, "{media}");
        assert_eq!(
            server.metric("chiasm_media_decoded_total").await > 0.0,
            media == "tensors",
            "{media}"
        );
        assert_eq!(
            server.metric("chiasm_mm_transfer_total{mode=\"inline\"}").await,
            0.0,
            "{media}"
        );
    }
}

#[tokio::test]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn answers_are_unchanged_with_tensors_read_by_nixl() {
    let library = std::env::var("CHIASM_TEST_NIXL")
        .expect("CHIASM_TEST_NIXL must be the path of libnixl_capi.so: `cargo xtask test` sets it");
    let nixl = ["--nixl-library", &library];
    let local = local(&[&["--allow-private-media", "--sim", "4"], &FAST[..]].concat());
    local.wait_ready(4, TIMEOUT).await;
    let expected = scenario_run::play_all(&local, "m", BLOCK, 64).await;
    let cluster = Cluster::new();
    let flags = [&["--sim", "2", "--take-tensors"], &FAST[..], &nixl].concat();
    let agents = [1, 2].map(|machine| cluster.agent(machine, &flags));
    let server = cluster.serve(
        &agents,
        &[&["--allow-private-media", "--agent-media", "tensors"], &nixl[..]].concat(),
    );
    server.wait_ready(4, TIMEOUT).await;
    assert_eq!(scenario_run::play_all(&server, "m", BLOCK, 64).await, expected);
    let [encoded, tensors] = sent_items(&server).await;
    let lent = server.metric("chiasm_media_lent_bytes_total").await;
    assert!(encoded == 0 && tensors > 0 && lent > 0.0, "{encoded} {tensors} {lent}");
    // All tensors are lent: none is small enough to be sent in a message.
    assert_eq!(server.metric("chiasm_media_sent_bytes_total").await, 0.0);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
}

#[tokio::test]
async fn image_identity_does_not_depend_on_the_media_form() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1", "--take-tensors"])];
    let [encoded, tensors] =
        ["encoded", "tensors"].map(|media| cluster.serve(&agents, &["--agent-media", media]));
    encoded.wait_ready(1, TIMEOUT).await;
    tensors.wait_ready(1, TIMEOUT).await;
    for (number, [first, second]) in
        [[&encoded, &tensors], [&tensors, &encoded]].into_iter().enumerate()
    {
        let picture = [variant(DAWN.jpeg, &number.to_string())];
        let before = [sent_items(first).await, sent_items(second).await];
        chat(first, &picture).await.ok();
        assert_eq!(
            sent_items(first).await.iter().sum::<usize>(),
            before[0].iter().sum::<usize>() + 1
        );
        let again = chat(second, &picture).await;
        let overlap = again.header("x-chiasm-overlap");
        let cached = again.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
        assert_eq!(sent_items(second).await, before[1], "the agent has the image already");
        assert!(!overlap.starts_with("0/") && cached.as_u64() > Some(0), "{overlap} {cached}");
    }
}

#[tokio::test]
async fn images_not_accepted_as_tensors_are_sent_as_files() {
    let small = DAWN.jpeg.to_vec();
    let large = photo(560, 448);
    let pictures = [small.clone(), large.clone(), variant(&small, "another")];
    let local = local(&["--sim", "1"]);
    local.wait_ready(1, TIMEOUT).await;
    let expected = description(&local, &pictures).await;
    let cluster = Cluster::new();
    // The small image's raw values take 376,320 bytes.
    let flags = ["--sim", "1", "--take-tensors", "--processor-item-bytes", "400000"];
    let agents = [cluster.agent(1, &flags)];
    let server = cluster.serve(&agents, &["--agent-media", "tensors"]);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(description(&server, &pictures).await, expected);
    assert_eq!(
        (sent_items(&server).await, fallbacks(&server, "tensors_too_large").await),
        ([1, 2], 1)
    );
    // The bytes of one file and two tensors.
    let bytes = server.metric("chiasm_media_sent_bytes_total").await as usize;
    assert!(bytes > large.len() + 2 * 376_320 && bytes < large.len() + 2 * 377_000, "{bytes}");

    let agents = [cluster.agent(2, &["--sim", "1"])];
    let server = cluster.serve(&agents, &["--agent-media", "tensors"]);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(description(&server, &pictures).await, expected);
    assert_eq!(
        (sent_items(&server).await, fallbacks(&server, "tensors_not_taken").await),
        ([3, 0], 3)
    );
}

#[tokio::test]
async fn broken_image_error_does_not_depend_on_the_media_form() {
    let cluster = Cluster::new();
    let broken = [DAWN.jpeg[..DAWN.jpeg.len() / 2].to_vec()];
    let mut answers = Vec::new();
    for (machine, media) in [(1, "encoded"), (2, "tensors")] {
        let agents = [cluster.agent(machine, &["--sim", "1", "--take-tensors"])];
        let server = cluster.serve(&agents, &["--agent-media", media]);
        server.wait_ready(1, TIMEOUT).await;
        let answer = chat(&server, &broken).await;
        answers.push((answer.status, answer.json()["error"]["message"].clone()));
        assert_eq!(fallbacks(&server, "tensors_not_made").await, usize::from(media == "tensors"));
    }
    assert!(answers[0].0 != 200 && answers[0] == answers[1], "{answers:?}");
}

/// Returns the pending media work of the first worker's agent, in seconds of one core.
async fn pending_seconds(server: &Server) -> f64 {
    workers(server).await[0]["media"]["pending_seconds"].as_f64().expect("a number")
}

#[tokio::test]
async fn busy_agent_gets_tensors_idle_agent_gets_files() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1", "--take-tensors", "--cpu-threads", "1"])];
    let busy = cluster.serve(&agents, &["--agent-media", "encoded"]);
    let server = cluster.serve(&agents, &[]);
    busy.wait_ready(1, TIMEOUT).await;
    server.wait_ready(1, TIMEOUT).await;
    let photo = photo(3000, 2000);
    chat(&server, &[variant(&photo, "while it is idle")]).await.ok();
    assert_eq!(sent_items(&server).await, [1, 0]);
    assert_eq!(workers(&server).await[0]["media"]["threads"], 1);
    assert_eq!(server.metric("chiasm_worker_media_threads").await, 1.0);

    let flood = async {
        let names = (0..24).map(|number| format!("flood {number}"));
        let pictures = names.map(|name| [variant(&photo, &name)]).collect::<Vec<_>>();
        let answers = join_all(pictures.iter().map(|picture| chat(&busy, picture))).await;
        answers.iter().for_each(|answer| drop(answer.ok()));
    };
    let meanwhile = async {
        wait_for("work", TIMEOUT, async || pending_seconds(&server).await > 0.3).await;
        assert!(server.metric("chiasm_worker_media_pending_seconds").await > 0.0);
        chat(&server, &[variant(&photo, "while it is busy")]).await.ok();
        assert_eq!(sent_items(&server).await, [1, 1]);
    };
    tokio::join!(flood, meanwhile);
    assert_eq!(sent_items(&busy).await, [24, 0]);
    wait_for("no work", TIMEOUT, async || pending_seconds(&server).await == 0.0).await;
    chat(&server, &[variant(&photo, "when it is idle again")]).await.ok();
    assert_eq!(sent_items(&server).await, [2, 1]);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
}

#[tokio::test]
async fn agent_death_during_tensor_transfer_fails_no_request() {
    let cluster = Cluster::new();
    let flags = ["--sim", "1", "--take-tensors"];
    let mut agents = [cluster.agent(1, &flags), cluster.agent(2, &flags)];
    // The relay keeps tensors in flight for a while.
    let relay = Relay::start(&agents[0].address).await;
    let server = cluster.serve_at(
        &format!("{},{}", relay.address(), agents[1].address),
        &["--agent-media", "tensors"],
    );
    server.wait_ready(2, TIMEOUT).await;
    let photo = photo(1000, 1000);
    let before = relay.packets();
    // One picture for each agent.
    let pictures = [[variant(&photo, "one")], [variant(&photo, "other")]];
    let answers = join_all(pictures.iter().map(|picture| chat(&server, picture)));
    let kill = async {
        // A quarter of the tensors' packets.
        wait_for("tensors in flight", TIMEOUT, async || relay.packets() > before + 1000).await;
        agents[0].kill();
    };
    let (answers, ()) = tokio::join!(answers, kill);
    for answer in answers {
        let worker = answer.header("x-chiasm-worker");
        assert_eq!((answer.status, worker.is_empty()), (200, false), "{:?}", answer.json());
    }
    assert!(fallbacks(&server, "tensors_not_sent").await >= 1);
    assert_eq!(server.ready_workers().await, 1);
}

#[tokio::test]
async fn frontend_death_during_tensor_transfer_blocks_no_one() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1", "--take-tensors"])];
    let relay = Relay::start(&agents[0].address).await;
    let victim = cluster.serve_at(&relay.address(), &["--agent-media", "tensors"]);
    let survivor = cluster.serve(&agents, &["--agent-media", "tensors"]);
    victim.wait_ready(1, TIMEOUT).await;
    survivor.wait_ready(1, TIMEOUT).await;
    let picture = [photo(1000, 1000)];
    let before = relay.packets();
    let request_to_victim = async {
        // Ends with the answer's head or with the connection.
        let body = body(&picture).to_string();
        let post = victim.client.post(format!("{}/v1/chat/completions", victim.url));
        drop(post.header("content-type", "application/json").body(body).send().await);
    };
    let request_to_survivor = async {
        wait_for("tensors in flight", TIMEOUT, async || relay.packets() > before + 1000).await;
        // Waits for the transfer that the first frontend has started.
        let (answer, ()) =
            tokio::join!(chat(&survivor, &picture), async { send_signal(victim.pid(), "KILL") });
        answer
    };
    let both = async { tokio::join!(request_to_victim, request_to_survivor) };
    let ((), answer) =
        tokio::time::timeout(Duration::from_secs(20), both).await.expect("an answer in time");
    assert_eq!(answer.status, 200);
    assert_eq!(sent_items(&survivor).await, [0, 1]);
    let is_idle = async || {
        pending_seconds(&survivor).await == 0.0
            && workers(&survivor).await[0]["engine"]["running"] == 0
    };
    wait_for("an idle agent", TIMEOUT, is_idle).await;
}
