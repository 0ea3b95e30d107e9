//! Engines of two versions of vLLM behind one frontend, as when a fleet is upgraded without a
//! pause.

use serde_json::{Value, json};

use super::environment::{
    ENGINE_FLAGS, ENGINES, Environment, Place, ROOMY_ARENA_GB, STARTUP, serve_flags, vllm_serves,
};
use super::modalities::{ask, clip};
use super::predictions::{settled, workers};
use super::requests::{family_requests, ids, text};
use crate::support::vllm_serves::VllmServes;
use crate::support::{Server, wait_for};

/// A model whose pixels engines normalise by themselves since 0.32; older engines are sent
/// normalised ones.
const MODEL: &str = "qwen3vl";

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn engines_are_upgraded_one_after_the_other() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let mut requests = family_requests(&json!({"max_pixels": 50176}));
    // Made by the processor of the engine's own version.
    requests.push(ask(json!([clip("silent.mp4"), text("what is this?")])));
    let reference = environment.reference(MODEL, &[]).answers(&requests).await;

    let (tested, other) = (&environment.version, &environment.other_version);
    let mut others = VllmServes::start(&environment.other_python);
    let places = [(); 2].map(|()| environment.place(MODEL, &[]));
    let server = serve(&environment, &places);
    let mut engines = Vec::from(places.each_ref().map(|place| place.start(&mut others)));
    server.wait_ready(2, STARTUP).await;
    assert_eq!(runs(&server).await, [is(other), is(other)]);
    each_engine_answers_as(&server, &requests, &reference).await;

    // An engine belongs to the worker that waits at its place.
    for upgraded in 0..2 {
        drop(engines.remove(0));
        wait_for("the old engine's end", STARTUP, async || server.ready_workers().await == 1).await;
        engines.push(places[upgraded].start(&mut vllm_serves()));
        // Nobody waits for it.
        server.chat(&requests[0]).await.ok();
        server.wait_ready(2, STARTUP).await;
        let second = [other, tested][upgraded];
        assert_eq!(runs(&server).await, [is(tested), is(second)]);
        each_engine_answers_as(&server, &requests, &reference).await;
    }
    for too in ["high", "low"] {
        let name = format!("chiasm_overlap_error_blocks_total{{too=\"{too}\",state=\"exact\"}}");
        assert_eq!(server.metric(&name).await, 0.0, "too {too}");
    }
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    assert_eq!(server.lines_logged("vLLM's processor is ready"), 2);
}

/// A frontend for the engines of two places, which get requests in turn.
fn serve(environment: &Environment, places: &[Place; 2]) -> Server {
    let mut args = vec![environment.model(MODEL), "--policy".to_owned(), "round-robin".to_owned()];
    args.extend(places.iter().flat_map(|place| ["--attach".to_owned(), place.handshake.clone()]));
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

/// What `/workers` says an engine of this version runs.
fn is(version: &str) -> Value {
    json!(format!("vLLM {version}"))
}

/// What each worker runs.
async fn runs(server: &Server) -> [Value; 2] {
    let workers = workers(server).await;
    [0, 1].map(|worker| workers[worker]["runs"].clone())
}

/// Every request twice with each engine: the first time it computes the prompt, then it finds what
/// it was predicted to have.
async fn each_engine_answers_as(server: &Server, requests: &[Value], reference: &[Value]) {
    for (request, expected) in requests.iter().zip(reference) {
        let mut found = [0; 2];
        for turn in 0..4 {
            settled(server).await;
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
            found[worker] += 1;
            let prompt = body["usage"]["prompt_tokens"].as_u64().expect("tokens");
            assert!(
                turn < 2 || prompt < 64 || cached > 0,
                "{request} is not cached by worker_{worker}"
            );
        }
        assert_eq!(found, [2, 2], "answers of each worker");
    }
}
