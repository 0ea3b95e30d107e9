//! Embeddings of media items that workers of a machine have encoded and leave for each other.
//!
//! What a worker says that it has left is known. That the store has let go of something is not
//! told: it lets go of what was used longest ago, so that is what is forgotten here when more was
//! left than there is room for.

use std::collections::HashMap;

use chiasm_types::MmHash;
use lru::LruCache;

use crate::seat::Seat;

/// An item counts as at least this part of its store, however small it is: a bound on memory,
/// 65,536 items per machine.
const SMALLEST_PART: u64 = 1 << 16;

/// The stores of all machines.
#[derive(Default)]
pub(crate) struct Embeddings {
    stores: HashMap<u64, Store>,
}

struct Store {
    /// Workers that use it.
    workers: usize,
    capacity: u64,
    used: u64,
    /// What is there, with the room that it takes.
    kept: LruCache<MmHash, u64>,
    /// What is on its way.
    encoding: HashMap<MmHash, Encoding>,
}

struct Encoding {
    by: Seat,
    /// Requests that wait for it.
    requests: usize,
}

impl Embeddings {
    /// A worker is there that uses the store of its machine, of so many bytes; 0 if it uses none.
    pub(crate) fn joined(&mut self, machine: u64, capacity: u64) {
        if capacity == 0 {
            return;
        }
        let store = self.stores.entry(machine).or_insert_with(|| Store {
            workers: 0,
            capacity: 0,
            used: 0,
            kept: LruCache::unbounded(),
            encoding: HashMap::new(),
        });
        store.workers += 1;
        store.capacity = store.capacity.max(capacity);
    }

    /// Such a worker is gone. With the last one of its machine all is forgotten: a store goes with
    /// whoever has started its workers.
    pub(crate) fn left(&mut self, machine: u64, capacity: u64) {
        let Some(store) = self.stores.get_mut(&machine).filter(|_| capacity > 0) else { return };
        store.workers -= 1;
        if store.workers == 0 {
            self.stores.remove(&machine);
        }
    }

    /// Whether no worker leaves embeddings for others.
    pub(crate) fn is_empty(&self) -> bool {
        self.stores.is_empty()
    }

    /// Whether the embeddings of an item are there.
    pub(crate) fn has(&self, machine: u64, item: MmHash) -> bool {
        self.stores.get(&machine).is_some_and(|store| store.kept.contains(&item))
    }

    /// A request uses what is there; whether it is.
    pub(crate) fn used(&mut self, machine: u64, item: MmHash) -> bool {
        self.stores.get_mut(&machine).is_some_and(|store| store.kept.get(&item).is_some())
    }

    /// Who encodes an item at the moment.
    pub(crate) fn encoded_by(&self, machine: u64, item: MmHash) -> Option<Seat> {
        Some(self.stores.get(&machine)?.encoding.get(&item)?.by)
    }

    /// A worker is asked to encode an item, by one more request.
    pub(crate) fn begin(&mut self, machine: u64, item: MmHash, by: Seat) {
        let Some(store) = self.stores.get_mut(&machine) else { return };
        let encoding = store.encoding.entry(item).or_insert(Encoding { by, requests: 0 });
        if encoding.by != by {
            // The one before is gone, or was not to be had.
            *encoding = Encoding { by, requests: 0 };
        }
        encoding.requests += 1;
    }

    /// A request waits no longer for an item to be encoded.
    pub(crate) fn end(&mut self, machine: u64, item: MmHash, by: Seat) {
        let Some(store) = self.stores.get_mut(&machine) else { return };
        let Some(encoding) = store.encoding.get_mut(&item).filter(|encoding| encoding.by == by)
        else {
            return;
        };
        encoding.requests -= 1;
        if encoding.requests == 0 {
            store.encoding.remove(&item);
        }
    }

    /// The embeddings of an item were not there where they were taken to be.
    pub(crate) fn forget(&mut self, machine: u64, item: MmHash) {
        let Some(store) = self.stores.get_mut(&machine) else { return };
        store.used -= store.kept.pop(&item).unwrap_or(0);
    }

    /// The embeddings of an item were left and take so many bytes.
    pub(crate) fn kept(&mut self, machine: u64, item: MmHash, bytes: u64) {
        let Some(store) = self.stores.get_mut(&machine) else { return };
        let counts = bytes.max(store.capacity / SMALLEST_PART);
        store.used += counts;
        store.used -= store.kept.put(item, counts).unwrap_or(0);
        while store.used > store.capacity {
            let Some((_, bytes)) = store.kept.pop_lru() else { break };
            store.used -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEAT: Seat = Seat { place: 0, life: 1 };
    const OTHER: Seat = Seat { place: 1, life: 2 };

    fn item(number: u8) -> MmHash {
        MmHash::new([number; 32])
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let mut embeddings = Embeddings::default();
        embeddings.joined(0, 1000);
        for number in 0..3 {
            embeddings.kept(0, item(number), 300);
        }
        assert!(embeddings.used(0, item(0)));
        embeddings.kept(0, item(3), 300);
        let has = |number| embeddings.has(0, item(number));
        assert_eq!([has(0), has(1), has(2), has(3)], [true, false, true, true]);
        assert!(!embeddings.has(1, item(0)), "another machine");
        embeddings.forget(0, item(0));
        embeddings.forget(0, item(1));
        embeddings.kept(0, item(4), 400);
        assert_eq!(
            [0, 2, 3, 4].map(|number| embeddings.has(0, item(number))),
            [false, true, true, true]
        );
    }

    #[test]
    fn what_is_left_twice_counts_once_and_what_is_small_counts_something() {
        let mut embeddings = Embeddings::default();
        embeddings.joined(0, 10 * SMALLEST_PART);
        for _ in 0..3 {
            embeddings.kept(0, item(1), 6 * SMALLEST_PART);
        }
        assert!(embeddings.has(0, item(1)));
        embeddings.kept(0, item(2), 20 * SMALLEST_PART);
        assert!(!embeddings.has(0, item(2)), "it is larger than the store");
        embeddings.kept(0, item(3), 0);
        assert_eq!(embeddings.stores[&0].used, 10);
    }

    #[test]
    fn one_worker_encodes_an_item_for_all_who_wait_for_it() {
        let mut embeddings = Embeddings::default();
        embeddings.joined(0, 1000);
        embeddings.begin(0, item(1), SEAT);
        embeddings.begin(0, item(1), SEAT);
        embeddings.end(0, item(1), SEAT);
        assert_eq!(embeddings.encoded_by(0, item(1)), Some(SEAT));
        embeddings.begin(0, item(1), OTHER);
        embeddings.end(0, item(1), SEAT);
        assert_eq!(embeddings.encoded_by(0, item(1)), Some(OTHER), "the first one is gone");
        embeddings.end(0, item(1), OTHER);
        assert_eq!(embeddings.encoded_by(0, item(1)), None);
    }

    #[test]
    fn a_store_goes_with_its_last_worker() {
        let mut embeddings = Embeddings::default();
        embeddings.joined(0, 0);
        assert!(embeddings.is_empty(), "it uses none");
        embeddings.joined(0, 1000);
        embeddings.joined(0, 1000);
        embeddings.kept(0, item(1), 300);
        embeddings.left(0, 1000);
        assert!(embeddings.has(0, item(1)));
        embeddings.left(0, 1000);
        embeddings.joined(0, 1000);
        assert!(!embeddings.has(0, item(1)));
    }
}
