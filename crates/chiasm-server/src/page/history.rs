//! The last quarter of an hour, in memory only.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_pipeline::{LatencyCounts, PipelineMetrics, PromptTokens};
use serde::Serialize;

/// The length of a step in seconds.
pub(super) const STEP_SECONDS: u64 = 5;
/// The number of steps that are kept.
const MAX_STEPS: usize = 15 * 60 / STEP_SECONDS as usize;

/// The counts of one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Step {
    /// The step's end, in seconds since the epoch.
    at: u64,
    /// Requests that got their first token, per second.
    requests: f64,
    /// New tokens per second.
    tokens: f64,
    /// The time from arrival to first token in seconds: 50th, 90th and 99th percentile of requests.
    ttft: Option<[f64; 3]>,
    /// The time between two tokens in seconds: 50th, 90th and 99th percentile of tokens.
    itl: Option<[f64; 3]>,
    /// The part of prompt tokens that engines found in their caches, 0 to 1.
    hit_rate: Option<f64>,
    /// Failed requests, by cause.
    errors: BTreeMap<&'static str, u64>,
}

/// The counters at the end of a step.
struct CountersSnapshot {
    ttft: LatencyCounts,
    itl: LatencyCounts,
    tokens: PromptTokens,
}

impl CountersSnapshot {
    fn new(metrics: &PipelineMetrics, tokens: PromptTokens) -> Self {
        Self {
            ttft: metrics.time_to_first_token.counts(),
            itl: metrics.inter_token_latency.counts(),
            tokens,
        }
    }
}

/// The kept steps, oldest first, and the state of the current one.
#[derive(Default)]
pub(super) struct History {
    steps: VecDeque<Step>,
    step_start: Option<CountersSnapshot>,
    errors: BTreeMap<&'static str, u64>,
}

impl History {
    /// Counts a failed request.
    pub(super) fn count_failure(&mut self, cause: &'static str) {
        *self.errors.entry(cause).or_default() += 1;
    }

    /// Begins the first step.
    pub(super) fn begin(&mut self, metrics: &PipelineMetrics, tokens: PromptTokens) {
        self.step_start = Some(CountersSnapshot::new(metrics, tokens));
    }

    /// Ends a step that lasted `duration`. `tokens` counts the tokens of all prompts so far.
    pub(super) fn end_step(
        &mut self,
        metrics: &PipelineMetrics,
        tokens: PromptTokens,
        duration: Duration,
    ) -> &Step {
        let now = CountersSnapshot::new(metrics, tokens);
        let start = self.step_start.as_ref().unwrap_or(&now);
        let ttft = now.ttft.since(&start.ttft);
        let itl = now.itl.since(&start.itl);
        let tokens = now.tokens.since(start.tokens);
        let seconds = duration.as_secs_f64().max(0.001);
        let step = Step {
            at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            requests: ttft.total() as f64 / seconds,
            // First tokens, and the tokens after them.
            tokens: (ttft.total() + itl.total()) as f64 / seconds,
            ttft: quantiles(&ttft),
            itl: quantiles(&itl),
            hit_rate: tokens.hit_rate(),
            errors: std::mem::take(&mut self.errors),
        };
        self.step_start = Some(now);
        if self.steps.len() == MAX_STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
        &self.steps[self.steps.len() - 1]
    }

    /// Returns the kept steps, oldest first.
    pub(super) fn steps(&self) -> &VecDeque<Step> {
        &self.steps
    }
}

fn quantiles(counts: &LatencyCounts) -> Option<[f64; 3]> {
    let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|part| counts.quantile(part));
    Some([p50?, p90?, p99?].map(|time| time.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_counts_only_its_own_requests() {
        let metrics = PipelineMetrics::default();
        let mut history = History::default();
        metrics.time_to_first_token.observe(Duration::from_secs(9));
        let duration = Duration::from_secs(2);
        history.begin(&metrics, PromptTokens { prompt: 100, cached: 50 });
        let first =
            history.end_step(&metrics, PromptTokens { prompt: 100, cached: 50 }, duration).clone();
        assert_eq!(
            (first.requests, first.ttft, first.hit_rate),
            (0.0, None, None),
            "requests before the step do not count"
        );
        for _ in 0..4 {
            metrics.time_to_first_token.observe(Duration::from_millis(20));
            metrics.observe_gap(Duration::from_millis(2), 1);
        }
        history.count_failure("busy");
        history.count_failure("busy");
        let second =
            history.end_step(&metrics, PromptTokens { prompt: 300, cached: 200 }, duration).clone();
        assert_eq!((second.requests, second.tokens, second.hit_rate), (2.0, 4.0, Some(0.75)));
        let [p50, _, p99] = second.ttft.unwrap();
        assert!(p50 > 0.016 && p99 <= 0.02, "{second:?}");
        assert_eq!(second.errors, BTreeMap::from([("busy", 2)]));
        assert_eq!(
            history.end_step(&metrics, PromptTokens { prompt: 300, cached: 200 }, duration).errors,
            BTreeMap::new()
        );
    }

    #[test]
    fn old_steps_are_dropped() {
        let metrics = PipelineMetrics::default();
        let mut history = History::default();
        for _ in 0..MAX_STEPS + 7 {
            history.end_step(&metrics, PromptTokens::default(), Duration::from_secs(STEP_SECONDS));
        }
        assert_eq!(history.steps().len(), MAX_STEPS);
    }
}
