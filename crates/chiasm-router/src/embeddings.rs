//! The stores of embeddings that the workers of a machine have encoded and share.
//!
//! Workers report what they store, but not what a store evicts. A store evicts its least recently
//! used items, so the same is done here once more was stored than there is room for.

use std::collections::HashMap;

use chiasm_types::MmHash;
use lru::LruCache;

use crate::worker_handle::WorkerHandle;

/// The maximum number of items per store, a bound on memory: an item counts as at least one
/// 65,536th of its store, however small it is.
const MAX_ITEMS_PER_STORE: u64 = 1 << 16;

/// The stores of all machines.
#[derive(Default)]
pub(crate) struct EmbeddingStores {
    by_machine: HashMap<u64, Store>,
}

struct Store {
    /// The number of workers that use the store.
    workers: usize,
    capacity: u64,
    used: u64,
    /// The stored items with their sizes. All sizes are in bytes.
    items: LruCache<MmHash, u64>,
    /// The items that are being encoded.
    encoding: HashMap<MmHash, PendingEncode>,
}

struct PendingEncode {
    worker: WorkerHandle,
    /// The number of requests that wait for the item.
    requests: usize,
}

impl EmbeddingStores {
    /// Adds a worker that uses its machine's store of `capacity` bytes; 0 if it uses none.
    pub(crate) fn add_worker(&mut self, machine: u64, capacity: u64) {
        if capacity == 0 {
            return;
        }
        let store = self.by_machine.entry(machine).or_insert_with(|| Store {
            workers: 0,
            capacity: 0,
            used: 0,
            items: LruCache::unbounded(),
            encoding: HashMap::new(),
        });
        store.workers += 1;
        store.capacity = store.capacity.max(capacity);
    }

    /// Removes a worker that was added with these arguments. The store goes with its last worker,
    /// as the process that started the workers owns it.
    pub(crate) fn remove_worker(&mut self, machine: u64, capacity: u64) {
        let store = self.by_machine.get_mut(&machine);
        let Some(store) = store.filter(|_| capacity > 0) else { return };
        store.workers -= 1;
        if store.workers == 0 {
            self.by_machine.remove(&machine);
        }
    }

