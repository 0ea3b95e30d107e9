//! Which requests are served as fast as they should be.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// How fast requests should be served. `None` where it does not matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Objectives {
    /// From a request's arrival to its first token.
    pub first_token: Option<Duration>,
    /// Between two tokens of an answer.
    pub between_tokens: Option<Duration>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ObjectiveLabels {
    objective: &'static str,
    met: &'static str,
}

/// Counts of what met its objective and what did not, for the objectives that there are.
#[derive(Debug, Default)]
pub(super) struct ObjectiveMetrics {
    counts: Family<ObjectiveLabels, Counter>,
    first_token: Option<Objective>,
    between_tokens: Option<Objective>,
}

/// One objective with its counters at hand, as one of them is written for each token.
#[derive(Debug)]
struct Objective {
    most: Duration,
    met: Counter,
    missed: Counter,
}

impl ObjectiveMetrics {
    pub(super) fn register(&self, r: &mut Registry) {
        r.register(
            "objectives",
            "First tokens of requests (ttft) and tokens after the first (itl), by whether they came within --slo-ttft and --slo-itl",
            self.counts.clone(),
        );
    }

    /// The same counts, of these objectives from now on.
    pub(super) fn of(&self, objectives: Objectives) -> Self {
        let objective = |name: &'static str, most: Option<Duration>| {
            let counter =
                |met| self.counts.get_or_create(&ObjectiveLabels { objective: name, met }).clone();
            most.map(|most| Objective { most, met: counter("yes"), missed: counter("no") })
        };
        Self {
            counts: self.counts.clone(),
            first_token: objective("ttft", objectives.first_token),
            between_tokens: objective("itl", objectives.between_tokens),
        }
    }

    pub(super) fn first_token(&self, after: Duration) {
        self.first_token.iter().for_each(|objective| objective.count(after, 1));
    }

    pub(super) fn between_tokens(&self, gap: Duration, tokens: u64) {
        self.between_tokens.iter().for_each(|objective| objective.count(gap, tokens));
    }
}

impl Objective {
    fn count(&self, took: Duration, times: u64) {
        let counter = if took <= self.most { &self.met } else { &self.missed };
        counter.inc_by(times);
    }
}
