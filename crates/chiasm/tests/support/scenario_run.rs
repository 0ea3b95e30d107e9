//! Plays the ten scenarios on a server and checks what each request expects.

use chiasm::scenarios::{self, Observed};

use std::time::{Duration, Instant};

use super::Server;
use super::origin::Origin;
use super::stand_ins;

/// How long an engine's KV events may take on a busy machine. Without them the next request fails
/// the run, so this one does not.
const EVENTS: Duration = Duration::from_secs(5);

/// Blocks that the index holds for all workers.
async fn known_blocks(server: &Server) -> usize {
    let workers =
        server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    let workers = super::json(workers).await;
    let blocks =
        |worker: &serde_json::Value| worker["known_blocks"].as_u64().expect("a number") as usize;
    workers["workers"].as_array().expect("a list").iter().map(blocks).sum()
}

/// The ten scenarios with the pictures that they have.
pub async fn play_all(
    server: &Server,
    model: &str,
    block_size: u64,
    max_tokens: u32,
) -> Vec<String> {
    play_all_with("image", server, model, block_size, max_tokens).await
}

/// The ten scenarios with items of another modality in place of pictures.
pub async fn play_all_with(
    modality: &str,
    server: &Server,
    model: &str,
    block_size: u64,
    max_tokens: u32,
) -> Vec<String> {
    play(modality, None, server, model, block_size, max_tokens).await
}

/// The ten scenarios once more, on engines that have played them before: nothing that they hold is
/// of use behind this salt.
pub async fn play_all_again(
    salt: &str,
    server: &Server,
    model: &str,
    block_size: u64,
    max_tokens: u32,
) -> Vec<String> {
    play("image", Some(salt), server, model, block_size, max_tokens).await
}

/// Panics at the first request that fails, goes elsewhere, or whose engine disagrees with the
/// overlap. The answers' texts.
async fn play(
    modality: &str,
    salt: Option<&str>,
    server: &Server,
    model: &str,
    block_size: u64,
    max_tokens: u32,
) -> Vec<String> {
    let origin = Origin::start().await;
    let mut texts = Vec::new();
    for scenario in scenarios::all() {
        let mut observed = Vec::new();
        for (index, turn) in scenario.turns.iter().enumerate() {
            let what = format!("{}, request {}", scenario.name, index + 1);
            let known = known_blocks(server).await;
            let mut body = turn.body(model, &origin.url(), max_tokens);
            if modality != "image" {
                stand_ins::replace_pictures(&mut body, modality, &origin.url());
            }
            if let Some(salt) = salt {
                body["cache_salt"] = salt.into();
            }
            let answer = server.chat(&body).await;
            let body = answer.ok();
            let usage = &body["usage"];
            let overlap = answer.header("x-chiasm-overlap");
            let (overlap, total) = overlap.split_once('/').expect("X/Y");
            let now = Observed {
                worker: answer.header("x-chiasm-worker"),
                overlap: overlap.parse().expect("a number"),
                total: total.parse().expect("a number"),
            };
            eprintln!("{what}: {} {}/{} {usage}", now.worker, now.overlap, now.total);

            let prompt = usage["prompt_tokens"].as_u64().expect("a count");
            assert_eq!(now.total as u64, prompt / block_size, "{what}: full blocks");
            // An engine always computes the last token, so it reuses no block that holds it.
            let reusable = (prompt - 1) / block_size;
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
            assert_eq!(
                cached,
                reusable.min(now.overlap as u64) * block_size,
                "{what}: the engine's own count"
            );

            // What the engine stored for this prompt is told soon after the answer, not before.
            let patience = Instant::now() + EVENTS;
            while known_blocks(server).await < known + now.total - now.overlap
                && Instant::now() < patience
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }

            observed.push(now);
            if let Err(wrong) = turn.expect.check(&observed) {
                panic!("{what}: {wrong}");
            }
            texts.push(body["choices"][0]["message"]["content"].as_str().expect("text").to_owned());
        }
    }
    texts
}
