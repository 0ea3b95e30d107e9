//! Requests whose stages are computed by several workers.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::labels::WorkerLabel;
use crate::pipeline::PrefilledBy;

/// What workers did for others.
pub(super) struct RoleMetrics {
    prefilled: Family<WorkerLabel, Counter>,
    recomputed: Counter,
    time: Histogram,
}

impl Default for RoleMetrics {
    fn default() -> Self {
        // 1 ms to 2 min
        Self {
            prefilled: Family::default(),
            recomputed: Counter::default(),
            time: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
        }
    }
}

impl RoleMetrics {
    pub(super) fn register(&self, r: &mut Registry) {
        r.register(
            "prefilled_requests",
            "Prompts that a worker has computed for another one that answers, by the worker that computed",
            self.prefilled.clone(),
        );
        r.register(
            "recomputed_prompts",
            "Prompts of which the worker that answers computed more than their ends again, as it could not get them from the one that \
             had computed them",
            self.recomputed.clone(),
        );
        r.register_with_unit(
            "remote_prefill",
            "From when a worker was picked for a prompt alone until it had left that for the one that answers",
            Unit::Seconds,
            self.time.clone(),
        );
    }

    pub(super) fn recomputed(&self) {
        self.recomputed.inc();
    }

    pub(super) fn prefilled(&self, by: &PrefilledBy) {
        self.prefilled.get_or_create(&WorkerLabel { worker: by.worker.to_string() }).inc();
        self.time.observe(by.took.as_secs_f64());
    }
}
