//! How long ago a node was last used, for shedding.

use std::sync::atomic::{AtomicU32, Ordering};

/// Counts lookups and batches of events: a node that was last used at a lower count is shed
/// earlier. Without a cap it stands still, as notes make readers write to memory that others read.
pub(super) struct UseCounter {
    now: AtomicU32,
    counts: bool,
}

impl UseCounter {
    pub(super) fn new(counts: bool) -> Self {
        Self { now: AtomicU32::new(0), counts }
    }

    pub(super) fn tick(&self) {
        if self.counts {
            self.now.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes the count down as that of a node's last use.
    pub(super) fn note(&self, used: &AtomicU32) {
        if self.counts {
            used.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Lookups and batches since a node's last use. Wraps around after 2^32 of them: a node that
    /// was not used for so long looks younger and lives on for a while.
    pub(super) fn age(&self, used: &AtomicU32) -> u32 {
        self.now.load(Ordering::Relaxed).wrapping_sub(used.load(Ordering::Relaxed))
    }
}
