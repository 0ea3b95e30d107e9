//! Images that an agent could make tensors of, and how they reach it.

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use chiasm::scenarios::DAWN;
use futures_util::future::join_all;
use libjpeg_turbo_rs::{Encoder, PixelFormat};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::relay::Relay;
use super::{BLOCK, FAST, SOON, workers};
use crate::support::{Answer, Server, demo_model, scenario_run, send_signal, wait_for};

/// A picture of its own for each name: what follows its end makes another file of it.
fn named(picture: &[u8], name: &str) -> Vec<u8> {
    [picture, name.as_bytes()].concat()
}

/// A JPEG of this size.
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

async fn ask(server: &Server, pictures: &[Vec<u8>]) -> Answer {
    server.chat(&body(pictures)).await
}

/// What an engine says that it saw, with a digest of the pixels.
async fn seen(server: &Server, pictures: &[Vec<u8>]) -> Value {
    ask(server, pictures).await.ok()["choices"][0]["message"]["content"].clone()
}

/// Images that were sent as files, and as tensors.
async fn sent(server: &Server) -> [usize; 2] {
    let of = async |form: &str| {
        server.metric(&format!("chiasm_media_sent_items_total{{form=\"{form}\"}}")).await as usize
    };
    [of("encoded").await, of("tensors").await]
}

async fn stepped_down(server: &Server, cause: &str) -> usize {
    server.metric(&format!("chiasm_mm_transfer_fallback_total{{cause=\"{cause}\"}}")).await as usize
}

fn local(flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    Server::start(&[&[&*model, "--served-model-name", "m"], flags].concat())
}

#[tokio::test]
async fn answers_are_the_same_whichever_way_images_go() {
    let local = local(&[&["--allow-private-media", "--sim", "4"], &FAST[..]].concat());
    local.wait_ready(4, SOON).await;
    let expected = scenario_run::play_all(&local, "m", BLOCK, 64).await;
    let cluster = Cluster::new();
    let flags = [&["--sim", "2", "--take-tensors"], &FAST[..]].concat();
    let mut machine = 0;
    for (media, goes) in
        [("encoded", [true, false]), ("tensors", [false, true]), ("auto", [true, false])]
    {
        let agents = [machine + 1, machine + 2].map(|machine| cluster.agent(machine, &flags));
        machine += 2;
        let server = cluster.serve(&agents, &["--allow-private-media", "--agent-media", media]);
        server.wait_ready(4, SOON).await;
        assert_eq!(scenario_run::play_all(&server, "m", BLOCK, 64).await, expected, "{media}");
        assert_eq!(sent(&server).await.map(|items| items > 0), goes, "{media}");
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
async fn answers_are_the_same_when_tensors_are_read_by_nixl() {
    let library = std::env::var("CHIASM_TEST_NIXL");
    let library =
        library.expect("CHIASM_TEST_NIXL names NIXL's libnixl_capi.so: `cargo xtask test` sets it");
    let nixl = ["--nixl-library", &library];
    let local = local(&[&["--allow-private-media", "--sim", "4"], &FAST[..]].concat());
    local.wait_ready(4, SOON).await;
    let expected = scenario_run::play_all(&local, "m", BLOCK, 64).await;
    let cluster = Cluster::new();
    let flags = [&["--sim", "2", "--take-tensors"], &FAST[..], &nixl].concat();
    let agents = [1, 2].map(|machine| cluster.agent(machine, &flags));
    let server = cluster.serve(
        &agents,
        &[&["--allow-private-media", "--agent-media", "tensors"], &nixl[..]].concat(),
    );
    server.wait_ready(4, SOON).await;
    assert_eq!(scenario_run::play_all(&server, "m", BLOCK, 64).await, expected);
    let [encoded, tensors] = sent(&server).await;
    let lent = server.metric("chiasm_media_lent_bytes_total").await;
    assert!(encoded == 0 && tensors > 0 && lent > 0.0, "{encoded} {tensors} {lent}");
    // All of them: none is so small that a message carries it.
    assert_eq!(server.metric("chiasm_media_sent_bytes_total").await, 0.0);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
}

#[tokio::test]
async fn an_image_has_one_identity_whichever_way_it_came() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1", "--take-tensors"])];
    let [encoded, tensors] =
        ["encoded", "tensors"].map(|media| cluster.serve(&agents, &["--agent-media", media]));
    encoded.wait_ready(1, SOON).await;
    tensors.wait_ready(1, SOON).await;
    for (number, [first, second]) in
        [[&encoded, &tensors], [&tensors, &encoded]].into_iter().enumerate()
    {
        let picture = [named(DAWN.jpeg, &number.to_string())];
        let before = [sent(first).await, sent(second).await];
        ask(first, &picture).await.ok();
        assert_eq!(sent(first).await.iter().sum::<usize>(), before[0].iter().sum::<usize>() + 1);
        let again = ask(second, &picture).await;
        let (overlap, cached) = (
            again.header("x-chiasm-overlap"),
            again.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].clone(),
        );
        assert_eq!(sent(second).await, before[1], "the machine has it");
        assert!(!overlap.starts_with("0/") && cached.as_u64() > Some(0), "{overlap} {cached}");
    }
}

