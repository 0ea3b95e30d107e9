//! Work that takes time in proportion to blocks, and who does it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, TryLockError};

use super::cache::Cache;
use super::leaving::Leaving;
use super::worker::Worker;
use super::{Core, PrefixIndex};

/// Work that a call on the index leaves to be done: to give back the blocks of a worker that left
/// or was cleared, or to shed what is above the cap. It has to be run once; until then the memory
/// is not free, and nothing is shed. It takes locks for some microseconds at a time.
pub type Chore = Box<dyn FnOnce() + Send>;

pub(super) type Background = Arc<dyn Fn(Chore) + Send + Sync>;

/// Runs the chore within the call: for indexes that nobody waits for, such as those of simulations
/// and tests.
pub(super) fn do_at_once(chore: Chore) {
    chore();
}

impl PrefixIndex {
    /// Has what no lookup finds any more given back. Without any lock of the index.
    pub(super) fn leave(&self, worker: Option<Arc<Mutex<Worker>>>, caches: Vec<Cache>) {
        if worker.is_none() && caches.is_empty() {
            return;
        }
        let core = self.core.clone();
        core.leaving.fetch_add(1, Ordering::AcqRel);
        (self.background)(Box::new(move || {
            // Batches that it is taking in come first.
            let ended = worker.map(|worker| core.workers.end(&worker));
            for cache in caches.into_iter().chain(ended.into_iter().flatten()) {
                let mut leaving = Leaving::new(cache);
                while leaving.step(&core.prompts) {}
                core.workers.free(leaving.holder());
            }
            core.leaving.fetch_sub(1, Ordering::AcqRel);
            core.shed_if_needed();
        }));
    }

    /// Has blocks shed above the cap, unless that is being done. While others are given back it is
    /// too early to tell: that chore looks at its end.
    pub(super) fn shed_if_needed(&self) {
        let core = &self.core;
        if core.is_above_cap()
            && core.leaving.load(Ordering::Acquire) == 0
            && !matches!(core.shedding.try_lock(), Err(TryLockError::WouldBlock))
        {
            let core: Arc<Core> = core.clone();
            (self.background)(Box::new(move || core.shed_if_needed()));
        }
    }
}
