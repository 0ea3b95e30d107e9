//! Workers that could reuse a media item without its KV blocks: its tensors in the receiver cache,
//! its embeddings in the encoder cache.
//!
//! This is an estimate from the router's own decisions, and only the choice of a worker depends on
//! it. Both caches evict by last use. An item is taken to be cached while everything inserted since
//! its last use fits beside it. For this, each cache of each worker counts the total size inserted
//! so far, and each item stores the count at its last use.
//!
//! vLLM's encoder cache drops entries in the order in which they were last released
//! (`EncoderCacheManager`), its receiver cache in the order of last use.

use std::collections::HashMap;

use chiasm_types::MmHash;

use crate::worker_handle::WorkerHandle;

/// The maximum number of items per cache, a bound on memory: an item counts as at least one 4,096th
/// of its cache, however small it is.
const MAX_ITEMS_PER_CACHE: u64 = 4096;

/// The minimum number of entries for a sweep.
const MIN_ENTRIES_TO_SWEEP: usize = 4096;

#[derive(Default)]
pub(crate) struct MediaHolders {
    holders: HashMap<MmHash, Vec<Holder>>,
    entries: usize,
    /// The number of entries at which the next sweep is due.
    sweep_at: usize,
}

/// A worker that has used an item.
struct Holder {
    worker: WorkerHandle,
    tensors: Option<InsertedTotal>,
    embeddings: Option<InsertedTotal>,
}

/// The total size inserted into a cache since the worker was added, in the cache's unit.
type InsertedTotal = u64;

/// The estimated state of one cache of one worker, in the cache's unit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheEstimate {
    /// 0 when there is no cache.
    capacity: u64,
    inserted: InsertedTotal,
}

/// The two caches of one worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MediaCaches {
    pub(crate) tensors: CacheEstimate,
    pub(crate) embeddings: CacheEstimate,
}

/// The parts of an item that a worker could reuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReusableMedia {
    pub(crate) tensors: bool,
    pub(crate) embeddings: bool,
}

/// The use of an item by a request on its worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemUse {
    pub(crate) hash: MmHash,
    /// Elements of the item's tensors.
    pub(crate) elements: u64,
    /// Number of the item's embeddings, in tokens; `None` when the encoder is not run because the
    /// item's KV blocks are held.
    pub(crate) embeds: Option<usize>,
}

impl CacheEstimate {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, inserted: 0 }
    }

    /// Returns the size that an item is counted with.
    fn weight(&self, size: u64) -> u64 {
        size.max(self.capacity / MAX_ITEMS_PER_CACHE)
    }

    /// Returns `true` if an item of this size that was last used at `last_use` is still cached.
    fn holds(&self, last_use: Option<InsertedTotal>, size: u64) -> bool {
        self.capacity > 0
            && last_use.is_some_and(|last_use| {
                self.inserted - last_use + self.weight(size) <= self.capacity
            })
    }

    /// Records the use of an item and returns its new last use; `None` if the cache can't hold it.
    fn record_use(&mut self, last_use: Option<InsertedTotal>, size: u64) -> Option<InsertedTotal> {
        if self.capacity == 0 || size > self.capacity {
            return None;
        }
        if !self.holds(last_use, size) {
            self.inserted += self.weight(size);
        }
        Some(self.inserted)
    }
}

