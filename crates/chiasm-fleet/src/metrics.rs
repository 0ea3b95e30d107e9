//! The fleet's metrics, for Prometheus.
//!
//! Most are gauges, which are set from the fleet's state at each scrape.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use chiasm_types::WorkerId;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::KvEventCounts;
use crate::media_metrics::MediaMetrics;

/// The label of a series of one worker.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct WorkerLabel {
    /// The worker's id, such as `3`.
    pub worker: String,
}

impl From<WorkerId> for WorkerLabel {
    fn from(worker: WorkerId) -> Self {
        Self { worker: worker.to_string() }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct KnowledgeLabels {
    pub(crate) worker: String,
    pub(crate) state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct ConditionLabels {
    pub(crate) worker: String,
    pub(crate) condition: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct BreakerLabels {
    pub(crate) worker: String,
    pub(crate) state: &'static str,
}

/// The metrics of a fleet. [`Fleet::refresh_metrics`](crate::Fleet::refresh_metrics) updates the
/// gauges.
#[derive(Default)]
pub struct FleetMetrics {
    pub(crate) media: std::sync::Arc<MediaMetrics>,
    pub(crate) engine_deaths: Family<WorkerLabel, Counter>,
    pub(crate) distrusted: Family<WorkerLabel, Counter>,
    pub(crate) workers: Gauge,
    pub(crate) unnamed: Gauge,
    pub(crate) worker_blocks: Family<WorkerLabel, Gauge>,
    pub(crate) index_blocks: Gauge,
    pub(crate) index_entries: Gauge,
    pub(crate) index_bytes: Gauge,
    pub(crate) index_shed: Gauge,
    pub(crate) kv_events: KvEvents,
    pub(crate) worker_knowledge: Family<KnowledgeLabels, Gauge>,
    pub(crate) worker_condition: Family<ConditionLabels, Gauge>,
    pub(crate) worker_breaker: Family<BreakerLabels, Gauge>,
    pub(crate) worker_pending: Family<WorkerLabel, Gauge>,
    pub(crate) worker_running: Family<WorkerLabel, Gauge>,
    pub(crate) worker_waiting: Family<WorkerLabel, Gauge>,
    pub(crate) worker_max_running: Family<WorkerLabel, Gauge>,
    pub(crate) worker_total_blocks: Family<WorkerLabel, Gauge>,
    pub(crate) worker_kv_usage: Family<WorkerLabel, Gauge<f64, AtomicU64>>,
    pub(crate) worker_media_threads: Family<WorkerLabel, Gauge>,
    pub(crate) worker_media_pending: Family<WorkerLabel, Gauge<f64, AtomicU64>>,
    pub(crate) arena_reserved: Family<WorkerLabel, Gauge>,
    pub(crate) arena_used: Family<WorkerLabel, Gauge>,
    pub(crate) arena_slots: Family<WorkerLabel, Gauge>,
    pub(crate) arena_leases: Family<WorkerLabel, Gauge>,
}

impl FleetMetrics {
    /// Registers all metrics.
    pub fn register(&self, r: &mut Registry) {
        self.media.register(r);
        r.register(
            "engine_deaths",
            "Engines that died or could not be started, by worker",
            self.engine_deaths.clone(),
        );
        r.register(
            "distrusted_workers",
            "Times that a worker expanded media items differently than expected, by worker; \
             knowledge of its KV cache is approximate from then on",
            self.distrusted.clone(),
        );
        r.register("workers", "Workers that can take requests", self.workers.clone());
        r.register(
            "workers_unnamed",
            "Workers that keep running although no list or discovery names their agent any more",
            self.unnamed.clone(),
        );
        r.register(
            "worker_known_blocks",
            "Blocks that a worker is known to hold",
            self.worker_blocks.clone(),
        );
        r.register(
            "index_blocks",
            "Distinct blocks that any worker is known to hold",
            self.index_blocks.clone(),
        );
        r.register(
            "index_entries",
            "Pairs of a worker and a block that it is known to hold",
            self.index_entries.clone(),
        );
        r.register_with_unit(
            "index",
            "Memory of the prefix index",
            Unit::Bytes,
            self.index_bytes.clone(),
        );
        r.register(
            "index_shed_blocks",
            "Blocks of present workers forgotten to save memory",
            self.index_shed.clone(),
        );
        self.kv_events.register(r);
        r.register(
            "worker_knowledge",
            "1 for the current knowledge of a worker's KV cache",
            self.worker_knowledge.clone(),
        );
        r.register(
            "worker_condition",
            "1 for the current condition of a worker: answers, suspect (silent), \
             or hung (makes no progress)",
            self.worker_condition.clone(),
        );
        r.register(
            "worker_breaker",
            "1 for the current state of a worker's circuit breaker: closed (gets requests), \
             open (gets none because it fails), or half-open (gets one probe)",
            self.worker_breaker.clone(),
        );
        r.register(
            "worker_pending_tokens",
            "Prompt tokens that a worker has to compute \
             before its requests have their first tokens",
            self.worker_pending.clone(),
        );
        r.register(
            "worker_running_requests",
            "Requests that a worker's engine runs",
            self.worker_running.clone(),
        );
        r.register(
            "worker_seats",
            "Maximum number of requests that a worker's engine runs at once",
            self.worker_max_running.clone(),
        );
        r.register(
            "worker_total_blocks",
            "Blocks of a worker's KV cache",
            self.worker_total_blocks.clone(),
        );
        r.register(
            "worker_kv_usage_ratio",
            "Part of a worker's KV cache that running requests use, 0 to 1",
            self.worker_kv_usage.clone(),
        );
        r.register(
            "worker_waiting_requests",
            "Requests that wait in a worker's engine",
            self.worker_waiting.clone(),
        );
        r.register(
            "worker_media_threads",
            "Threads with which the agent of a worker processes media; 0 for workers without one",
            self.worker_media_threads.clone(),
        );
        r.register_with_unit(
            "worker_media_pending",
            "Queued and running work on media at the agent of a worker, \
             as time of one core by estimate",
            Unit::Seconds,
            self.worker_media_pending.clone(),
        );
        r.register_with_unit(
            "arena_reserved",
            "Shared memory that a worker's arena has taken from the system",
            Unit::Bytes,
            self.arena_reserved.clone(),
        );
        r.register_with_unit(
            "arena_used",
            "Shared memory that the tensors of a worker take",
            Unit::Bytes,
            self.arena_used.clone(),
        );
        r.register("arena_slots", "Tensors in a worker's arena", self.arena_slots.clone());
        r.register(
            "arena_leases",
            "Tensors that a worker's engine has not released",
            self.arena_leases.clone(),
        );
    }

    /// Counts a worker's engine that died or could not be started.
    pub(crate) fn engine_died(&self, worker: WorkerId) {
        self.engine_deaths.get_or_create(&worker.into()).inc();
    }

    /// Counts a worker that expanded a prompt differently than this process expected.
    pub(crate) fn distrusted(&self, worker: WorkerId) {
        self.distrusted.get_or_create(&worker.into()).inc();
    }

    /// Removes the counters of a worker that was removed for good. Ids are never reused, so the
    /// number of series would grow without limit.
    pub(crate) fn forget(&self, worker: WorkerId) {
        let label = worker.into();
        self.engine_deaths.remove(&label);
        self.distrusted.remove(&label);
    }

    /// Returns the number of media items handed to engines so far, by kind of transfer.
    pub fn transfers(&self) -> BTreeMap<&'static str, u64> {
        self.media.transfers()
    }

    /// Returns the number of engines of a worker that died or could not be started.
    pub fn engine_deaths(&self, worker: WorkerId) -> u64 {
        self.engine_deaths.get(&worker.into()).map_or(0, |deaths| deaths.get())
    }
}

/// The metrics of KV events, per worker.
#[derive(Default)]
pub(crate) struct KvEvents {
    applied: Family<WorkerLabel, Counter>,
    gaps: Family<WorkerLabel, Counter>,
    replays: Family<WorkerLabel, Counter>,
    failed_replays: Family<WorkerLabel, Counter>,
    dropped: Family<WorkerLabel, Counter>,
    resets: Family<WorkerLabel, Counter>,
    lag: Family<WorkerLabel, Gauge<f64, AtomicU64>>,
}

impl KvEvents {
    fn register(&self, r: &mut Registry) {
        r.register("kv_events_applied", "KV events applied to the index", self.applied.clone());
        r.register(
            "kv_events_gaps",
            "Gaps in the sequence numbers of KV event batches",
            self.gaps.clone(),
        );
        r.register(
            "kv_events_replays",
            "Replays of KV events requested, audits included",
            self.replays.clone(),
        );
        r.register(
            "kv_events_failed_replays",
            "Replays that did not complete",
            self.failed_replays.clone(),
        );
        r.register(
            "kv_events_dropped",
            "KV event batches lost for good or unreadable",
            self.dropped.clone(),
        );
        r.register(
            "kv_events_resets",
            "Times that all blocks of a worker were forgotten",
            self.resets.clone(),
        );
        r.register_with_unit(
            "kv_events_lag",
            "Age of the engine's last batch of KV events when it was applied",
            Unit::Seconds,
            self.lag.clone(),
        );
    }

    pub(crate) fn clear(&self) {
        let Self { applied, gaps, replays, failed_replays, dropped, resets, lag } = self;
        [applied, gaps, replays, failed_replays, dropped, resets]
            .into_iter()
            .for_each(Family::clear);
        lag.clear();
    }

    pub(crate) fn set(&self, label: &WorkerLabel, counts: KvEventCounts) {
        let set = |family: &Family<WorkerLabel, Counter>, count: u64| {
            family.get_or_create(label).inner().store(count, Ordering::Relaxed);
        };
        set(&self.applied, counts.applied);
        set(&self.gaps, counts.subscriber.gaps);
        set(&self.replays, counts.subscriber.replays);
        set(&self.failed_replays, counts.subscriber.failed_replays);
        set(&self.dropped, counts.subscriber.lost);
        set(&self.resets, counts.subscriber.resets);
        self.lag.get_or_create(label).set(counts.lag.as_secs_f64());
    }
}
