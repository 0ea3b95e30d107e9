//! A tap on one worker's KV events: snapshots and updates for frontends on other machines.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::Bytes;
use chiasm_kv::Snapshot;
use chiasm_router::Router;
use chiasm_types::WorkerId;
use tokio::sync::broadcast::{self, error::RecvError};

/// The maximum number of updates that a subscriber may lag behind: some seconds of an engine's
/// batches. A slower subscriber needs a new snapshot.
const MAX_LAG: usize = 1024;

/// Broadcasts the updates of one worker's KV cache to all subscribers.
pub(crate) struct Tap {
    /// Created for the first subscriber, because it allocates room for [`MAX_LAG`] updates.
    updates: OnceLock<broadcast::Sender<Published>>,
    history_known: AtomicBool,
    caught_up: AtomicBool,
}

/// An update as it is broadcast.
#[derive(Clone)]
struct Published {
    /// The revision of the index that contains the update.
    revision: u64,
    history_known: bool,
    update: KvUpdate,
}

impl Default for Tap {
    fn default() -> Self {
        Self {
            updates: OnceLock::new(),
            history_known: AtomicBool::new(true),
            caught_up: AtomicBool::new(false),
        }
    }
}

/// An update of what is known about a KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvUpdate {
    /// A batch of events, as the engine published it.
    Batch(Bytes),
    /// All earlier updates are void.
    Reset,
    /// `true` if no events are missing that can still be replayed.
    CaughtUp(bool),
}

impl KvUpdate {
    pub(crate) fn batch(payload: &[u8]) -> Self {
        Self::Batch(Bytes::copy_from_slice(payload))
    }
}

impl Tap {
    /// Resets the state for another engine.
    pub(crate) fn reset(&self) {
        self.history_known.store(true, Relaxed);
        self.caught_up.store(false, Relaxed);
    }

    /// Returns `true` if events have covered everything that the engine holds.
    pub(crate) fn history_known(&self) -> bool {
        self.history_known.load(Relaxed)
    }

    pub(crate) fn set_history_known(&self, known: bool) {
        self.history_known.store(known, Relaxed);
    }

    pub(crate) fn set_caught_up(&self, caught_up: bool) {
        self.caught_up.store(caught_up, Relaxed);
        if let Some(updates) = self.updates.get() {
            // The revision is later than that of any snapshot, so every subscriber gets the update.
            // Sending fails if there are no subscribers.
            let _ = updates.send(Published {
                revision: u64::MAX,
                history_known: self.history_known.load(Relaxed),
                update: KvUpdate::CaughtUp(caught_up),
            });
        }
    }

    /// Broadcasts an update that was just applied to the index, if there are subscribers.
    ///
    /// The caller must have made no other change to the worker's index since.
    pub(crate) fn publish(&self, router: &Router, id: WorkerId, update: impl FnOnce() -> KvUpdate) {
        let updates = self.updates.get().filter(|updates| updates.receiver_count() > 0);
        if let Some(updates) = updates
            && let Some(revision) = router.revision(id)
        {
            let history_known = self.history_known.load(Relaxed);
            let _ = updates.send(Published { revision, history_known, update: update() });
        }
    }

    /// Subscribes to the worker's updates. Returns `None` if the router does not have the worker.
    pub(crate) fn subscribe(&self, router: &Router, id: WorkerId) -> Option<KvSubscription> {
        // Before the snapshot: an update during the snapshot is then either in it or comes after
        // it.
        let updates = self.updates.get_or_init(|| broadcast::channel(MAX_LAG).0).subscribe();
        let history_known = self.history_known.load(Relaxed);
        let caught_up = self.caught_up.load(Relaxed);
        let Snapshot { revision, bytes } = router.snapshot(id)?;
        Some(KvSubscription { snapshot: bytes, history_known, caught_up, revision, updates })
    }
}

/// A snapshot of a worker's KV cache, and a stream of the updates that follow it.
pub struct KvSubscription {
    /// The blocks that the worker holds, in the format of [`chiasm_kv::Snapshot`].
    pub snapshot: Vec<u8>,
    /// `true` if events have covered everything that the worker holds.
    pub history_known: bool,
    /// `true` if no events are missing that can still be replayed.
    pub caught_up: bool,
    revision: u64,
    updates: broadcast::Receiver<Published>,
}

impl KvSubscription {
    /// Waits for the next update. Returns it with `true` if events have covered everything that the
    /// worker holds after it.
    ///
    /// Returns `None` if updates were lost because this subscriber was too slow; it then needs a
    /// new subscription. Cancel-safe.
    pub async fn next(&mut self) -> Option<(KvUpdate, bool)> {
        loop {
            match self.updates.recv().await {
                // The snapshot contains the update already.
                Ok(published) if published.revision <= self.revision => {}
                Ok(published) => return Some((published.update, published.history_known)),
                Err(RecvError::Lagged(_) | RecvError::Closed) => return None,
            }
        }
    }
}
