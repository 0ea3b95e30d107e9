//! The last quarter of an hour, without a database.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_pipeline::{LatencyCounts, PipelineMetrics, PromptTokens};
use serde::Serialize;

/// Seconds of a step.
pub(super) const STEP: u64 = 5;
/// Steps that are kept.
const STEPS: usize = 15 * 60 / STEP as usize;

/// What happened in one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Step {
    /// Its end, in seconds since the epoch.
    at: u64,
    /// Requests that got their first tokens, a second.
    requests: f64,
    /// New tokens a second.
    tokens: f64,
    /// From arrival to first token: 50, 90 and 99 % of requests, in seconds.
    ttft: Option<[f64; 3]>,
    /// Between two tokens: 50, 90 and 99 % of tokens, in seconds.
    itl: Option<[f64; 3]>,
    /// The part of prompt tokens that engines found in their caches.
    hit_rate: Option<f64>,
    /// Requests that failed, by cause.
    errors: BTreeMap<&'static str, u64>,
}

/// The counts at the end of a step.
struct Before {
    ttft: LatencyCounts,
    itl: LatencyCounts,
    tokens: PromptTokens,
}

impl Before {
    fn now(metrics: &PipelineMetrics, tokens: PromptTokens) -> Self {
        Self {
            ttft: metrics.time_to_first_token.counts(),
            itl: metrics.inter_token_latency.counts(),
            tokens,
        }
    }
}

/// Steps, the oldest first.
#[derive(Default)]
pub(super) struct History {
    steps: VecDeque<Step>,
    before: Option<Before>,
    errors: BTreeMap<&'static str, u64>,
}

impl History {
    /// A request failed.
    pub(super) fn failed(&mut self, cause: &'static str) {
        *self.errors.entry(cause).or_default() += 1;
    }

    /// Begins the first step.
    pub(super) fn begin(&mut self, metrics: &PipelineMetrics, tokens: PromptTokens) {
        self.before = Some(Before::now(metrics, tokens));
    }

    /// Ends a step, which took so long. `tokens` are those of all prompts so far.
    pub(super) fn end_step(
        &mut self,
        metrics: &PipelineMetrics,
        tokens: PromptTokens,
        took: Duration,
    ) -> &Step {
        let now = Before::now(metrics, tokens);
        let before = self.before.as_ref().unwrap_or(&now);
        let (ttft, itl) = (now.ttft.since(&before.ttft), now.itl.since(&before.itl));
        let tokens = now.tokens.since(before.tokens);
        let seconds = took.as_secs_f64().max(0.001);
        let step = Step {
            at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            requests: ttft.total() as f64 / seconds,
            // The first ones, and those after them.
            tokens: (ttft.total() + itl.total()) as f64 / seconds,
            ttft: quantiles(&ttft),
            itl: quantiles(&itl),
            hit_rate: tokens.hit_rate(),
            errors: std::mem::take(&mut self.errors),
        };
        self.before = Some(now);
        if self.steps.len() == STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
        &self.steps[self.steps.len() - 1]
    }

    /// All steps that are kept.
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
    fn a_step_tells_what_came_since_the_one_before() {
        let (metrics, mut history) = (PipelineMetrics::default(), History::default());
        metrics.time_to_first_token.observe(Duration::from_secs(9));
        let took = Duration::from_secs(2);
        history.begin(&metrics, PromptTokens { prompt: 100, cached: 50 });
        let first =
            history.end_step(&metrics, PromptTokens { prompt: 100, cached: 50 }, took).clone();
        assert_eq!(
            (first.requests, first.ttft, first.hit_rate),
            (0.0, None, None),
            "what was before it is not its own"
        );
        for _ in 0..4 {
            metrics.time_to_first_token.observe(Duration::from_millis(20));
            metrics.between_tokens(Duration::from_millis(2), 1);
        }
        history.failed("busy");
        history.failed("busy");
        let second =
            history.end_step(&metrics, PromptTokens { prompt: 300, cached: 200 }, took).clone();
        assert_eq!((second.requests, second.tokens, second.hit_rate), (2.0, 4.0, Some(0.75)));
        let [p50, _, p99] = second.ttft.unwrap();
        assert!(p50 > 0.016 && p99 <= 0.02, "{second:?}");
        assert_eq!(second.errors, BTreeMap::from([("busy", 2)]));
        assert_eq!(
            history.end_step(&metrics, PromptTokens { prompt: 300, cached: 200 }, took).errors,
            BTreeMap::new()
        );
    }

    #[test]
    fn a_quarter_of_an_hour_is_kept() {
        let (metrics, mut history) = (PipelineMetrics::default(), History::default());
        for _ in 0..STEPS + 7 {
            history.end_step(&metrics, PromptTokens::default(), Duration::from_secs(STEP));
        }
        assert_eq!(history.steps().len(), STEPS);
    }
}