impl MediaHolders {
    /// Returns the workers that have used an item, with what each could still reuse.
    pub(crate) fn holders<'a>(
        &'a self,
        hash: MmHash,
        elements: u64,
        embeds: usize,
        caches: impl Fn(WorkerHandle) -> Option<MediaCaches> + 'a,
    ) -> impl Iterator<Item = (WorkerHandle, ReusableMedia)> + 'a {
        self.holders.get(&hash).into_iter().flatten().filter_map(move |holder| {
            let MediaCaches { tensors, embeddings } = caches(holder.worker)?;
            let reusable = ReusableMedia {
                tensors: tensors.holds(holder.tensors, elements),
                embeddings: embeddings.holds(holder.embeddings, embeds as u64),
            };
            Some((holder.worker, reusable))
        })
    }

    /// Records that a request that uses an item was given to a worker.
    pub(crate) fn record_use(
        &mut self,
        worker: WorkerHandle,
        caches: &mut MediaCaches,
        item: ItemUse,
    ) {
        let holders = self.holders.entry(item.hash).or_default();
        let at = holders.iter().position(|holder| holder.worker == worker).unwrap_or_else(|| {
            holders.push(Holder { worker, tensors: None, embeddings: None });
            self.entries += 1;
            holders.len() - 1
        });
        let holder = &mut holders[at];
        holder.tensors = caches.tensors.record_use(holder.tensors, item.elements);
        if let Some(embeds) = item.embeds {
            holder.embeddings = caches.embeddings.record_use(holder.embeddings, embeds as u64);
        }
    }

    /// Removes items that no worker has any more, once the number of entries has doubled since the
    /// last sweep. Takes constant time per recorded use on average.
    pub(crate) fn sweep_if_due(&mut self, caches: impl Fn(WorkerHandle) -> Option<MediaCaches>) {
        if self.entries < self.sweep_at.max(MIN_ENTRIES_TO_SWEEP) {
            return;
        }
        self.entries = 0;
        self.holders.retain(|_, holders| {
            holders.retain(|holder| {
                caches(holder.worker).is_some_and(|MediaCaches { tensors, embeddings }| {
                    // Size 0, because the size is unknown here: keeps all items that may be cached.
                    tensors.holds(holder.tensors, 0) || embeddings.holds(holder.embeddings, 0)
                })
            });
            holders.shrink_to_fit();
            self.entries += holders.len();
            !holders.is_empty()
        });
        self.holders.shrink_to_fit();
        self.sweep_at = 2 * self.entries;
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WORKER: WorkerHandle = WorkerHandle { index: 0, generation: 1 };

    fn caches(elements: u64, tokens: u64) -> MediaCaches {
        MediaCaches {
            tensors: CacheEstimate::new(elements),
            embeddings: CacheEstimate::new(tokens),
        }
    }

    fn hash(number: u8) -> MmHash {
        MmHash::new([number; 32])
    }

    fn reusable(
        holders: &MediaHolders,
        caches: MediaCaches,
        item: u8,
        elements: u64,
        embeds: usize,
    ) -> ReusableMedia {
        holders
            .holders(hash(item), elements, embeds, |_| Some(caches))
            .next()
            .map_or(ReusableMedia::default(), |(_, reusable)| reusable)
    }

    proptest! {
        /// With items of one size, each used once, the estimate equals the LRU cache.
        #[test]
        fn single_uses_match_an_lru_cache(capacity in 1..20_u64, count in 0..40_u8) {
            let mut holders = MediaHolders::default();
            let mut caches = caches(100 * capacity, capacity);
            for item in 0..count {
                let item = ItemUse { hash: hash(item), elements: 100, embeds: Some(1) };
                holders.record_use(WORKER, &mut caches, item);
            }
            for item in 0..count {
                let expected = u64::from(count - item) <= capacity;
                let reusable = reusable(&holders, caches, item, 100, 1);
                let found = (reusable.tensors, reusable.embeddings);
                prop_assert_eq!(found, (expected, expected), "item {}", item);
            }
        }

        /// The item used last is always cached.
        #[test]
        fn last_used_item_is_cached(
            uses in proptest::collection::vec((0..12_u8, any::<bool>()), 1..60),
        ) {
            let mut holders = MediaHolders::default();
            let mut caches = caches(400, 4);
            for (item, encodes) in uses {
                let embeds = encodes.then_some(1);
                let used = ItemUse { hash: hash(item), elements: 100, embeds };
                holders.record_use(WORKER, &mut caches, used);
                let reusable = reusable(&holders, caches, item, 100, 1);
                prop_assert!(reusable.tensors);
                prop_assert!(reusable.embeddings || !encodes);
            }
        }
    }

    #[test]
    fn item_larger_than_the_cache_is_never_cached() {
        let mut holders = MediaHolders::default();
        let mut caches = caches(0, 10);
        let item = ItemUse { hash: hash(1), elements: 5, embeds: Some(11) };
        holders.record_use(WORKER, &mut caches, item);
        assert_eq!(reusable(&holders, caches, 1, 5, 11), ReusableMedia::default());
    }

    #[test]
    fn memory_is_bounded_by_the_cache_capacities() {
        let mut holders = MediaHolders::default();
        let mut caches = caches(1 << 30, 1 << 30);
        for item in 0..50_000_u32 {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&item.to_le_bytes());
            let item = ItemUse { hash: MmHash::new(bytes), elements: 1, embeds: Some(1) };
            holders.record_use(WORKER, &mut caches, item);
            holders.sweep_if_due(|_| Some(caches));
            assert!(holders.len() <= 2 * 4096, "{}", holders.len());
        }
        holders.sweep_at = 0;
        holders.sweep_if_due(|_| None);
        assert_eq!(holders.len(), 0, "the worker is gone");
    }
}
