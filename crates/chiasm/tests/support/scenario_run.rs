//! Plays scenarios on a server and checks the expectations of each request.

use std::time::{Duration, Instant};

use chiasm::scenarios::{self, Expect, Observed, Turn};
use serde_json::{Value, json};

use super::Server;
use super::origin::Origin;
use super::stand_ins;

/// The time that an engine's KV events may take on a busy machine. Waiting longer is not a failure:
/// the next request fails the run if its events are missing.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the number of blocks in the index, summed over all workers.
async fn known_blocks(server: &Server) -> usize {
    count_blocks(server, "known_blocks").await
}

/// Returns the sum of a field over all workers.
async fn count_blocks(server: &Server, field: &str) -> usize {
    let workers =
        server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
    let workers = super::json(workers).await;
    let blocks = |worker: &Value| worker[field].as_u64().expect("a number") as usize;
    workers["workers"].as_array().expect("a list").iter().map(blocks).sum()
}

/// Plays the ten scenarios with their own pictures.
pub async fn play_all(
    server: &Server,
    model: &str,
    block_size: u64,
    max_tokens: u32,
) -> Vec<String> {
    play_all_with("image", server, model, block_size, max_tokens).await
}

/// Plays the ten scenarios with items of `modality` in place of pictures.
pub async fn play_all_with(
    modality: &str,
    server: &Server,
    model: &str,
    block_size: u64,
    max_tokens: u32,
) -> Vec<String> {
    play(modality, None, server, model, block_size, max_tokens).await
}

/// Plays the ten scenarios on engines that have played them before. `salt` keeps requests from
/// hitting the blocks that the engines cached then.
pub async fn play_all_again(
    salt: &str,
    server: &Server,
    model: &str,
    block_size: u64,
    max_tokens: u32,
) -> Vec<String> {
    play("image", Some(salt), server, model, block_size, max_tokens).await
}

/// Plays the scenarios and returns the texts of the answers.
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
        let request = |turn: &Turn| {
            let mut body = turn.body(model, &origin.url(), max_tokens);
            if modality != "image" {
                stand_ins::replace_pictures(&mut body, modality, &origin.url());
            }
            if let Some(salt) = salt {
                body["cache_salt"] = salt.into();
            }
            Request { body, expectations: vec![turn.expect], evicts: false }
        };
        let requests: Vec<Request> = scenario.turns.iter().map(request).collect();
        texts.extend(play_requests(scenario.name, &requests, server, block_size).await);
    }
    texts
}

/// A chat request of a scenario, with the expectations of its overlap.
pub struct Request {
    pub body: Value,
    pub expectations: Vec<Expect>,
    /// `true` if the engine evicts blocks for the request.
    pub evicts: bool,
}

impl Request {
    /// Creates a short request without expectations.
    pub fn new(messages: Value) -> Self {
        let body = json!({"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0});
        Self { body, expectations: Vec::new(), evicts: false }
    }

    /// Sets a field of the body.
    pub fn with(mut self, field: &str, value: Value) -> Self {
        self.body[field] = value;
        self
    }

    /// Marks a request for which the engine evicts blocks.
    pub fn evicting(self) -> Self {
        Self { evicts: true, ..self }
    }

    /// Adds an expectation.
    pub fn expect(mut self, expectation: Expect) -> Self {
        self.expectations.push(expectation);
        self
    }
}

/// Plays the requests of one scenario and returns the texts of the answers.
///
/// # Panics
/// If a request fails or is routed to another worker than expected, or if the engine's count of
/// cached tokens disagrees with the router's overlap.
pub async fn play_requests(
    scenario: &str,
    requests: &[Request],
    server: &Server,
    block_size: u64,
) -> Vec<String> {
    let mut texts = Vec::new();
    let mut observed = Vec::new();
    for (index, Request { body, expectations, evicts }) in requests.iter().enumerate() {
        let what = format!("{scenario}, request {}", index + 1);
        let known = known_blocks(server).await;
        let answer = server.chat(body).await;
        let body = answer.ok();
        let usage = &body["usage"];
        let overlap = answer.header("x-chiasm-overlap");
        let (overlap, total) = overlap.split_once('/').expect("X/Y");
        let current = Observed {
            worker: answer.header("x-chiasm-worker"),
            overlap: overlap.parse().expect("a number"),
            total: total.parse().expect("a number"),
        };
        eprintln!("{what}: {} {}/{} {usage}", current.worker, current.overlap, current.total);

        let prompt = usage["prompt_tokens"].as_u64().expect("a count");
        assert_eq!(current.total as u64, prompt / block_size, "{what}: full blocks");
        // An engine always computes the last token, so it never reuses the block with it.
        let reusable = (prompt - 1) / block_size;
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        assert_eq!(
            cached,
            reusable.min(current.overlap as u64) * block_size,
            "{what}: the engine's own count"
        );

        // The engine's KV events for this prompt arrive shortly after the answer.
        let new = current.total - current.overlap;
        let has_events = async || {
            if *evicts {
                count_blocks(server, "promised_blocks").await == 0
            } else {
                known_blocks(server).await >= known + new
            }
        };
        let deadline = Instant::now() + EVENTS_TIMEOUT;
        while !has_events().await && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }

        observed.push(current);
        for expectation in expectations {
            if let Err(mismatch) = expectation.check(&observed) {
                panic!("{what}: {mismatch}");
            }
        }
        texts.push(body["choices"][0]["message"]["content"].as_str().expect("text").to_owned());
    }
    texts
}