#[tokio::test]
async fn what_an_agent_does_not_take_as_tensors_goes_as_a_file_beside_what_it_takes() {
    let (small, large) = (DAWN.jpeg.to_vec(), photo(560, 448));
    let pictures = [small.clone(), large.clone(), named(&small, "another")];
    let local = local(&["--sim", "1"]);
    local.wait_ready(1, SOON).await;
    let expected = seen(&local, &pictures).await;
    let cluster = Cluster::new();
    // Raw values of the small one take 376,320 bytes.
    let takes = ["--sim", "1", "--take-tensors", "--processor-item-bytes", "400000"];
    let agents = [cluster.agent(1, &takes)];
    let server = cluster.serve(&agents, &["--agent-media", "tensors"]);
    server.wait_ready(1, SOON).await;
    assert_eq!(seen(&server, &pictures).await, expected);
    assert_eq!(
        (sent(&server).await, stepped_down(&server, "tensors_too_large").await),
        ([1, 2], 1)
    );
    // The bytes are those of one file and two tensors.
    let bytes = server.metric("chiasm_media_sent_bytes_total").await as usize;
    assert!(bytes > large.len() + 2 * 376_320 && bytes < large.len() + 2 * 377_000, "{bytes}");

    let agents = [cluster.agent(2, &["--sim", "1"])];
    let server = cluster.serve(&agents, &["--agent-media", "tensors"]);
    server.wait_ready(1, SOON).await;
    assert_eq!(seen(&server, &pictures).await, expected);
    assert_eq!(
        (sent(&server).await, stepped_down(&server, "tensors_not_taken").await),
        ([3, 0], 3)
    );
}

#[tokio::test]
async fn a_broken_image_gets_the_same_answer_whichever_way_it_would_go() {
    let cluster = Cluster::new();
    let broken = [DAWN.jpeg[..DAWN.jpeg.len() / 2].to_vec()];
    let mut answers = Vec::new();
    for (machine, media) in [(1, "encoded"), (2, "tensors")] {
        let agents = [cluster.agent(machine, &["--sim", "1", "--take-tensors"])];
        let server = cluster.serve(&agents, &["--agent-media", media]);
        server.wait_ready(1, SOON).await;
        let answer = ask(&server, &broken).await;
        answers.push((answer.status, answer.json()["error"]["message"].clone()));
        assert_eq!(
            stepped_down(&server, "tensors_not_made").await,
            usize::from(media == "tensors")
        );
    }
    assert!(answers[0].0 != 200 && answers[0] == answers[1], "{answers:?}");
}

/// Work on media at the agent of the first worker, in seconds of one core.
async fn pending(server: &Server) -> f64 {
    workers(server).await[0]["media"]["pending_seconds"].as_f64().expect("it is told")
}

