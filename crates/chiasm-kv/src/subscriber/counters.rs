//! What a subscriber counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts since the [`SubscriberCounters`] were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubscriberStats {
    /// Connections made to the engine's PUB socket.
    pub connections: u64,
    /// Batches handed over, and read, as they were published.
    pub live_batches: u64,
    /// Batches handed over, and read, from a replay.
    pub replayed_batches: u64,
    /// Times a number was skipped.
    pub gaps: u64,
    /// Replays asked for, audits included.
    pub replays: u64,
    /// Replays that did not come to their end.
    pub failed_replays: u64,
    /// Resets of the receiver.
    pub resets: u64,
    /// Messages that were published and never taken in: no replay had them, or they could not be
    /// read.
    pub lost: u64,
    /// Messages that could not be read.
    pub malformed: u64,
    /// Panics of the receiver or of the subscriber itself, after each of which it starts over.
    pub panics: u64,
}

/// What [`Subscriber`](super::Subscriber)s have counted. Clones are the same counters.
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
    /// Adds one to the counter that `which` picks.
    pub(super) fn count(&self, which: impl FnOnce(&Atomics) -> &AtomicU64) {
        self.add(1, which);
    }

    pub(super) fn add(&self, more: u64, which: impl FnOnce(&Atomics) -> &AtomicU64) {
        which(&self.0).fetch_add(more, Relaxed);
    }

    /// What has happened so far.
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
