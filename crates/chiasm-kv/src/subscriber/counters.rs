//! The counters of subscribers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The counts since the creation of the [`SubscriberCounters`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubscriberStats {
    /// The number of connections made to the engine's PUB socket.
    pub connections: u64,
    /// The number of batches that were accepted by the receiver as they were published.
    pub live_batches: u64,
    /// The number of batches that were accepted by the receiver from a replay.
    pub replayed_batches: u64,
    /// The number of times that sequence numbers were skipped.
    pub gaps: u64,
    /// The number of requested replays, including audits.
    pub replays: u64,
    /// The number of replays that did not complete.
    pub failed_replays: u64,
    /// The number of resets of the receiver.
    pub resets: u64,
    /// The number of published messages that never reached the receiver: no replay had them, or
    /// they could not be read.
    pub lost: u64,
    /// The number of messages that could not be read.
    pub malformed: u64,
    /// The number of panics of the receiver or the subscriber. After each one the subscriber starts
    /// over.
    pub panics: u64,
}

/// The counters of [`Subscriber`](super::Subscriber)s. Clones share the counters.
#[derive(Clone, Debug, Default)]
pub struct SubscriberCounters(Arc<Atomics>);

#[derive(Debug, Default)]
pub(super) struct Atomics {
    pub(super) connections: AtomicU64,
    pub(super) live_batches: AtomicU64,
    pub(super) replayed_batches: AtomicU64,
    pub(super) gaps: AtomicU64,
    pub(super) replays: AtomicU64,
    pub(super) failed_replays: AtomicU64,
    pub(super) resets: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) panics: AtomicU64,
}

impl SubscriberCounters {
    /// Adds one to the counter that `which` selects.
    pub(super) fn count(&self, which: impl FnOnce(&Atomics) -> &AtomicU64) {
        self.add(1, which);
    }

    /// Adds `more` to the counter that `which` selects.
    pub(super) fn add(&self, more: u64, which: impl FnOnce(&Atomics) -> &AtomicU64) {
        which(&self.0).fetch_add(more, Relaxed);
    }

    /// Returns the current counts.
    pub fn read(&self) -> SubscriberStats {
        let Atomics {
            connections,
            live_batches,
            replayed_batches,
            gaps,
            replays,
            failed_replays,
            resets,
            lost,
            malformed,
            panics,
        } = &*self.0;
        SubscriberStats {
            connections: connections.load(Relaxed),
            live_batches: live_batches.load(Relaxed),
            replayed_batches: replayed_batches.load(Relaxed),
            gaps: gaps.load(Relaxed),
            replays: replays.load(Relaxed),
            failed_replays: failed_replays.load(Relaxed),
            resets: resets.load(Relaxed),
            lost: lost.load(Relaxed),
            malformed: malformed.load(Relaxed),
            panics: panics.load(Relaxed),
        }
    }
}
