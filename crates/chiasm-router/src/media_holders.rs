//! Which workers could reuse a media item without its KV blocks: its tensors in the receiver cache,
//! its embeddings in the encoder cache.
//!
//! An estimate from the router's own decisions; nothing but the choice of a worker depends on it.
//! Both caches evict by last use, so an item is taken to be there as long as what came into the
//! cache after its last use fits beside it. For that a worker has an odometer per cache: what has
//! come in altogether. An item bears the reading at its last use.
//!
//! vLLM's encoder cache drops entries in the order in which they were last let go
//! (`EncoderCacheManager`), its receiver cache in the order of last use.

use std::collections::HashMap;

use chiasm_types::MmHash;

use crate::seat::Seat;

/// An item counts as at least this part of its cache, however small it is: a bound on memory, 4,096
/// items per worker.
const SMALLEST_PART: u64 = 4096;

/// Items swept at once at the least.
const SWEEP: usize = 4096;

#[derive(Default)]
pub(crate) struct MediaHolders {
    holders: HashMap<MmHash, Vec<Holder>>,
    entries: usize,
    sweep_at: usize,
}

struct Holder {
    seat: Seat,
    tensors: Option<Reading>,
    embeddings: Option<Reading>,
}

/// What came into a cache since the worker was added, in the cache's unit.
type Reading = u64;

/// One cache of one worker, in its unit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Odometer {
    /// 0 when there is no cache.
    capacity: u64,
    driven: Reading,
}

/// The two caches of one worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Odometers {
    pub(crate) tensors: Odometer,
    pub(crate) embeddings: Odometer,
}

/// What a worker has of an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reusable {
    pub(crate) tensors: bool,
    pub(crate) embeddings: bool,
}

/// What a request does with an item on its worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemUse {
    pub(crate) hash: MmHash,
    /// Bytes of its tensors.
    pub(crate) elements: u64,
    /// Number of its embeddings, in tokens; `None` when its KV blocks spare the encoder.
    pub(crate) embeds: Option<usize>,
}

impl Odometer {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, driven: 0 }
    }

    fn counts(&self, size: u64) -> u64 {
        size.max(self.capacity / SMALLEST_PART)
    }

    fn holds(&self, last: Option<Reading>, size: u64) -> bool {
        self.capacity > 0
            && last.is_some_and(|last| self.driven - last + self.counts(size) <= self.capacity)
    }

    /// The reading for an item that is used now.
    fn note(&mut self, last: Option<Reading>, size: u64) -> Option<Reading> {
        if self.capacity == 0 || size > self.capacity {
            return None;
        }
        if !self.holds(last, size) {
            self.driven += self.counts(size);
        }
        Some(self.driven)
    }
}

