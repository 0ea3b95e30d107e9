//! Metrics of the work that waits for the pool.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LaneLabel {
    lane: &'static str,
}

/// The pool's metrics, by lane.
#[derive(Clone)]
pub struct CpuMetrics {
    waiting: Family<LaneLabel, Gauge>,
    waited: Family<LaneLabel, Histogram, fn() -> Histogram>,
}

/// The metrics of one lane.
pub(crate) struct LaneMetrics {
    /// The number of jobs that have not begun.
    pub(crate) waiting: Gauge,
    /// The waiting times of jobs that have begun, in seconds.
    pub(crate) waited: Histogram,
}

impl CpuMetrics {
    /// Registers the metrics.
    pub fn register(&self, r: &mut Registry) {
        r.register(
            "cpu_queued_jobs",
            "CPU-heavy work that waits for a thread, by its size",
            self.waiting.clone(),
        );
        r.register_with_unit(
            "cpu_queue",
            "Time that CPU-heavy work waited for a thread, by its size",
            Unit::Seconds,
            self.waited.clone(),
        );
    }

    pub(crate) fn lane(&self, lane: &'static str) -> LaneMetrics {
        let label = LaneLabel { lane };
        LaneMetrics {
            waiting: self.waiting.get_or_create(&label).clone(),
            waited: self.waited.get_or_create(&label).clone(),
        }
    }
}

impl Default for CpuMetrics {
    fn default() -> Self {
        // 20 µs to 84 s
        let waited: fn() -> Histogram = || Histogram::new(exponential_buckets(20e-6, 4.0, 12));
        Self { waiting: Family::default(), waited: Family::new_with_constructor(waited) }
    }
}