    /// Returns `true` if no worker uses a store.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_machine.is_empty()
    }

    /// Returns `true` if the embeddings of an item are stored.
    pub(crate) fn contains(&self, machine: u64, item: MmHash) -> bool {
        self.by_machine.get(&machine).is_some_and(|store| store.items.contains(&item))
    }

    /// Marks an item as used and returns `true` if its embeddings are stored.
    pub(crate) fn touch(&mut self, machine: u64, item: MmHash) -> bool {
        self.by_machine.get_mut(&machine).is_some_and(|store| store.items.get(&item).is_some())
    }

    /// Returns the worker that is encoding an item.
    pub(crate) fn encoding_worker(&self, machine: u64, item: MmHash) -> Option<WorkerHandle> {
        Some(self.by_machine.get(&machine)?.encoding.get(&item)?.worker)
    }

    /// Records that one more request waits for a worker to encode an item.
    pub(crate) fn begin_encoding(&mut self, machine: u64, item: MmHash, worker: WorkerHandle) {
        let Some(store) = self.by_machine.get_mut(&machine) else { return };
        let pending = store.encoding.entry(item).or_insert(PendingEncode { worker, requests: 0 });
        if pending.worker != worker {
            // The previous worker is gone or could not be used.
            *pending = PendingEncode { worker, requests: 0 };
        }
        pending.requests += 1;
    }

    /// Records that a request no longer waits for a worker to encode an item.
    pub(crate) fn end_encoding(&mut self, machine: u64, item: MmHash, worker: WorkerHandle) {
        let Some(store) = self.by_machine.get_mut(&machine) else { return };
        let pending = store.encoding.get_mut(&item);
        let Some(pending) = pending.filter(|pending| pending.worker == worker) else { return };
        pending.requests -= 1;
        if pending.requests == 0 {
            store.encoding.remove(&item);
        }
    }

    /// Removes an item whose embeddings were not found in the store.
    pub(crate) fn forget(&mut self, machine: u64, item: MmHash) {
        let Some(store) = self.by_machine.get_mut(&machine) else { return };
        store.used -= store.items.pop(&item).unwrap_or(0);
    }

    /// Adds an item whose embeddings were stored, evicting the least recently used items if needed.
    pub(crate) fn insert(&mut self, machine: u64, item: MmHash, bytes: u64) {
        let Some(store) = self.by_machine.get_mut(&machine) else { return };
        let size = bytes.max(store.capacity / MAX_ITEMS_PER_STORE);
        store.used += size;
        store.used -= store.items.put(item, size).unwrap_or(0);
        while store.used > store.capacity {
            let Some((_, evicted)) = store.items.pop_lru() else { break };
            store.used -= evicted;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerHandle = WorkerHandle { index: 0, generation: 1 };
    const OTHER: WorkerHandle = WorkerHandle { index: 1, generation: 2 };

    fn item(number: u8) -> MmHash {
        MmHash::new([number; 32])
    }

    #[test]
    fn least_recently_used_item_is_evicted() {
        let mut stores = EmbeddingStores::default();
        stores.add_worker(0, 1000);
        for number in 0..3 {
            stores.insert(0, item(number), 300);
        }
        assert!(stores.touch(0, item(0)));
        stores.insert(0, item(3), 300);
        let contains = |number| stores.contains(0, item(number));
        assert_eq!([0, 1, 2, 3].map(contains), [true, false, true, true]);
        assert!(!stores.contains(1, item(0)), "another machine");
        stores.forget(0, item(0));
        stores.forget(0, item(1));
        stores.insert(0, item(4), 400);
        let contains = |number| stores.contains(0, item(number));
        assert_eq!([0, 2, 3, 4].map(contains), [false, true, true, true]);
    }

    #[test]
    fn repeated_item_counts_once_with_a_minimum_size() {
        let mut stores = EmbeddingStores::default();
        stores.add_worker(0, 10 * MAX_ITEMS_PER_STORE);
        for _ in 0..3 {
            stores.insert(0, item(1), 6 * MAX_ITEMS_PER_STORE);
        }
        assert!(stores.contains(0, item(1)));
        stores.insert(0, item(2), 20 * MAX_ITEMS_PER_STORE);
        assert!(!stores.contains(0, item(2)), "it is larger than the store");
        stores.insert(0, item(3), 0);
        assert_eq!(stores.by_machine[&0].used, 10);
    }

    #[test]
    fn pending_encode_is_shared_by_all_waiting_requests() {
        let mut stores = EmbeddingStores::default();
        stores.add_worker(0, 1000);
        stores.begin_encoding(0, item(1), WORKER);
        stores.begin_encoding(0, item(1), WORKER);
        stores.end_encoding(0, item(1), WORKER);
        assert_eq!(stores.encoding_worker(0, item(1)), Some(WORKER));
        stores.begin_encoding(0, item(1), OTHER);
        stores.end_encoding(0, item(1), WORKER);
        assert_eq!(stores.encoding_worker(0, item(1)), Some(OTHER), "the first worker is gone");
        stores.end_encoding(0, item(1), OTHER);
        assert_eq!(stores.encoding_worker(0, item(1)), None);
    }

    #[test]
    fn store_is_removed_with_its_last_worker() {
        let mut stores = EmbeddingStores::default();
        stores.add_worker(0, 0);
        assert!(stores.is_empty(), "the worker uses no store");
        stores.add_worker(0, 1000);
        stores.add_worker(0, 1000);
        stores.insert(0, item(1), 300);
        stores.remove_worker(0, 1000);
        assert!(stores.contains(0, item(1)));
        stores.remove_worker(0, 1000);
        stores.add_worker(0, 1000);
        assert!(!stores.contains(0, item(1)));
    }
}
