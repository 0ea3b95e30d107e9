//! Measures the time to pick one of up to 1,000 workers with full caches and requests in flight.
//!
//! `cargo run --release -p chiasm-router --example select`; docs/routing.md has the numbers of one
//! run.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use chiasm_kv::event::{BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};
use chiasm_kv::{BlockKey, MediaSpan, PromptBlocks, block_keys};
use chiasm_router::{
    Clock, EngineStats, Policy, Reservation, RouteItem, RouteRequest, Router, RouterConfig,
    VirtualClock, WorkerInfo,
};
use chiasm_types::{BlockSize, MmHash, PlanClassId, TokenId, WorkerId};

const BLOCK: BlockSize = BlockSize::new(16).unwrap();
/// Tokens of the system prompt that every worker holds.
const SYSTEM_TOKENS: usize = 512;
/// Placeholder tokens of an image.
const IMAGE_TOKENS: usize = 1024;
/// Tokens of a question about the image.
const QUESTION_TOKENS: usize = 128;
/// Images whose events each worker gets. The fourth of every four repeats the third, so a worker
/// holds three quarters of this number of different images.
const IMAGES_PER_WORKER: u32 = 16;
const SELECTIONS: usize = 20_000;
const REQUESTS_PER_SECOND: u64 = 5000;

fn main() {
    println!(
        "one selection, µs: system prompt ({SYSTEM_TOKENS} tokens), image ({IMAGE_TOKENS}), \
         question ({QUESTION_TOKENS}), {REQUESTS_PER_SECOND} a second, one thread"
    );
    println!("workers | in flight | policy       |   p50 |   p99 |  p99.9");
    for workers in [8, 64, 1000] {
        for policy in [Policy::KvMedia, Policy::Kv, Policy::LeastLoaded, Policy::RoundRobin] {
            measure(workers, policy);
        }
    }
}

fn measure(workers: u32, policy: Policy) {
    let clock = VirtualClock::default();
    let config = RouterConfig { policy, seed: Some(1), ..Default::default() };
    let router = Router::with_clock(config, Clock::Virtual(clock.clone()));
    for worker in (0..workers).map(WorkerId) {
        let info = WorkerInfo {
            total_blocks: 60_000,
            block_size: BLOCK,
            publishes_events: true,
            encoder_cache_tokens: 16_384,
            receiver_cache_elements: 4 << 30,
            class: PlanClassId(0),
            role: chiasm_types::Role::Aggregated,
            embedding_store_bytes: 0,
            machine: 0,
            handover_domain: 0,
            max_prompt_tokens: usize::MAX,
            max_encoder_tokens: usize::MAX,
        };
        router.add_worker(worker, info);
        router.set_stats(
            worker,
            EngineStats { running: 4, waiting: 0, kv_usage: 0.5, ..EngineStats::default() },
        );
        for image in 0..IMAGES_PER_WORKER {
            router.apply(
                worker,
                &Prompt::new(worker.0 * IMAGES_PER_WORKER + image - (image % 4) / 3, 0).stored(),
            );
        }
    }
    let mut running: VecDeque<(Reservation, Prompt)> = VecDeque::new();
    let mut times = Vec::with_capacity(SELECTIONS);
    let in_flight = 8 * workers as usize;
    for number in 0..(in_flight + SELECTIONS) as u32 {
        // Every second question is about an image that a worker holds.
        let image = number.wrapping_mul(2_654_435_761) % (workers * IMAGES_PER_WORKER);
        let prompt = Prompt::new(if number % 2 == 0 { image } else { 1_000_000 + number }, number);
        let media = [prompt.item()];
        let request = RouteRequest {
            keys: &prompt.keys,
            prompt_tokens: prompt.tokens.len(),
            media: &media,
            ..Default::default()
        };
        // Promises expire, so virtual time passes as if requests arrived at this rate.
        clock.set(u64::from(number) * 1_000_000_000 / REQUESTS_PER_SECOND);
        let start = Instant::now();
        let reservation = router.select(&request);
        let time = start.elapsed();
        running.push_back((reservation.unwrap(), prompt));
        if running.len() > in_flight {
            times.push(time);
            // A quarter of the requests in flight wait for their first tokens. The events of the
            // others have been applied.
            let (reservation, prompt) = &mut running[in_flight * 3 / 4];
            router.apply(reservation.worker, &prompt.stored());
            reservation.first_token();
            running.pop_front();
        }
    }
    times.sort_unstable();
    let percentile = |fraction: f64| microseconds(times[(times.len() as f64 * fraction) as usize]);
    println!(
        "{workers:7} | {in_flight:9} | {policy:12} | {:5.1} | {:5.1} | {:6.1}",
        percentile(0.5),
        percentile(0.99),
        percentile(0.999)
    );
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

struct Prompt {
    tokens: Vec<TokenId>,
    image: MmHash,
    keys: Vec<BlockKey>,
}

impl Prompt {
    fn new(image: u32, question: u32) -> Self {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&image.to_le_bytes());
        let image = MmHash::new(bytes);
        let mut tokens: Vec<_> = (0..SYSTEM_TOKENS as u32).map(TokenId).collect();
        tokens.resize(SYSTEM_TOKENS + IMAGE_TOKENS, TokenId(7));
        tokens.extend(
            (0..QUESTION_TOKENS as u32).map(|token| TokenId(question.wrapping_mul(31) ^ token)),
        );
        let media = [MediaSpan { hash: image, offset: SYSTEM_TOKENS, length: IMAGE_TOKENS }];
        let keys = block_keys(
            &PromptBlocks { tokens: &tokens, media: &media, ..Default::default() },
            BLOCK,
        );
        Self { tokens, image, keys }
    }

    fn item(&self) -> RouteItem {
        RouteItem {
            hash: self.image,
            end: SYSTEM_TOKENS + IMAGE_TOKENS,
            embeds: IMAGE_TOKENS,
            elements: 3 << 20,
        }
    }

    /// Returns the events that an engine publishes after it has computed the prompt.
    fn stored(&self) -> KvEventBatch {
        let extra_keys = (0..self.keys.len())
            .map(|block| {
                let start = block * BLOCK.get();
                (SYSTEM_TOKENS..SYSTEM_TOKENS + IMAGE_TOKENS).contains(&start).then(|| {
                    let identifier = self.image.to_string();
                    let offset = SYSTEM_TOKENS as i64 - start as i64;
                    vec![ExtraKey::Media { identifier, offset }]
                })
            })
            .collect();
        let stored = BlockStored {
            block_hashes: self.keys.iter().map(|key| ExternalHash::U64(key.get() as u64)).collect(),
            token_ids: self.tokens[..self.keys.len() * BLOCK.get()].to_vec(),
            block_size: BLOCK.get() as u32,
            extra_keys: Some(extra_keys),
            ..Default::default()
        };
        KvEventBatch {
            timestamp: 0.0,
            events: vec![KvEvent::BlockStored(stored)],
            data_parallel_rank: None,
        }
    }
}
