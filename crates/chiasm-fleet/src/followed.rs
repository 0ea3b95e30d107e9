//! The KV-event counters of one worker, and its tap.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_kv::{SubscriberCounters, SubscriberStats};

use crate::tap::Tap;

/// The KV-event counters of one worker over all its backends, and its tap. Clones share both.
#[derive(Clone, Default)]
pub(crate) struct WorkerKvEvents {
    pub(crate) subscriber: SubscriberCounters,
    applied: Arc<AppliedCounters>,
    pub(crate) tap: Arc<Tap>,
}

#[derive(Default)]
struct AppliedCounters {
    events: AtomicU64,
    /// The age of the last batch when it was applied, in microseconds.
    lag_us: AtomicU64,
}

/// Counts of one worker's KV events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvEventCounts {
    /// Events applied to the index.
    pub applied: u64,
    /// The subscriber's counts.
    pub subscriber: SubscriberStats,
    /// The age of the last batch when it was applied. Engine and frontend may have different
    /// clocks.
    pub lag: Duration,
}

impl WorkerKvEvents {
    pub(crate) fn counts(&self) -> KvEventCounts {
        KvEventCounts {
            applied: self.applied.events.load(Relaxed),
            subscriber: self.subscriber.read(),
            lag: Duration::from_micros(self.applied.lag_us.load(Relaxed)),
        }
    }

    pub(crate) fn tap(&self) -> Arc<Tap> {
        self.tap.clone()
    }

    /// Counts an applied batch of `events` events. `timestamp` is the engine's time of the batch,
    /// in seconds since the epoch.
    pub(crate) fn record_applied(&self, events: usize, timestamp: f64) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // The engine's timestamp may be invalid, and its clock may be ahead.
        let published = Duration::try_from_secs_f64(timestamp).unwrap_or_default();
        let lag_us = u64::try_from(now.saturating_sub(published).as_micros()).unwrap_or(u64::MAX);
        self.applied.events.fetch_add(events as u64, Relaxed);
        self.applied.lag_us.store(lag_us, Relaxed);
    }
}
