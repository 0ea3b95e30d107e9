//! The results of a run.

use std::fmt::Write as _;

use serde::Serialize;

use crate::latency::Latency;
use crate::timeline::Interval;

/// The results of one policy's run. The requests of the warm-up only count for `completed` and
/// `refused`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyReport {
    /// The policy's name.
    pub policy: &'static str,
    /// The number of frontends, each with a router of that policy.
    pub frontends: usize,
    /// The time from the arrival at a frontend to the first token.
    pub ttft_ms: Latency,
    /// The time between consecutive tokens of a request, over all tokens.
    pub itl_ms: Latency,
    /// The fraction of the prompt tokens that the engines found in their KV caches.
    pub hit_rate: f64,
    /// The fraction of the images' embeddings that no engine had to encode for the request, neither
    /// the engine that computed its prompt nor an encoding engine. They were in the KV cache, in an
    /// encoder cache or in the store. Negative if most were encoded more than once. `None` without
    /// images.
    pub encoder_saved: Option<f64>,
    /// The fraction of the images whose tensors the chosen engine had. `None` without images.
    pub tensors_reused: Option<f64>,
    /// The work of the worker with the most, relative to the mean, between the warm-up and the last
    /// arrival. Work is the cost of requests: computing and decoding tokens, encoding, attention.
    /// It excludes the overhead of steps and the reading of weights, which go on as long as any
    /// request decodes.
    pub balance: f64,
    /// The mean over all workers of the work that `balance` counts, in seconds per second and
    /// worker.
    pub work: f64,
    /// The number of requests that ended per second, between the warm-up and the last arrival.
    pub requests_per_second: f64,
    /// The fraction of the requests whose prompts were computed on another engine than their
    /// answers. `None` where no engine has a role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<f64>,
    /// The fraction of the images that were sent to an encoding engine, before another one computed
    /// the prompt. `None` where there is no encoding engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoded_elsewhere: Option<f64>,
    /// The number of requests that ended.
    pub completed: u64,
    /// The number of requests that did not fit an engine.
    pub refused: u64,
    /// The virtual time from the first arrival to the last token.
    pub virtual_seconds: f64,
    /// The virtual time from the first arrival to the end of the warm-up.
    pub warm_up_seconds: f64,
    /// The results over time, including the warm-up. Not serialized.
    #[serde(skip)]
    pub timeline: Vec<Interval>,
    /// The real time that the simulation took.
    pub wall_seconds: f64,
}

/// Formats the reports as a Markdown table.
pub fn table(reports: &[PolicyReport]) -> String {
    let mut text = String::from(
        "| policy | TTFT p50 | p90 | p99 | ITL p50 | p90 | p99 | hit rate | encoding saved | \
         tensors reused | balance | work | requests/s | completed | wall s |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let percent = |fraction: f64| format!("{:.1} %", 100.0 * fraction);
    let percent_or_dash = |fraction: Option<f64>| fraction.map_or_else(|| "–".to_owned(), percent);
    for report in reports {
        let PolicyReport { policy, ttft_ms: ttft, itl_ms: itl, .. } = report;
        // Writing to a string can't fail.
        let _ = writeln!(
            text,
            "| {policy} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} | {} | {:.2} \
             | {} | {:.1} | {} | {:.1} |",
            ttft.p50,
            ttft.p90,
            ttft.p99,
            itl.p50,
            itl.p90,
            itl.p99,
            percent(report.hit_rate),
            percent_or_dash(report.encoder_saved),
            percent_or_dash(report.tensors_reused),
            report.balance,
            percent(report.work),
            report.requests_per_second,
            report.completed,
            report.wall_seconds,
        );
    }
    text
}
