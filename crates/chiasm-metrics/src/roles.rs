//! Metrics of requests whose stages are computed by several workers.

use std::time::Duration;

use chiasm_fleet::WorkerLabel;
use chiasm_request::PrefillOutcome;
use chiasm_types::WorkerId;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// The metrics of stages that workers compute for other workers.
pub(super) struct RoleMetrics {
    encoded: Family<WorkerLabel, Counter>,
    not_encoded: Counter,
    encode_time: Histogram,
    prefilled: Family<WorkerLabel, Counter>,
    recomputed: Counter,
    prefill_time: Histogram,
}

impl Default for RoleMetrics {
    fn default() -> Self {
        // 1 ms to 2 min
        Self {
            encoded: Family::default(),
            not_encoded: Counter::default(),
            encode_time: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            prefilled: Family::default(),
            recomputed: Counter::default(),
            prefill_time: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
        }
    }
}

impl RoleMetrics {
    pub(super) fn register(&self, r: &mut Registry) {
        r.register(
            "encoded_items",
            "Media items whose embeddings a worker has stored for other workers of its machine, \
             in this request or before; the label worker is the one that encoded",
            self.encoded.clone(),
        );
        r.register(
            "unencoded_items",
            "Media items that a worker failed to encode for other workers; \
             the worker that computed the prompt encoded them",
            self.not_encoded.clone(),
        );
        r.register_with_unit(
            "remote_encode",
            "From the selection of encode workers \
             until a worker had stored its embeddings, for each worker",
            Unit::Seconds,
            self.encode_time.clone(),
        );
        r.register(
            "prefilled_requests",
            "Prompts that a worker has computed for another worker that answers; \
             the label worker is the one that computed",
            self.prefilled.clone(),
        );
        r.register(
            "recomputed_prompts",
            "Prompts of which the answering worker recomputed more than the last block, \
             because it did not get them from the prefill worker",
            self.recomputed.clone(),
        );
        r.register_with_unit(
            "remote_prefill",
            "From the selection of a prefill worker \
             until the prompt was ready for the answering worker",
            Unit::Seconds,
            self.prefill_time.clone(),
        );
    }

    /// Counts an encode stage: of `requested` items, the embeddings of `stored` were stored.
    pub(super) fn count_encoded(
        &self,
        worker: WorkerId,
        requested: usize,
        stored: usize,
        took: Duration,
    ) {
        self.encoded.get_or_create(&worker.into()).inc_by(stored as u64);
        self.not_encoded.inc_by(requested.saturating_sub(stored) as u64);
        self.encode_time.observe(took.as_secs_f64());
    }

    /// Removes the series of a worker that was removed for good.
    pub(super) fn forget(&self, worker: WorkerId) {
        self.encoded.remove(&worker.into());
        self.prefilled.remove(&worker.into());
    }

    pub(super) fn count_recomputed(&self) {
        self.recomputed.inc();
    }

    pub(super) fn count_prefilled(&self, outcome: &PrefillOutcome) {
        self.prefilled.get_or_create(&outcome.worker.into()).inc();
        self.prefill_time.observe(outcome.duration.as_secs_f64());
    }
}
