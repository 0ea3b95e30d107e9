//! The workers, what stands for their caches in the trees, and the lock around each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_types::{BlockSize, WorkerId};
use crossbeam_utils::sync::{ShardedLock, ShardedLockReadGuard};

use super::cache::Cache;
use super::holders::HolderId;
use super::list::List;
use super::source::Source;
use super::worker::Worker;
use crate::KeyScheme;

/// All workers by their ids. A worker's lock is taken before any tree's, and either before that of
/// the members, never after it.
#[derive(Default)]
pub(super) struct Workers {
    /// Many read it, and seldom it changes.
    members: ShardedLock<Members>,
    /// That of the list that the members have now.
    revision: AtomicU64,
    bytes: AtomicUsize,
}

#[derive(Default)]
struct Members {
    /// Each worker is shared with who works on it while the members change.
    by_id: BTreeMap<WorkerId, (HolderId, Arc<Mutex<Worker>>)>,
    /// Ids of removed holders that no tree has any more.
    free: Vec<HolderId>,
    /// What lookups know of them. They keep it, so each change makes another one.
    list: Arc<List>,
}

impl Members {
    fn list(&mut self) -> &mut List {
        Arc::make_mut(&mut self.list)
    }

    fn new_holder(&mut self) -> HolderId {
        let free = self.free.pop();
        self.list().add_holder(free)
    }

    fn take(&mut self, worker: WorkerId) -> Option<Arc<Mutex<Worker>>> {
        self.list().forget_caches(worker);
        self.by_id.remove(&worker).map(|(_, worker)| worker)
    }

    /// Whether these are the caches of the worker that has this id now, not of one before it that
    /// still takes in a batch.
    fn is_listed(&self, worker: WorkerId, caches: &[(Source, Cache)]) -> bool {
        let known = self.by_id.get(&worker).map(|(holder, _)| *holder);
        known.is_some() && known == caches.first().map(|(_, cache)| cache.holder())
    }

    fn update_order(&mut self) {
        let in_order = self.by_id.iter().map(|(id, (holder, _))| (*id, *holder)).collect();
        self.list().set_order(in_order);
    }
}

impl Workers {
    /// A worker that holds nothing and is in no list.
    pub(super) fn make(
        &self,
        worker: WorkerId,
        block_size: BlockSize,
        scheme: KeyScheme,
    ) -> Arc<Mutex<Worker>> {
        Arc::new(Mutex::new(Worker::new(worker, Cache::new(self.new_holder()), block_size, scheme)))
    }

    /// Lists a worker that was made. Returns the one that had its id, which is in no list any more.
    pub(super) fn list_worker(&self, new: &Arc<Mutex<Worker>>) -> Option<Arc<Mutex<Worker>>> {
        let list = |worker: &mut Worker| {
            let (id, caches) = (worker.id(), worker.caches());
            let holder = caches.first()?.1.holder();
            self.change_members(|members| {
                let replaced = members.take(id);
                members.by_id.insert(id, (holder, new.clone()));
                members.update_order();
                members.list().set_caches(id, caches);
                replaced
            })
        };
        self.with(new, list).flatten()
    }

    /// Returns the worker, which is in no list any more.
    pub(super) fn remove(&self, worker: WorkerId) -> Option<Arc<Mutex<Worker>>> {
        self.change_members(|members| {
            let removed = members.take(worker);
            members.update_order();
            removed
        })
    }

    /// The caches of a worker that is in no list any more; see [`Worker::end`].
    pub(super) fn end(&self, worker: &Mutex<Worker>) -> Vec<Cache> {
        self.with(worker, Worker::end).unwrap_or_default()
    }

    /// Gives a worker empty caches with new holders, which lookups take for it from now on. Returns
    /// those that it had.
    pub(super) fn renew_caches(
        &self,
        worker: WorkerId,
        caches: &mut [(Source, Cache)],
    ) -> Vec<Cache> {
        self.change_members(|members| {
            let is_listed = members.is_listed(worker, caches);
            let old =
                caches.iter_mut().map(|(_, cache)| cache.renew(members.new_holder())).collect();
            if is_listed {
                members
                    .by_id
                    .entry(worker)
                    .and_modify(|(holder, _)| *holder = caches[0].1.holder());
                members.update_order();
                members.list().set_caches(worker, caches);
            }
            old
        })
    }

    /// The id of one more cache of a worker.
    pub(super) fn new_holder(&self) -> HolderId {
        self.change_members(Members::new_holder)
    }

    /// Gives back the id of a holder that no tree has any more.
    pub(super) fn free(&self, holder: HolderId) {
        self.change_members(|members| {
            members.list().set_aside(holder, false);
            members.free.push(holder);
        });
    }

    /// Makes lookups take these for the caches of a worker from now on.
    pub(super) fn list_caches(&self, worker: WorkerId, caches: &[(Source, Cache)]) {
        self.change_members(|members| {
            if members.is_listed(worker, caches) {
                members.list().set_caches(worker, caches);
            }
        });
    }

    /// Changes a worker. `None` when it is unknown.
    pub(super) fn change<T>(
        &self,
        worker: WorkerId,
        change: impl FnOnce(&mut Worker) -> T,
    ) -> Option<T> {
        let found = self.members().by_id.get(&worker).map(|(_, blocks)| blocks.clone())?;
        self.with(&found, change)
    }

    /// All workers in the order of their ids, from the `first`th on and around.
    pub(super) fn all(&self, first: usize) -> Vec<Arc<Mutex<Worker>>> {
        let mut all: Vec<_> =
            self.members().by_id.values().map(|(_, worker)| worker.clone()).collect();
        if !all.is_empty() {
            let first = first % all.len();
            all.rotate_left(first);
        }
        all
    }

    /// The list of now: the one that is `known` if that is it still, which takes no lock.
    ///
    /// For who has a tree locked: what the list says stays true of that tree until it is given
    /// back. Blocks of a new holder come into trees after the list has got it, and those of an old
    /// one leave them after the list has lost it.
    pub(super) fn list<'a>(&self, known: &'a mut Arc<List>) -> &'a List {
        if known.revision() != self.revision.load(Ordering::Acquire) {
            known.clone_from(&self.members().list);
        }
        known
    }

    /// Bytes on the heap of the caches of listed workers.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Changes a worker, listed or not, and counts what its memory grows by. `None` when it has
    /// ended.
    pub(super) fn with<T>(
        &self,
        worker: &Mutex<Worker>,
        change: impl FnOnce(&mut Worker) -> T,
    ) -> Option<T> {
        let mut worker: MutexGuard<'_, Worker> =
            worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.gone() {
            return None;
        }
        let before = worker.bytes();
        let result = change(&mut worker);
        let grown = worker.bytes().wrapping_sub(before);
        // Not for nothing: all threads that apply events write here.
        if grown != 0 {
            // Wraps around for a decrease, as the sum does.
            self.bytes.fetch_add(grown, Ordering::Relaxed);
        }
        Some(result)
    }

    // Nothing that is done with the members locked panics, but by a fault of ours.

    fn members(&self) -> ShardedLockReadGuard<'_, Members> {
        self.members.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_members<T>(&self, change: impl FnOnce(&mut Members) -> T) -> T {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut members);
        self.revision.store(members.list().revise(), Ordering::Release);
        result
    }
}
