//! Engines find exactly the blocks in their caches that the router predicts.

use std::time::Duration;

use chiasm::scenarios::{DAWN, NIGHT, SNOW};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::environment::{ARENA_GB, ENGINES, Environment, STARTUP_TIMEOUT};
use super::requests::{image, text};
use crate::support::{self, Answer, Server, wait_for};

/// Covers models with one kind of attention and with several (windows, chunks, linear). Each has a
/// cache so small that blocks are evicted all the time.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn engines_find_predicted_blocks() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let chosen = std::env::var("CHIASM_TEST_FAMILIES").ok();
    for (model, blocks, flags) in [
        ("qwen2vl", "60", &[][..]),
        ("gemma3", "80", &[]),
        ("llama4", "400", &[]),
        ("qwen35", "60", &["--dtype", "bfloat16"]),
    ] {
        if chosen.as_ref().is_some_and(|chosen| !chosen.split(',').any(|name| name == model)) {
            continue;
        }
        let small = ["--num-gpu-blocks-override", blocks, "--max-model-len", "1024"];
        let (server, _engine) =
            environment.attach("shm", ARENA_GB, model, &[&small, flags].concat());
        server.wait_ready(1, STARTUP_TIMEOUT).await;
        check_predictions(&server, model).await;
        assert!(
            server.terminate(Duration::from_secs(60)).await,
            "SIGTERM ends it with exit code 0"
        );
    }
}

/// Returns the server's list of workers.
pub(crate) async fn workers(server: &Server) -> Value {
    let report =
        server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    support::json(report).await["workers"].take()
}

/// Waits until all KV events of the engines are applied. Before, a prediction may be too low.
pub(crate) async fn wait_settled(server: &Server) {
    wait_for("settled knowledge", STARTUP_TIMEOUT, async || {
        let workers = workers(server).await;
        let workers = workers.as_array().expect("workers");
        workers
            .iter()
            .all(|worker| worker["knowledge"] == "exact" && worker["promised_blocks"] == 0)
    })
    .await;
}

/// Asserts that the engine has found the predicted number of cached blocks, and returns it.
pub(crate) fn assert_cached_as_predicted(
    response: &Answer,
    block_size: usize,
    what: &str,
) -> usize {
    let usage = response.ok()["usage"].clone();
    let tokens = |count: &Value| count.as_u64().expect("a number of tokens") as usize;
    let found = tokens(&usage["prompt_tokens_details"]["cached_tokens"]) / block_size;
    let overlap = response.header("x-chiasm-overlap");
    let overlap: usize =
        overlap.split('/').next().and_then(|blocks| blocks.parse().ok()).expect("blocks");
    // The last token of a prompt is always computed.
    let predicted = overlap.min((tokens(&usage["prompt_tokens"]) - 1) / block_size);
    assert_eq!(predicted, found, "{what}");
    found
}

/// Sends prompts with shared prefixes, some with an image, and checks each prediction.
async fn check_predictions(server: &Server, model: &str) {
    // The same prompts in every run, so that failures are reproducible.
    let mut random = SmallRng::seed_from_u64(1);
    let mut words =
        |count: usize| -> Vec<u32> { (0..count).map(|_| random.random_range(10..200)).collect() };
    let prefixes: Vec<Vec<u32>> = [90, 200, 310, 420, 530, 640].map(&mut words).into();
    wait_settled(server).await;
    let block_size =
        workers(server).await[0]["block_size"].as_u64().expect("a block size") as usize;
    let mut cached_blocks = 0;
    for turn in 0..48 {
        let answer = ["short", "long"][turn % 2];
        let max_tokens = [1, 30][turn % 2];
        let response = if turn % 6 == 5 {
            let content = json!([image([DAWN, SNOW, NIGHT][turn / 6 % 3]), text(answer)]);
            let body = json!({
                "model": "m",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": max_tokens,
                "ignore_eos": true,
            });
            server.chat(&body).await
        } else {
            let prefix = &prefixes[turn * 5 % 6];
            let shared = prefix.len() * (1 + turn % 3) / 3;
            let prompt = [&prefix[..shared], &words([0, 7, 100][turn % 3])].concat();
            let body = json!({
                "model": "m",
                "prompt": prompt,
                "max_tokens": max_tokens,
                "ignore_eos": true,
            });
            server.post("/v1/completions", &body).await
        };
        cached_blocks +=
            assert_cached_as_predicted(&response, block_size, &format!("{model}, request {turn}"));
        wait_settled(server).await;
    }
    assert!(cached_blocks > 0, "{model}");
    let worker = &workers(server).await[0];
    let count = |name: &str| worker["index"][name].as_u64();
    assert_eq!(
        (count("unknown_parents"), count("unknown_removals")),
        (Some(0), Some(0)),
        "{worker}"
    );
    for direction in ["high", "low"] {
        let labels = format!("{{too=\"{direction}\",state=\"exact\"}}");
        let name = format!("chiasm_overlap_error_blocks_total{labels}");
        assert_eq!(server.metric(&name).await, 0.0, "{model}: too {direction}");
    }
}