impl MediaHolders {
    /// The workers that may have something of an item, with what it is.
    pub(crate) fn of<'a>(
        &'a self,
        hash: MmHash,
        elements: u64,
        embeds: usize,
        odometers: impl Fn(Seat) -> Option<Odometers> + 'a,
    ) -> impl Iterator<Item = (Seat, Reusable)> + 'a {
        self.holders.get(&hash).into_iter().flatten().filter_map(move |holder| {
            let Odometers { tensors, embeddings } = odometers(holder.seat)?;
            let reusable = Reusable {
                tensors: tensors.holds(holder.tensors, elements),
                embeddings: embeddings.holds(holder.embeddings, embeds as u64),
            };
            Some((holder.seat, reusable))
        })
    }

    /// A request that uses an item was given to a worker.
    pub(crate) fn note(&mut self, seat: Seat, odometers: &mut Odometers, item: ItemUse) {
        let holders = self.holders.entry(item.hash).or_default();
        let at = holders.iter().position(|holder| holder.seat == seat).unwrap_or_else(|| {
            holders.push(Holder { seat, tensors: None, embeddings: None });
            self.entries += 1;
            holders.len() - 1
        });
        let holder = &mut holders[at];
        holder.tensors = odometers.tensors.note(holder.tensors, item.elements);
        if let Some(embeds) = item.embeds {
            holder.embeddings = odometers.embeddings.note(holder.embeddings, embeds as u64);
        }
    }

    /// Forgets what no worker has any more, when enough has come together to be worth the while: on
    /// average constant time per noted item.
    pub(crate) fn sweep_if_due(&mut self, odometers: impl Fn(Seat) -> Option<Odometers>) {
        if self.entries < self.sweep_at.max(SWEEP) {
            return;
        }
        self.entries = 0;
        self.holders.retain(|_, holders| {
            holders.retain(|holder| {
                odometers(holder.seat).is_some_and(|Odometers { tensors, embeddings }| {
                    // The smallest size: whatever may still be there stays.
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

    const SEAT: Seat = Seat { place: 0, life: 1 };

    fn odometers(elements: u64, tokens: u64) -> Odometers {
        Odometers { tensors: Odometer::new(elements), embeddings: Odometer::new(tokens) }
    }

    fn hash(number: u8) -> MmHash {
        MmHash::new([number; 32])
    }

    fn reusable(
        holders: &MediaHolders,
        of: Odometers,
        item: u8,
        elements: u64,
        embeds: usize,
    ) -> Reusable {
        holders
            .of(hash(item), elements, embeds, |_| Some(of))
            .next()
            .map_or(Reusable::default(), |(_, reusable)| reusable)
    }

    proptest! {
        /// With items of one size, and none used again after others came in, the estimate is the
        /// LRU cache itself.
        #[test]
        fn first_uses_fill_the_cache_in_order(capacity in 1..20_u64, count in 0..40_u8) {
            let (mut holders, mut of) = (MediaHolders::default(), odometers(100 * capacity, capacity));
            for item in 0..count {
                holders.note(SEAT, &mut of, ItemUse { hash: hash(item), elements: 100, embeds: Some(1) });
            }
            for item in 0..count {
                let expected = u64::from(count - item) <= capacity;
                let reusable = reusable(&holders, of, item, 100, 1);
                prop_assert_eq!((reusable.tensors, reusable.embeddings), (expected, expected), "item {}", item);
            }
        }

        /// Whatever is used, what was used last is there, and no more than fits beside it in the
        /// end.
        #[test]
        fn what_was_used_last_is_there(uses in proptest::collection::vec((0..12_u8, any::<bool>()), 1..60)) {
            let (mut holders, mut of) = (MediaHolders::default(), odometers(400, 4));
            for (item, encodes) in uses {
                let embeds = encodes.then_some(1);
                holders.note(SEAT, &mut of, ItemUse { hash: hash(item), elements: 100, embeds });
                let reusable = reusable(&holders, of, item, 100, 1);
                prop_assert!(reusable.tensors);
                prop_assert!(reusable.embeddings || !encodes);
            }
        }
    }

    #[test]
    fn an_item_larger_than_the_cache_is_never_there() {
        let (mut holders, mut of) = (MediaHolders::default(), odometers(0, 10));
        holders.note(SEAT, &mut of, ItemUse { hash: hash(1), elements: 5, embeds: Some(11) });
        assert_eq!(reusable(&holders, of, 1, 5, 11), Reusable::default());
    }

    #[test]
    fn memory_is_bounded_by_what_the_caches_can_hold() {
        let (mut holders, mut of) = (MediaHolders::default(), odometers(1 << 30, 1 << 30));
        for item in 0..50_000_u32 {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&item.to_le_bytes());
            holders.note(
                SEAT,
                &mut of,
                ItemUse { hash: MmHash::new(bytes), elements: 1, embeds: Some(1) },
            );
            holders.sweep_if_due(|_| Some(of));
            assert!(holders.len() <= 2 * 4096, "{}", holders.len());
        }
        holders.sweep_at = 0;
        holders.sweep_if_due(|_| None);
        assert_eq!(holders.len(), 0, "the worker is gone");
    }
}
