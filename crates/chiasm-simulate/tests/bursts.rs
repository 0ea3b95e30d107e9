//! Tests of bursts of prompts to fleets with roles, in virtual time.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;

use chiasm_router::{Policy, RouterConfig, StageWeights};
use chiasm_simulate::{Arrivals, Scenario, Source};
use chiasm_types::Role;
use serde_json::json;
use tempfile::NamedTempFile;

const REQUESTS: u64 = 32;
/// The number of tokens per id of a trace.
const TRACE_BLOCK_TOKENS: u64 = 512;

/// A series of requests with a gap of `gap_ms` between arrivals.
#[derive(Clone, Copy, Debug)]
struct Burst {
    prompt_tokens: u64,
    answer_tokens: u64,
    /// `true` if the first half of each prompt is the same.
    is_shared: bool,
    gap_ms: u64,
}

impl Burst {
    /// Writes the requests as a trace.
    fn trace(&self) -> NamedTempFile {
        let mut file = NamedTempFile::new().unwrap();
        let blocks = self.prompt_tokens.div_ceil(TRACE_BLOCK_TOKENS);
        let shared = if self.is_shared { blocks / 2 } else { 0 };
        for request in 0..REQUESTS {
            let own = (shared..blocks).map(|block| (request + 1) * 1000 + block);
            let line = json!({
                "timestamp": request * self.gap_ms,
                "input_length": self.prompt_tokens,
                "output_length": self.answer_tokens,
                "hash_ids": (0..shared).chain(own).collect::<Vec<_>>(),
            });
            writeln!(file, "{line}").unwrap();
        }
        file.flush().unwrap();
        file
    }
}

/// Runs a trace and returns the seconds until the last answer ends.
fn seconds(
    prefill: usize,
    decode: usize,
    trace: &NamedTempFile,
    policy: Policy,
    stages: StageWeights,
) -> f64 {
    let workers: Vec<Role> =
        [vec![Role::Prefill; prefill], vec![Role::Decode; decode]].into_iter().flatten().collect();
    let scenario = Scenario {
        sized_for: workers.len(),
        workers,
        requests: REQUESTS,
        warm_up: 0,
        source: Source::Trace(trace.path().to_owned()),
        seed: 1,
        engine: Default::default(),
        frontend: Default::default(),
        router: RouterConfig { stages, ..RouterConfig::default() },
    };
    scenario.run(policy, Arrivals::Traced(1.0)).unwrap().virtual_seconds
}

/// Checks that the router's choices take at most 10 % longer than the better of splitting all
/// prompts and splitting none.
fn check(prompt_tokens: u64, gap_ms: u64) {
    for (prefill, decode) in [(1, 1), (3, 1), (1, 3), (2, 2)] {
        for (answer_tokens, is_shared) in [(1, false), (1, true), (256, false), (256, true)] {
            let burst = Burst { prompt_tokens, answer_tokens, is_shared, gap_ms };
            let trace = burst.trace();
            let default = StageWeights::default();
            let never = StageWeights { hop: 1e12, ..default };
            let chosen = seconds(prefill, decode, &trace, Policy::KvMedia, default);
            let split = seconds(prefill, decode, &trace, Policy::RoundRobin, default);
            let whole = seconds(prefill, decode, &trace, Policy::KvMedia, never);
            let name = format!("{prefill}P{decode}D {burst:?}");
            println!("{name}: {chosen:.2} s; all split {split:.2} s, all whole {whole:.2} s");
            assert!(chosen <= 1.1 * split.min(whole), "{name}: {chosen} of {split} and {whole}");
        }
    }
}

#[test]
fn burst_of_long_prompts_spreads_over_all_workers() {
    check(8192, 0);
}

#[test]
fn burst_of_short_prompts_spreads_over_all_workers() {
    check(1024, 0);
}

#[test]
fn spaced_prompts_take_the_better_route() {
    check(8192, 100);
}