#[tokio::test]
async fn an_agent_with_too_much_to_decode_gets_tensors_and_an_idle_one_files() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1", "--take-tensors", "--cpu-threads", "1"])];
    let busy = cluster.serve(&agents, &["--agent-media", "encoded"]);
    let server = cluster.serve(&agents, &[]);
    busy.wait_ready(1, SOON).await;
    server.wait_ready(1, SOON).await;
    let photo = photo(3000, 2000);
    ask(&server, &[named(&photo, "while it is idle")]).await.ok();
    assert_eq!(sent(&server).await, [1, 0]);
    assert_eq!(workers(&server).await[0]["media"]["threads"], 1);
    assert_eq!(server.metric("chiasm_worker_media_threads").await, 1.0);

    let flood = async {
        let names = (0..24).map(|number| format!("flood {number}"));
        let asked = names.map(|name| [named(&photo, &name)]).collect::<Vec<_>>();
        let answers = join_all(asked.iter().map(|picture| ask(&busy, picture))).await;
        answers.iter().for_each(|answer| drop(answer.ok()));
    };
    let meanwhile = async {
        wait_for("work", SOON, async || pending(&server).await > 0.3).await;
        assert!(server.metric("chiasm_worker_media_pending_seconds").await > 0.0);
        ask(&server, &[named(&photo, "while it is busy")]).await.ok();
        assert_eq!(sent(&server).await, [1, 1]);
    };
    tokio::join!(flood, meanwhile);
    assert_eq!(sent(&busy).await, [24, 0]);
    wait_for("no work", SOON, async || pending(&server).await == 0.0).await;
    ask(&server, &[named(&photo, "when it is idle again")]).await.ok();
    assert_eq!(sent(&server).await, [2, 1]);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
}

#[tokio::test]
async fn an_agent_that_dies_while_tensors_come_costs_no_request() {
    let cluster = Cluster::new();
    let flags = ["--sim", "1", "--take-tensors"];
    let mut agents = [cluster.agent(1, &flags), cluster.agent(2, &flags)];
    // Slow enough that tensors are on their way for a while.
    let relay = Relay::to(&agents[0].address).await;
    let server = cluster.serve_at(
        &format!("{},{}", relay.address(), agents[1].address),
        &["--agent-media", "tensors"],
    );
    server.wait_ready(2, SOON).await;
    let photo = photo(1000, 1000);
    let before = relay.carried();
    // One of them for each agent.
    let pictures = [[named(&photo, "one")], [named(&photo, "other")]];
    let answers = join_all(pictures.iter().map(|picture| ask(&server, picture)));
    let dies = async {
        // A fourth of the tensors.
        wait_for("tensors on their way", SOON, async || relay.carried() > before + 1000).await;
        agents[0].kill();
    };
    let (answers, ()) = tokio::join!(answers, dies);
    for answer in answers {
        let worker = answer.header("x-chiasm-worker");
        assert_eq!((answer.status, worker.is_empty()), (200, false), "{:?}", answer.json());
    }
    assert!(stepped_down(&server, "tensors_not_sent").await >= 1);
    assert_eq!(server.ready_workers().await, 1);
}

#[tokio::test]
async fn a_frontend_that_dies_while_it_sends_tensors_leaves_nothing_to_wait_for() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1", "--take-tensors"])];
    let relay = Relay::to(&agents[0].address).await;
    let gone = cluster.serve_at(&relay.address(), &["--agent-media", "tensors"]);
    let stays = cluster.serve(&agents, &["--agent-media", "tensors"]);
    gone.wait_ready(1, SOON).await;
    stays.wait_ready(1, SOON).await;
    let picture = [photo(1000, 1000)];
    let before = relay.carried();
    let asked = async {
        // The head of the answer comes, or the connection ends.
        let body = body(&picture).to_string();
        let post = gone.client.post(format!("{}/v1/chat/completions", gone.url));
        drop(post.header("content-type", "application/json").body(body).send().await);
    };
    let other = async {
        wait_for("tensors on their way", SOON, async || relay.carried() > before + 1000).await;
        // It waits for what the first one was asked for.
        let (answer, ()) =
            tokio::join!(ask(&stays, &picture), async { send_signal(gone.pid(), "KILL") });
        answer
    };
    let ((), answer) =
        tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(asked, other) })
            .await
            .expect("nobody waits for what does not come");
    assert_eq!(answer.status, 200);
    assert_eq!(sent(&stays).await, [0, 1]);
    let idle =
        async || pending(&stays).await == 0.0 && workers(&stays).await[0]["engine"]["running"] == 0;
    wait_for("an idle agent", SOON, idle).await;
}
