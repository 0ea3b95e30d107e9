//! A cache of the vision encoder's outputs, by item.

use std::borrow::Borrow;
use std::hash::Hash;

use crate::weighted_lru::WeightedLru;

/// The outcome of looking up an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderLookup {
    /// The embeddings were cached.
    Hit,
    /// The embeddings were not cached and have to be computed.
    Miss,
    /// The key belongs to an item with another number of embeddings. vLLM fails such a request.
    Mismatch,
}

/// A least-recently-used cache of the items whose embeddings an engine holds. Its capacity is a
/// number of embeddings.
///
/// Simpler than vLLM's `EncoderCacheManager`: an item that does not fit is computed every time
/// instead of delaying its request, and items of running requests may be evicted.
#[derive(Debug)]
pub struct EncoderCache<K: Eq + Hash>(WeightedLru<K, u64>);

impl<K: Eq + Hash> EncoderCache<K> {
    /// Creates an empty cache for `capacity` embeddings.
    pub fn new(capacity: u64) -> Self {
        Self(WeightedLru::new(capacity))
    }

    /// Looks up an item and inserts it if it is missing, evicting others if needed.
    pub fn encode<Q>(&mut self, item: &Q, embeddings: u64) -> EncoderLookup
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        match self.0.get(item) {
            Some(known) if *known == embeddings => EncoderLookup::Hit,
            Some(_) => EncoderLookup::Mismatch,
            None => {
                self.0.insert(item.to_owned(), embeddings, embeddings);
                EncoderLookup::Miss
            }
        }
    }

    /// Removes all items.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> EncoderCache<String> {
        EncoderCache::new(100)
    }

    #[test]
    fn image_is_encoded_once() {
        let mut cache = cache();
        assert_eq!(cache.encode("a", 80), EncoderLookup::Miss);
        assert_eq!(cache.encode("a", 80), EncoderLookup::Hit);
        cache.clear();
        assert_eq!(cache.encode("a", 80), EncoderLookup::Miss);
    }

    #[test]
    fn least_recently_used_item_is_evicted() {
        let mut cache = cache();
        for identifier in ["a", "b", "a", "c"] {
            cache.encode(identifier, 40);
        }
        assert_eq!(cache.encode("a", 40), EncoderLookup::Hit);
        assert_eq!(cache.encode("b", 40), EncoderLookup::Miss);
    }

    #[test]
    fn other_size_of_a_known_item_is_a_mismatch() {
        let mut cache = cache();
        cache.encode("a", 80);
        assert_eq!(cache.encode("a", 72), EncoderLookup::Mismatch);
    }

    #[test]
    fn oversized_item_is_computed_each_time() {
        let mut cache = cache();
        assert_eq!(cache.encode("huge", 101), EncoderLookup::Miss);
        assert_eq!(cache.encode("huge", 101), EncoderLookup::Miss);
    }
}
