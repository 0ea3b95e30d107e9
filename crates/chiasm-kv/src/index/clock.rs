//! When a block was last used, for shedding.

use std::sync::atomic::{AtomicU32, Ordering};

/// Counts lookups and batches of events. Stands still without a cap: notes make readers write to memory that others read.
pub(super) struct Clock {
    now: AtomicU32,
    runs: bool,
}

impl Clock {
    pub(super) fn new(runs: bool) -> Self {
        Self { now: AtomicU32::new(0), runs }
    }

    pub(super) fn tick(&self) {
        if self.runs {
            self.now.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn note(&self, used: &AtomicU32) {
        if self.runs {
            used.store(self.now.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Wraps around after 2^32 ticks: a block that was not used for so long looks younger and lives on for a while.
    pub(super) fn age(&self, used: &AtomicU32) -> u32 {
        self.now.load(Ordering::Relaxed).wrapping_sub(used.load(Ordering::Relaxed))
    }
}
