//! Service-level objectives, and the counts of tokens that meet them.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// The latency objectives of requests; `None` for no objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Objectives {
    /// The maximum time from a request's arrival to its first token.
    pub first_token: Option<Duration>,
    /// The maximum time between two tokens of an answer.
    pub between_tokens: Option<Duration>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ObjectiveLabels {
    objective: &'static str,
    met: &'static str,
}

/// Counts of tokens that met or missed the configured objectives.
#[derive(Debug, Default)]
pub(super) struct ObjectiveMetrics {
    counts: Family<ObjectiveLabels, Counter>,
    first_token: Option<Objective>,
    between_tokens: Option<Objective>,
}

/// One objective with its counters, which are cached because one is incremented for each token.
#[derive(Debug)]
struct Objective {
    limit: Duration,
    met: Counter,
    missed: Counter,
}

impl ObjectiveMetrics {
    pub(super) fn register(&self, r: &mut Registry) {
        r.register(
            "objectives",
            "First tokens of requests (ttft) and tokens after the first (itl), \
             by whether they met --slo-ttft and --slo-itl",
            self.counts.clone(),
        );
    }

    /// Returns the same counts for these objectives.
    pub(super) fn with_objectives(&self, objectives: Objectives) -> Self {
        let objective = |name: &'static str, limit: Option<Duration>| {
            let counter =
                |met| self.counts.get_or_create(&ObjectiveLabels { objective: name, met }).clone();
            limit.map(|limit| Objective { limit, met: counter("yes"), missed: counter("no") })
        };
        Self {
            counts: self.counts.clone(),
            first_token: objective("ttft", objectives.first_token),
            between_tokens: objective("itl", objectives.between_tokens),
        }
    }

    pub(super) fn count_first_token(&self, after: Duration) {
        if let Some(objective) = &self.first_token {
            objective.count(after, 1);
        }
    }

    pub(super) fn count_gaps(&self, gap: Duration, tokens: u64) {
        if let Some(objective) = &self.between_tokens {
            objective.count(gap, tokens);
        }
    }
}

impl Objective {
    fn count(&self, took: Duration, times: u64) {
        let counter = if took <= self.limit { &self.met } else { &self.missed };
        counter.inc_by(times);
    }
}
