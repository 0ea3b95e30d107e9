//! Counts of the KV events of one worker, and its tap.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_kv::{SubscriberCounters, SubscriberStats};

use crate::tap::Tap;

/// The KV-event counts of one worker over all its backends, and its tap. Clones share both.
#[derive(Clone, Default)]
pub(crate) struct Followed {
    pub(crate) subscriber: SubscriberCounters,
    index: Arc<Applied>,
    pub(crate) tap: Arc<Tap>,
}

#[derive(Default)]
struct Applied {
    events: AtomicU64,
    /// How old the last batch was, in microseconds.
    lag: AtomicU64,
}

/// How the KV events of one worker have been followed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvEventCounts {
    /// Events applied to the index.
    pub applied: u64,
    /// What the subscriber counts.
    pub subscriber: SubscriberStats,
    /// The age of the last batch when it was applied, by the clocks of both machines.
    pub lag: Duration,
}

impl Followed {
    pub(crate) fn counts(&self) -> KvEventCounts {
        KvEventCounts {
            applied: self.index.events.load(Relaxed),
            subscriber: self.subscriber.read(),
            lag: Duration::from_micros(self.index.lag.load(Relaxed)),
        }
    }

    pub(crate) fn tap(&self) -> Arc<Tap> {
        self.tap.clone()
    }

    /// Counts a batch of events that was applied, and its age.
    pub(crate) fn applied(&self, events: usize, timestamp: f64) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // An engine may say anything; clocks may differ.
        let made = Duration::try_from_secs_f64(timestamp).unwrap_or_default();
        let lag = u64::try_from(now.saturating_sub(made).as_micros()).unwrap_or(u64::MAX);
        self.index.events.fetch_add(events as u64, Relaxed);
        self.index.lag.store(lag, Relaxed);
    }
}
