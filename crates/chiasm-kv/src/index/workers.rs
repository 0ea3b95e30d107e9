//! The workers, what stands for their caches in the trees, and the lock around each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chiasm_types::{BlockSize, WorkerId};
use crossbeam_utils::sync::{ShardedLock, ShardedLockReadGuard};

use super::cache::Cache;
use super::holders::{HolderId, bit, word};
use super::hybrid::Hybrid;
use super::source::Source;
use super::worker::Worker;
use crate::KeyScheme;

/// All workers by their ids. A worker's lock is taken before any tree's and before that of the list, never after it.
#[derive(Default)]
pub(super) struct Workers {
    /// Many read it, and seldom it changes.
    list: ShardedLock<List>,
    bytes: AtomicUsize,
}

/// What lookups and events have to know of all workers at a time.
#[derive(Default)]
pub(super) struct List {
    /// Each worker is shared with who works on it while the list changes.
    by_id: BTreeMap<WorkerId, (HolderId, Arc<Mutex<Worker>>)>,
    /// The ids and first holders of `by_id`, for a quick pass.
    in_order: Vec<(WorkerId, HolderId)>,
    /// The worker that each holder stands for; none for further caches of a worker.
    ids: Vec<Option<WorkerId>>,
    /// Workers of which more is to be asked than how many leading blocks one cache has.
    hybrid: BTreeMap<WorkerId, Hybrid>,
    /// Bits of holders that don't stand for groups that need all leading blocks.
    aside: Vec<u64>,
    /// Ids of removed holders that no tree has any more.
    free: Vec<HolderId>,
    holders: usize,
}

impl List {
    /// One more than the highest id of a holder.
    pub(super) fn holders(&self) -> usize {
        self.holders
    }

    pub(super) fn in_order(&self) -> &[(WorkerId, HolderId)] {
        &self.in_order
    }

    /// The worker that each holder stands for; none for further caches of a worker.
    pub(super) fn ids(&self) -> &[Option<WorkerId>] {
        &self.ids
    }

    pub(super) fn hybrid(&self) -> impl ExactSizeIterator<Item = &Hybrid> {
        self.hybrid.values()
    }

    pub(super) fn aside(&self) -> &[u64] {
        &self.aside
    }

    fn new_holder(&mut self) -> HolderId {
        let holder = self.free.pop().unwrap_or(self.holders as HolderId);
        self.holders = self.holders.max(holder as usize + 1);
        // Blocks may be held before the worker is listed.
        self.ids.resize(self.holders, None);
        holder
    }

    fn set_aside(&mut self, holder: HolderId, aside: bool) {
        if aside && self.aside.len() <= word(holder) {
            self.aside.resize(word(holder) + 1, 0);
        }
        if let Some(word) = self.aside.get_mut(word(holder)) {
            *word = *word & !bit(holder) | if aside { bit(holder) } else { 0 };
        }
    }

    fn take(&mut self, worker: WorkerId) -> Option<Arc<Mutex<Worker>>> {
        self.hybrid.remove(&worker);
        self.by_id.remove(&worker).map(|(_, worker)| worker)
    }

    /// Whether these are the caches of the worker that has this id now, not of one before it that still takes in a batch.
    fn is_listed(&self, worker: WorkerId, caches: &[(Source, Cache)]) -> bool {
        let known = self.by_id.get(&worker).map(|(holder, _)| *holder);
        known.is_some() && known == caches.first().map(|(_, cache)| cache.holder())
    }

    fn list_caches(&mut self, worker: WorkerId, caches: &[(Source, Cache)]) {
        for (source, cache) in caches {
            self.set_aside(cache.holder(), !source.is_chain());
        }
        match Hybrid::of(caches) {
            Some(hybrid) => drop(self.hybrid.insert(worker, hybrid)),
            None => drop(self.hybrid.remove(&worker)),
        }
    }

    fn update_order(&mut self) {
        self.in_order = self.by_id.iter().map(|(id, (holder, _))| (*id, *holder)).collect();
        self.ids = vec![None; self.holders];
        self.in_order.iter().for_each(|(id, holder)| self.ids[*holder as usize] = Some(*id));
    }
}

