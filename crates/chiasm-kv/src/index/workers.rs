//! The workers, their places in sets, and the lock around each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use chiasm_types::{BlockSize, WorkerId};

use super::holders::Place;
use super::worker_blocks::{Shared, WorkerBlocks};

/// A worker's lock is taken before any shard's, and never together with that of the list, but for reading.
#[derive(Default)]
pub(super) struct Workers {
    list: RwLock<List>,
    bytes: AtomicUsize,
}

#[derive(Default)]
pub(super) struct List {
    /// Shared with who works on it while the list changes.
    by_id: BTreeMap<WorkerId, (Place, Arc<Mutex<WorkerBlocks>>)>,
    /// As `by_id`, for a quick pass.
    in_order: Vec<(WorkerId, Place)>,
    /// Places of removed workers that no block's holders name any more.
    free: Vec<Place>,
    places: usize,
}

impl List {
    /// One more than the highest place.
    pub(super) fn places(&self) -> usize {
        self.places
    }

    pub(super) fn in_order(&self) -> impl Iterator<Item = (WorkerId, Place)> {
        self.in_order.iter().copied()
    }

    pub(super) fn place(&self, worker: WorkerId) -> Option<Place> {
        self.by_id.get(&worker).map(|(place, _)| *place)
    }

    fn update_order(&mut self) {
        self.in_order = self.by_id.iter().map(|(id, (place, _))| (*id, *place)).collect();
    }
}

impl Workers {
    pub(super) fn add(&self, worker: WorkerId, block_size: BlockSize, shared: &Shared) {
        if self.change(worker, |blocks| blocks.start_over(block_size, shared)).is_some() {
            return;
        }
        let mut list = self.write();
        let place = list.free.pop().unwrap_or(list.places as Place);
        list.places = list.places.max(place as usize + 1);
        let blocks = Arc::new(Mutex::new(WorkerBlocks::new(place, block_size)));
        list.by_id.insert(worker, (place, blocks));
        list.update_order();
    }

    pub(super) fn remove(&self, worker: WorkerId, shared: &Shared) {
        let removed = {
            let mut list = self.write();
            let removed = list.by_id.remove(&worker);
            list.update_order();
            removed
        };
        let Some((place, blocks)) = removed else { return };
        // Takes a while: not under the lock of the list, that lookups need.
        self.with(&blocks, |blocks| blocks.end(shared));
        self.write().free.push(place);
    }

    /// `None` when it is unknown.
    pub(super) fn change<T>(&self, worker: WorkerId, change: impl FnOnce(&mut WorkerBlocks) -> T) -> Option<T> {
        let blocks = self.list().by_id.get(&worker).map(|(_, blocks)| blocks.clone())?;
        self.with(&blocks, change)
    }

    /// Every worker, one after the other, from the `first`th on and around, until `change` says false.
    pub(super) fn each(&self, first: usize, mut change: impl FnMut(&mut WorkerBlocks) -> bool) {
        let mut all: Vec<_> = self.list().by_id.values().map(|(_, blocks)| blocks.clone()).collect();
        if !all.is_empty() {
            let first = first % all.len();
            all.rotate_left(first);
        }
        for blocks in all {
            if self.with(&blocks, &mut change) == Some(false) {
                return;
            }
        }
    }

    /// No worker's place changes its meaning meanwhile.
    pub(super) fn read<T>(&self, read: impl FnOnce(&List) -> T) -> T {
        read(&self.list())
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    fn with<T>(&self, blocks: &Mutex<WorkerBlocks>, change: impl FnOnce(&mut WorkerBlocks) -> T) -> Option<T> {
        let mut blocks: MutexGuard<'_, WorkerBlocks> = blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if blocks.gone() {
            return None;
        }
        let before = blocks.bytes();
        let result = change(&mut blocks);
        // Wraps around for a decrease, as the sum does.
        self.bytes.fetch_add(blocks.bytes().wrapping_sub(before), Ordering::Relaxed);
        Some(result)
    }

    fn list(&self) -> RwLockReadGuard<'_, List> {
        self.list.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, List> {
        self.list.write().unwrap_or_else(PoisonError::into_inner)
    }
}
