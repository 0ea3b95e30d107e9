//! The time of a node's last use, by which blocks are shed.

use std::sync::atomic::{AtomicU32, Ordering};

/// A clock that counts lookups and batches of events. Nodes with an older last use are shed first.
///
/// Without a cap the clock is disabled, because recording uses makes readers write to shared
/// memory.
pub(super) struct UseCounter {
    now: AtomicU32,
    is_enabled: bool,
}

impl UseCounter {
    pub(super) fn new(is_enabled: bool) -> Self {
        Self { now: AtomicU32::new(0), is_enabled }
    }

    /// Counts a lookup or a batch.
    pub(super) fn tick(&self) {
        if self.is_enabled {
            self.now.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records a use of a node in its `used`.
    pub(super) fn record(&self, used: &AtomicU32) {
        if self.is_enabled {
            used.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Returns the number of lookups and batches since a node's last use. Wraps around after 2^32,
    /// so a node that was unused for so long looks recent and is kept for a while.
    pub(super) fn age(&self, used: &AtomicU32) -> u32 {
        self.now.load(Ordering::Relaxed).wrapping_sub(used.load(Ordering::Relaxed))
    }
}
