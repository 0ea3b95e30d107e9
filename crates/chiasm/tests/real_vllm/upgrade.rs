//! Engines of two vLLM versions with one frontend, as during a rolling upgrade.

use serde_json::{Value, json};

use super::environment::{
    AttachPoint, ENGINE_FLAGS, ENGINES, Environment, ROOMY_ARENA_GB, STARTUP_TIMEOUT, serve_flags,
    vllm_serves,
};
use super::modalities::{clip, short_request};
use super::predictions::{wait_settled, workers};
use super::requests::{family_requests, ids, text};
use crate::support::vllm_serves::VllmServes;
use crate::support::{Server, wait_for};

/// A model whose engines normalise pixels themselves since vLLM 0.32. Older engines need normalised
/// pixels.
const MODEL: &str = "qwen3vl";

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn rolling_upgrade_keeps_answers() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let mut requests = family_requests(&json!({"max_pixels": 50176}));
    // The video is processed by the processor of the engine's own version.
    requests.push(short_request(json!([clip("silent.mp4"), text("what is this?")])));
    let reference = environment.reference(MODEL, &[]).answers(&requests).await;

    let tested = &environment.version;
    let other = &environment.other_version;
    let mut other_serves = VllmServes::start(&environment.other_python);
    let points = [(); 2].map(|()| environment.attach_point(MODEL, &[]));
    let server = serve(&environment, &points);
    let mut engines = Vec::from(points.each_ref().map(|point| point.start(&mut other_serves)));
    server.wait_ready(2, STARTUP_TIMEOUT).await;
    assert_eq!(running_versions(&server).await, [label(other), label(other)]);
    check_each_engine(&server, &requests, &reference).await;

    // Each attach point belongs to one worker.
    for upgraded in 0..2 {
        drop(engines.remove(0));
        wait_for("the old engine's end", STARTUP_TIMEOUT, async || {
            server.ready_workers().await == 1
        })
        .await;
        engines.push(points[upgraded].start(&mut vllm_serves()));
        // The other engine serves requests meanwhile.
        server.chat(&requests[0]).await.ok();
        server.wait_ready(2, STARTUP_TIMEOUT).await;
        let second = [other, tested][upgraded];
        assert_eq!(running_versions(&server).await, [label(tested), label(second)]);
        check_each_engine(&server, &requests, &reference).await;
    }
    for direction in ["high", "low"] {
        let labels = format!("{{too=\"{direction}\",state=\"exact\"}}");
        let name = format!("chiasm_overlap_error_blocks_total{labels}");
        assert_eq!(server.metric(&name).await, 0.0, "too {direction}");
    }
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    assert_eq!(server.count_logged("vLLM's processor is ready"), 2);
}

/// Starts a frontend that sends requests to the engines of two attach points in turn.
fn serve(environment: &Environment, points: &[AttachPoint; 2]) -> Server {
    let mut args = vec![environment.model(MODEL), "--policy".to_owned(), "round-robin".to_owned()];
    args.extend(points.iter().flat_map(|point| ["--attach".to_owned(), point.handshake.clone()]));
    args.extend(serve_flags("shm", ROOMY_ARENA_GB));
    let processors = [
        "--vllm",
        &environment.vllm,
        "--processor-vllm",
        &environment.other_vllm(),
        "--port",
        "0",
        "--",
    ];
    args.extend([&processors, ENGINE_FLAGS].concat().into_iter().map(str::to_owned));
    let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
    Server::start(&args)
}

/// Returns the label of an engine of this version in `/workers`.
fn label(version: &str) -> Value {
    json!(format!("vLLM {version}"))
}

/// Returns the labels of the engines of both workers.
async fn running_versions(server: &Server) -> [Value; 2] {
    let workers = workers(server).await;
    [0, 1].map(|worker| workers[worker]["runs"].clone())
}

/// Sends every request to each engine twice. The engine computes the prompt the first time, and
/// finds it in its cache the second time.
async fn check_each_engine(server: &Server, requests: &[Value], reference: &[Value]) {
    for (request, expected) in requests.iter().zip(reference) {
        let mut counts = [0; 2];
        for turn in 0..4 {
            wait_settled(server).await;
            let answer = server.chat(request).await;
            let body = answer.ok();
            assert_eq!(
                ids(&body),
                ids(expected),
                "{} of {}",
                answer.header("x-chiasm-worker"),
                request["messages"]
            );
            let cached =
                body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("tokens");
            let worker = usize::from(answer.header("x-chiasm-worker") == "worker_1");
            counts[worker] += 1;
            let prompt = body["usage"]["prompt_tokens"].as_u64().expect("tokens");
            assert!(
                turn < 2 || prompt < 64 || cached > 0,
                "{request} is not cached by worker_{worker}"
            );
        }
        assert_eq!(counts, [2, 2], "answers of each worker");
    }
}
