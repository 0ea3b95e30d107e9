//! What a run tells.

use std::fmt::Write as _;

use serde::Serialize;

use crate::latency::Latency;
use crate::timeline::Interval;

/// One policy's run. The requests of the warm-up count for nothing but `completed` and `refused`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyReport {
    /// The policy's name.
    pub policy: &'static str,
    /// Frontends, each with a router of that policy.
    pub frontends: usize,
    /// Time from the arrival at a frontend to the first token.
    pub ttft_ms: Latency,
    /// Time from token to token of one request, over all tokens.
    pub itl_ms: Latency,
    /// Part of the prompt tokens that the engines found in their KV caches.
    pub hit_rate: f64,
    /// Part of the images' embeddings that no engine had to encode for the request, neither the one
    /// that computed its prompt nor one that encodes alone: the KV cache had them, an encoder's
    /// cache, or they were left by who encoded them for another request. Less than 0 if most were
    /// encoded more than once. `None` without images.
    pub encoder_saved: Option<f64>,
    /// Part of the images whose tensors the chosen engine had. `None` without images.
    pub tensors_reused: Option<f64>,
    /// Work between the warm-up and the last arrival, of the worker with the most over the mean.
    /// Work is what requests cost: computing and decoding tokens, encoding, attention, not the
    /// overhead of steps and the reading of weights, which go on as long as any request decodes.
    pub balance: f64,
    /// The mean of that work, in seconds per second and worker.
    pub work: f64,
    /// Requests that ended per second, between the warm-up and the last arrival.
    pub requests_per_second: f64,
    /// Part of the requests whose prompts another engine computed than the one that answered.
    /// `None` where no engine has a role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<f64>,
    /// Part of the images that an engine which encodes alone was given, before another one computed
    /// the prompt. `None` where no engine encodes alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoded_elsewhere: Option<f64>,
    /// Requests that ended.
    pub completed: u64,
    /// Requests that no engine could hold.
    pub refused: u64,
    /// Virtual time from the first arrival to the last token.
    pub virtual_seconds: f64,
    /// Virtual time from the first arrival to the end of the warm-up.
    pub warm_up_seconds: f64,
    /// How it went over time, warm-up included. No part of what is serialized.
    #[serde(skip)]
    pub timeline: Vec<Interval>,
    /// Real time that the simulation took.
    pub wall_seconds: f64,
}

/// The reports as lines of a Markdown table.
pub fn table(reports: &[PolicyReport]) -> String {
    let mut text = String::from(
        "| policy | TTFT p50 | p90 | p99 | ITL p50 | p90 | p99 | hit rate | encoding saved | tensors reused | balance | work | requests/s | completed | wall s |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let percent = |part: f64| format!("{:.1} %", 100.0 * part);
    let maybe = |part: Option<f64>| part.map_or_else(|| "–".to_owned(), percent);
    for report in reports {
        let PolicyReport { policy, ttft_ms: ttft, itl_ms: itl, .. } = report;
        // Writing to a string can't fail.
        let _ = writeln!(
            text,
            "| {policy} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} | {} | {:.2} | {} | {:.1} | {} | {:.1} |",
            ttft.p50,
            ttft.p90,
            ttft.p99,
            itl.p50,
            itl.p90,
            itl.p99,
            percent(report.hit_rate),
            maybe(report.encoder_saved),
            maybe(report.tensors_reused),
            report.balance,
            percent(report.work),
            report.requests_per_second,
            report.completed,
            report.wall_seconds,
        );
    }
    text
}