impl Workers {
    /// A worker that holds nothing and is in no list.
    pub(super) fn make(&self, worker: WorkerId, block_size: BlockSize, scheme: KeyScheme) -> Arc<Mutex<Worker>> {
        Arc::new(Mutex::new(Worker::new(worker, Cache::new(self.new_holder()), block_size, scheme)))
    }

    /// Lists a worker that was made. Returns the one that had its id, which is in no list any more.
    pub(super) fn list_worker(&self, new: &Arc<Mutex<Worker>>) -> Option<Arc<Mutex<Worker>>> {
        let list = |worker: &mut Worker| {
            let (id, caches) = (worker.id(), worker.caches());
            let holder = caches.first()?.1.holder();
            self.change_list(|list| {
                let replaced = list.take(id);
                list.by_id.insert(id, (holder, new.clone()));
                list.update_order();
                list.list_caches(id, caches);
                replaced
            })
        };
        self.with(new, list).flatten()
    }

    /// Returns the worker, which is in no list any more.
    pub(super) fn remove(&self, worker: WorkerId) -> Option<Arc<Mutex<Worker>>> {
        self.change_list(|list| {
            let removed = list.take(worker);
            list.update_order();
            removed
        })
    }

    /// The caches of a worker that is in no list any more; see [`Worker::end`].
    pub(super) fn end(&self, worker: &Mutex<Worker>) -> Vec<Cache> {
        self.with(worker, Worker::end).unwrap_or_default()
    }

    /// Gives a worker empty caches with new holders, which lookups take for it from now on. Returns those that it had.
    pub(super) fn renew_caches(&self, worker: WorkerId, caches: &mut [(Source, Cache)]) -> Vec<Cache> {
        self.change_list(|list| {
            let is_listed = list.is_listed(worker, caches);
            let old = caches.iter_mut().map(|(_, cache)| cache.renew(list.new_holder())).collect();
            if is_listed {
                list.by_id.entry(worker).and_modify(|(holder, _)| *holder = caches[0].1.holder());
                list.update_order();
                list.list_caches(worker, caches);
            }
            old
        })
    }

    /// The id of one more cache of a worker.
    pub(super) fn new_holder(&self) -> HolderId {
        self.change_list(List::new_holder)
    }

    /// Gives back the id of a holder that no tree has any more.
    pub(super) fn free(&self, holder: HolderId) {
        self.change_list(|list| {
            list.set_aside(holder, false);
            list.free.push(holder);
        });
    }

    /// Makes lookups take these for the caches of a worker from now on.
    pub(super) fn list_caches(&self, worker: WorkerId, caches: &[(Source, Cache)]) {
        self.change_list(|list| {
            if list.is_listed(worker, caches) {
                list.list_caches(worker, caches);
            }
        });
    }

    /// Changes a worker. `None` when it is unknown.
    pub(super) fn change<T>(&self, worker: WorkerId, change: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let found = self.list().by_id.get(&worker).map(|(_, blocks)| blocks.clone())?;
        self.with(&found, change)
    }

    /// All workers in the order of their ids, from the `first`th on and around.
    pub(super) fn all(&self, first: usize) -> Vec<Arc<Mutex<Worker>>> {
        let mut all: Vec<_> = self.list().by_id.values().map(|(_, worker)| worker.clone()).collect();
        if !all.is_empty() {
            let first = first % all.len();
            all.rotate_left(first);
        }
        all
    }

    /// Shows the list. No worker's holder changes its meaning meanwhile.
    pub(super) fn read<T>(&self, read: impl FnOnce(&List) -> T) -> T {
        read(&self.list())
    }

    /// Bytes on the heap of the caches of listed workers.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Changes a worker, listed or not, and counts what its memory grows by. `None` when it has ended.
    pub(super) fn with<T>(&self, worker: &Mutex<Worker>, change: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let mut worker: MutexGuard<'_, Worker> = worker.lock().unwrap_or_else(PoisonError::into_inner);
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

    // Nothing that is done with the list locked panics, but by a fault of ours.

    fn list(&self) -> ShardedLockReadGuard<'_, List> {
        self.list.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change_list<T>(&self, change: impl FnOnce(&mut List) -> T) -> T {
        change(&mut self.list.write().unwrap_or_else(PoisonError::into_inner))
    }
}
