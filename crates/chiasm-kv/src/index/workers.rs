//! The workers with their locks, and the holder ids of their caches.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_types::{BlockSize, WorkerId};
use crossbeam_utils::sync::{ShardedLock, ShardedLockReadGuard};

use super::cache::Cache;
use super::holders::HolderId;
use super::list::WorkerList;
use super::source::Source;
use super::worker::Worker;
use crate::KeyScheme;

/// The workers by their ids.
///
/// Lock order: a worker before a tree, and both before the members.
#[derive(Default)]
pub(super) struct Workers {
    /// Read often and changed seldom.
    members: ShardedLock<Members>,
    /// The revision of the members' current list.
    revision: AtomicU64,
    /// The number of bytes on the heap of all workers' caches.
    bytes: AtomicUsize,
}

/// The listed workers and the allocation of holder ids.
#[derive(Default)]
struct Members {
    /// The workers with their first holders. Calls on a worker share it, so the members may change
    /// during a call.
    by_id: BTreeMap<WorkerId, (HolderId, Arc<Mutex<Worker>>)>,
    /// The ids of released holders, which no tree contains any more.
    free: Vec<HolderId>,
    /// The list that lookups use. Lookups keep their own reference, so a change makes a new list.
    list: Arc<WorkerList>,
}

impl Members {
    /// Returns the list for a change.
    fn list(&mut self) -> &mut WorkerList {
        Arc::make_mut(&mut self.list)
    }

    fn new_holder(&mut self) -> HolderId {
        let free = self.free.pop();
        self.list().add_holder(free)
    }

    fn remove(&mut self, worker: WorkerId) -> Option<Arc<Mutex<Worker>>> {
        self.list().remove_caches(worker);
        self.by_id.remove(&worker).map(|(_, worker)| worker)
    }

    /// Returns `true` if these caches belong to the worker that currently has this id. They may
    /// belong to a replaced worker to which a batch is still being applied.
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
    /// Creates a worker that holds nothing and is not listed.
    pub(super) fn new_worker(
        &self,
        worker: WorkerId,
        block_size: BlockSize,
        scheme: KeyScheme,
    ) -> Arc<Mutex<Worker>> {
        Arc::new(Mutex::new(Worker::new(worker, Cache::new(self.new_holder()), block_size, scheme)))
    }

    /// Lists a new worker. Returns the worker that it replaces, which is no longer listed.
    pub(super) fn list_worker(&self, new: &Arc<Mutex<Worker>>) -> Option<Arc<Mutex<Worker>>> {
        let list = |worker: &mut Worker| {
            let id = worker.id();
            let caches = worker.caches();
            let holder = caches.first()?.1.holder();
            self.change_members(|members| {
                let replaced = members.remove(id);
                members.by_id.insert(id, (holder, new.clone()));
                members.update_order();
                members.list().set_caches(id, caches);
                replaced
            })
        };
        self.with(new, list).flatten()
    }

    /// Unlists a worker and returns it.
    pub(super) fn remove(&self, worker: WorkerId) -> Option<Arc<Mutex<Worker>>> {
        self.change_members(|members| {
            let removed = members.remove(worker);
            members.update_order();
            removed
        })
    }

    /// Retires an unlisted worker and returns its caches; see [`Worker::retire`].
    pub(super) fn retire(&self, worker: &Mutex<Worker>) -> Vec<Cache> {
        self.with(worker, Worker::retire).unwrap_or_default()
    }

    /// Gives a worker empty caches with new holders, which lookups use from now on. Returns the old
    /// caches.
    pub(super) fn renew_caches(
        &self,
        worker: WorkerId,
        caches: &mut [(Source, Cache)],
    ) -> Vec<Cache> {
        self.change_members(|members| {
            let is_listed = members.is_listed(worker, caches);
            let old =
                caches.iter_mut().map(|(_, cache)| cache.replace(members.new_holder())).collect();
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

    /// Allocates the holder id of another cache.
    pub(super) fn new_holder(&self) -> HolderId {
        self.change_members(Members::new_holder)
    }

    /// Frees the id of a holder that no tree contains any more.
    pub(super) fn free_holder(&self, holder: HolderId) {
        self.change_members(|members| {
            members.list().set_excluded(holder, false);
            members.free.push(holder);
        });
    }

    /// Publishes the caches of a worker to lookups.
    pub(super) fn list_caches(&self, worker: WorkerId, caches: &[(Source, Cache)]) {
        self.change_members(|members| {
            if members.is_listed(worker, caches) {
                members.list().set_caches(worker, caches);
            }
        });
    }

    /// Changes the worker with this id. Returns `None` if it is unknown.
    pub(super) fn change<T>(
        &self,
        worker: WorkerId,
        change: impl FnOnce(&mut Worker) -> T,
    ) -> Option<T> {
        let found = self.members().by_id.get(&worker).map(|(_, worker)| worker.clone())?;
        self.with(&found, change)
    }

    /// Returns all workers in the order of their ids, rotated so that number `first` comes first.
    pub(super) fn all(&self, first: usize) -> Vec<Arc<Mutex<Worker>>> {
        let mut all: Vec<_> =
            self.members().by_id.values().map(|(_, worker)| worker.clone()).collect();
        if !all.is_empty() {
            let first = first % all.len();
            all.rotate_left(first);
        }
        all
    }

    /// Returns the current list. Takes no lock if `known` is still current, and updates `known`
    /// otherwise.
    ///
    /// If the caller has locked a tree, the list stays valid for that tree until it is unlocked.
    /// Blocks of a new holder enter trees after the list contains the holder, and blocks of an old
    /// holder leave trees after the list no longer contains it.
    pub(super) fn list<'a>(&self, known: &'a mut Arc<WorkerList>) -> &'a WorkerList {
        if known.revision() != self.revision.load(Ordering::Acquire) {
            known.clone_from(&self.members().list);
        }
        known
    }

    /// Returns the number of bytes on the heap of the workers' caches.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Locks and changes a worker, listed or not, and counts the growth of its memory. Returns
    /// `None` if it is retired.
    pub(super) fn with<T>(
        &self,
        worker: &Mutex<Worker>,
        change: impl FnOnce(&mut Worker) -> T,
    ) -> Option<T> {
        let mut worker: MutexGuard<'_, Worker> =
            worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.is_retired() {
            return None;
        }
        let before = worker.bytes();
        let result = change(&mut worker);
        let grown = worker.bytes().wrapping_sub(before);
        // Avoids a write to memory that all threads share.
        if grown != 0 {
            // A decrease wraps around, and so does the sum.
            self.bytes.fetch_add(grown, Ordering::Relaxed);
        }
        Some(result)
    }

    // Poisoning is ignored: a panic with the members locked would be a bug.

    fn members(&self) -> ShardedLockReadGuard<'_, Members> {
        self.members.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_members<T>(&self, change: impl FnOnce(&mut Members) -> T) -> T {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut members);
        self.revision.store(members.list().renew_revision(), Ordering::Release);
        result
    }
}
