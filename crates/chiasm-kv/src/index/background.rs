//! Chores: work that takes time in proportion to the number of blocks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, TryLockError};

use super::cache::Cache;
use super::release::CacheRelease;
use super::worker::Worker;
use super::{Core, PrefixIndex};

/// Work that a call on the index leaves for later: releasing the blocks of a removed or cleared
/// worker, or shedding blocks above the cap.
///
/// Every chore must be run. Until then its memory is not free, and nothing is shed. A chore takes
/// locks for some microseconds at a time.
pub type Chore = Box<dyn FnOnce() + Send>;

pub(super) type Background = Arc<dyn Fn(Chore) + Send + Sync>;

/// Runs the chore within the call, for indexes without latency requirements such as those of
/// simulations and tests.
pub(super) fn run_immediately(chore: Chore) {
    chore();
}

impl PrefixIndex {
    /// Hands out the chore that releases the blocks of a removed worker and of cleared caches,
    /// which lookups already exclude. The caller must hold no lock of the index.
    pub(super) fn release_in_background(
        &self,
        worker: Option<Arc<Mutex<Worker>>>,
        caches: Vec<Cache>,
    ) {
        if worker.is_none() && caches.is_empty() {
            return;
        }
        let core = self.core.clone();
        core.pending_releases.fetch_add(1, Ordering::AcqRel);
        (self.background)(Box::new(move || {
            // Waits for a batch that is still being applied to the worker.
            let retired = worker.map(|worker| core.workers.retire(&worker));
            for cache in caches.into_iter().chain(retired.into_iter().flatten()) {
                let mut release = CacheRelease::new(cache);
                while release.step(&core.prompts) {}
                core.workers.free_holder(release.holder());
            }
            core.pending_releases.fetch_sub(1, Ordering::AcqRel);
            core.shed_if_needed();
        }));
    }

    /// Hands out a chore that sheds blocks above the cap, unless a thread is already shedding.
    ///
    /// While blocks are being released, the final size is unknown. Then the releasing chore checks
    /// the cap when it ends.
    pub(super) fn shed_if_needed(&self) {
        let core = &self.core;
        if core.is_above_cap()
            && core.pending_releases.load(Ordering::Acquire) == 0
            && !matches!(core.shedding.try_lock(), Err(TryLockError::WouldBlock))
        {
            let core: Arc<Core> = core.clone();
            (self.background)(Box::new(move || core.shed_if_needed()));
        }
    }
}
