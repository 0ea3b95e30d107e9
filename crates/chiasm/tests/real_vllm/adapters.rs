//! LoRA adapters: answers match `vllm serve`, blocks are not shared, and engines survive refused
//! adapters.

use std::path::Path;
use std::time::Duration;

use chiasm::scenarios::{DAWN, SNOW};
use serde_json::{Value, json};

use super::environment::{BLOCK_SIZE, ENGINES, Environment, ROOMY_ARENA_GB, STARTUP_TIMEOUT};
use super::predictions::{assert_cached_as_predicted, wait_settled};
use super::requests::{
    assert_answers_match, comparable_requests, greedy_request, ids, image, text,
};
use crate::support::Server;

/// The test model that has adapters.
const MODEL: &str = "qwen25vl";
const ADAPTERS: [&str; 2] = ["a", "b"];

/// Sends requests to both adapters of an engine and to its base model.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn adapters_match_vllm_serve() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let modules = ADAPTERS
        .map(|name| format!("{name}={}", environment.model(&format!("{MODEL}-lora-{name}"))));
    let module_flags = ["--lora-modules", &modules[0], &modules[1]];
    let flags = ["--enable-lora", "--max-loras", "2"];
    let requests = [comparable_requests(), ADAPTERS.map(adapter_requests).concat()].concat();

    // The reference server and the engine start at the same time.
    let reference = environment.reference(MODEL, &[&flags[..], &module_flags].concat());
    let frontend_flags = [&module_flags[..], &["--allow-runtime-lora-updating"]].concat();
    let (mut server, engine) =
        environment.attach_with("shm", ROOMY_ARENA_GB, MODEL, &frontend_flags, &flags);
    let reference = reference.answers(&requests).await;
    server.wait_ready(1, STARTUP_TIMEOUT).await;
    assert_answers_match(&server, &requests, &reference).await;
    check_adapters_are_separate(&server).await;
    check_refused_adapters(&server).await;
    // The next frontend takes the engine over with its adapters and blocks.
    server.signal_and_wait("KILL");
    let server = engine.serve();
    server.wait_ready(1, STARTUP_TIMEOUT).await;
    server.wait_for_log("took over an engine");
    assert_answers_match(&server, &requests, &reference).await;
    check_adapters_are_separate(&server).await;
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
    // An agent takes the engine over, too. A frontend learns the adapters and blocks from the
    // agent.
    let (_agent, server) = engine.behind_agent(&module_flags, &flags);
    server.wait_ready(1, STARTUP_TIMEOUT).await;
    assert_answers_match(&server, &requests, &reference).await;
    check_adapters_are_separate(&server).await;
}

fn adapter_requests(adapter: &str) -> Vec<Value> {
    let request = |content: Value| greedy_request(adapter, &content, 16);
    vec![
        request(json!("the quick brown fox jumps over the lazy dog")),
        request(json!([image(DAWN), text("describe this image briefly.")])),
        request(json!([text("what is in"), image(SNOW)])),
    ]
}

/// Checks that the base model and the adapters answer differently, and that each finds only its own
/// blocks, as predicted.
async fn check_adapters_are_separate(server: &Server) {
    let mut answers = Vec::new();
    for turn in 0..2 {
        for model in ["m", "a", "b"] {
            // No other request has this text: it is different for each start of the frontend.
            let text = format!("{} jumps over the lazy dog ", server.pid()).repeat(16);
            let mut request = adapter_requests(model).swap_remove(0);
            request["messages"][0]["content"] = json!(text);
            wait_settled(server).await;
            let answer = server.chat(&request).await;
            let cached = assert_cached_as_predicted(&answer, BLOCK_SIZE as usize, model);
            assert_eq!(cached > 0, turn == 1, "{model}: {cached} blocks");
            answers.push(ids(&answer.ok()));
        }
    }
    let [base, a, b, again @ ..] = answers.as_slice() else { panic!("six answers") };
    assert!(base.0 != a.0 && base.0 != b.0 && a.0 != b.0, "{answers:?}");
    assert!(base.1 == a.1 && a.1 == b.1, "the prompts are the same");
    assert_eq!(again, [base, a, b].map(Clone::clone), "cached blocks give the same answers");
}

/// Checks that adapters are refused with a reason, and that the engine survives.
async fn check_refused_adapters(server: &Server) {
    let dir = tempfile::tempdir().expect("a folder");
    let load = async |path: &Path| {
        let body = json!({"lora_name": "x", "lora_path": path});
        let answer = server.post("/v1/load_lora_adapter", &body).await;
        (answer.status, answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned())
    };
    let (status, message) = load(&dir.path().join("none")).await;
    assert_eq!(status, 404, "{message}");
    for (rank, reason) in
        [(64, "LoRA rank 64 is greater than max_lora_rank 16"), (8, "doesn't contain tensors")]
    {
        // The folder has no weights. vLLM checks the rank before it looks for weights.
        let config = json!({"r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]});
        std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).expect("a file");
        let (status, message) = load(dir.path()).await;
        assert!((400..500).contains(&status) && message.contains(reason), "{status} {message}");
    }
    let mut request = adapter_requests("x").swap_remove(0);
    assert_eq!(server.chat(&request).await.status, 404);
    request["model"] = json!("a");
    server.chat(&request).await.ok();
    assert_eq!(server.ready_workers().await, 1);
}
