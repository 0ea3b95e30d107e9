//! The outputs of the vision encoder, kept by item.

use std::borrow::Borrow;
use std::hash::Hash;

use crate::weighted_lru::WeightedLru;

/// What an item's lookup found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// Its embeddings are there.
    Before,
    /// They had to be computed now.
    Now,
    /// The key stands for an item with another number of embeddings. vLLM fails such a request.
    Mismatch,
}

/// A least-recently-used cache that tells which items' embeddings an engine holds. Its capacity is
/// a number of embeddings.
///
/// Simpler than vLLM's `EncoderCacheManager`: an item that does not fit is computed every time
/// instead of holding its request back, and items of running requests are not kept from leaving.
#[derive(Debug)]
pub struct EncoderCache<K: Eq + Hash>(WeightedLru<K, u64>);

impl<K: Eq + Hash> EncoderCache<K> {
    /// An empty cache for `capacity` embeddings.
    pub fn new(capacity: u64) -> Self {
        Self(WeightedLru::new(capacity))
    }

    /// Looks an item up and keeps it, evicting others if need be.
    pub fn encode<Q>(&mut self, item: &Q, embeddings: u64) -> Encoded
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = K> + ?Sized,
    {
        match self.0.get(item) {
            Some(known) if *known == embeddings => Encoded::Before,
            Some(_) => Encoded::Mismatch,
            None => {
                self.0.insert(item.to_owned(), embeddings, embeddings);
                Encoded::Now
            }
        }
    }

    /// Forgets everything.
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
    fn an_image_is_encoded_once() {
        let mut cache = cache();
        assert_eq!(cache.encode("a", 80), Encoded::Now);
        assert_eq!(cache.encode("a", 80), Encoded::Before);
        cache.clear();
        assert_eq!(cache.encode("a", 80), Encoded::Now);
    }

    #[test]
    fn the_least_recently_used_one_makes_room() {
        let mut cache = cache();
        for identifier in ["a", "b", "a", "c"] {
            cache.encode(identifier, 40);
        }
        assert_eq!(cache.encode("a", 40), Encoded::Before);
        assert_eq!(cache.encode("b", 40), Encoded::Now);
    }

    #[test]
    fn an_identifier_keeps_its_size() {
        let mut cache = cache();
        cache.encode("a", 80);
        assert_eq!(cache.encode("a", 72), Encoded::Mismatch);
    }

    #[test]
    fn what_never_fits_is_computed_each_time() {
        let mut cache = cache();
        assert_eq!(cache.encode("huge", 101), Encoded::Now);
        assert_eq!(cache.encode("huge", 101), Encoded::Now);
    }
}
