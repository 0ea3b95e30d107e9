//! LoRA adapters: answers as those of `vllm serve`, blocks of their own, and engines that outlive
//! what they refuse.

use std::path::Path;
use std::time::Duration;

use chiasm::scenarios::{DAWN, SNOW};
use serde_json::{Value, json};

use super::environment::{BLOCK_SIZE, ENGINES, Environment, ROOMY_ARENA_GB, STARTUP};
use super::predictions::{found_as_predicted, settled};
use super::requests::{answers_are_those_of_vllm_serve, comparable_requests, ids, image, text};
use crate::support::Server;

/// The model that has adapters.
const MODEL: &str = "qwen25vl";
const ADAPTERS: [&str; 2] = ["a", "b"];

/// An engine with two adapters. Requests without one are answered as ever, too: these are the image
/// family's own.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn adapters_answer_as_in_vllm_serve() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let modules = ADAPTERS
        .map(|name| format!("{name}={}", environment.model(&format!("{MODEL}-lora-{name}"))));
    let own = ["--lora-modules", &modules[0], &modules[1]];
    let flags = ["--enable-lora", "--max-loras", "2"];
    let requests = [comparable_requests(), ADAPTERS.map(requests_of).concat()].concat();

    // Both start at the same time.
    let reference = environment.reference(MODEL, &[&flags[..], &own].concat());
    let own = [&own[..], &["--allow-runtime-lora-updating"]].concat();
    let (mut server, engine) = environment.attach_with("shm", ROOMY_ARENA_GB, MODEL, &own, &flags);
    let reference = reference.answers(&requests).await;
    server.wait_ready(1, STARTUP).await;
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    each_answers_in_its_own_way(&server).await;
    refused_adapters_harm_nobody(&server).await;
    // The next frontend takes the engine over, with adapters and blocks.
    server.end_by("KILL");
    let server = engine.serve();
    server.wait_ready(1, STARTUP).await;
    server.logged("took over an engine");
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    each_answers_in_its_own_way(&server).await;
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
    // So does an agent, whose frontend knows adapters and blocks from it.
    let own = ["--lora-modules", &modules[0], &modules[1]];
    let (_agent, server) = engine.behind_agent(&own, &flags);
    server.wait_ready(1, STARTUP).await;
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    each_answers_in_its_own_way(&server).await;
}

fn requests_of(adapter: &str) -> Vec<Value> {
    let ask = |content: Value| {
        json!({
            "model": adapter, "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        })
    };
    vec![
        ask(json!("the quick brown fox jumps over the lazy dog")),
        ask(json!([image(DAWN), text("describe this image briefly.")])),
        ask(json!([text("what is in"), image(SNOW)])),
    ]
}

/// Nobody finds blocks of another, and everybody its own, as predicted.
async fn each_answers_in_its_own_way(server: &Server) {
    let mut answers = Vec::new();
    for turn in 0..2 {
        for model in ["m", "a", "b"] {
            // Words of no other request, and others for each start of the frontend.
            let text = format!("{} jumps over the lazy dog ", server.pid()).repeat(16);
            let mut request = requests_of(model).swap_remove(0);
            request["messages"][0]["content"] = json!(text);
            settled(server).await;
            let answer = server.chat(&request).await;
            let found = found_as_predicted(&answer, BLOCK_SIZE as usize, model);
            assert_eq!(found > 0, turn == 1, "{model}: {found} blocks");
            answers.push(ids(&answer.ok()));
        }
    }
    let [base, a, b, again @ ..] = answers.as_slice() else { panic!("six answers") };
    assert!(base.0 != a.0 && base.0 != b.0 && a.0 != b.0, "{answers:?}");
    assert!(base.1 == a.1 && a.1 == b.1, "the prompts are the same");
    assert_eq!(again, [base, a, b].map(Clone::clone), "what was cached is right");
}

async fn refused_adapters_harm_nobody(server: &Server) {
    let dir = tempfile::tempdir().expect("a folder");
    let load = async |path: &Path| {
        let body = json!({"lora_name": "x", "lora_path": path});
        let answer = server.post("/v1/load_lora_adapter", &body).await;
        (answer.status, answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned())
    };
    let (status, message) = load(&dir.path().join("none")).await;
    assert_eq!(status, 404, "{message}");
    for (rank, told) in
        [(64, "LoRA rank 64 is greater than max_lora_rank 16"), (8, "doesn't contain tensors")]
    {
        // The second one has no weights.
        let config = json!({"r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]});
        std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).expect("a file");
        let (status, message) = load(dir.path()).await;
        assert!((400..500).contains(&status) && message.contains(told), "{status} {message}");
    }
    let mut request = requests_of("x").swap_remove(0);
    assert_eq!(server.chat(&request).await.status, 404);
    request["model"] = json!("a");
    server.chat(&request).await.ok();
    assert_eq!(server.ready_workers().await, 1);
}
