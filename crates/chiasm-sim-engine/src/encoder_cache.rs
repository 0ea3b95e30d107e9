//! The outputs of the vision encoder, kept by item identifier.

use std::collections::HashMap;

/// What an item's lookup found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoded {
    /// Its embeddings are there.
    Before,
    /// They had to be computed now.
    Now,
    /// The identifier stands for an item with another number of embeddings. vLLM fails such a request.
    Mismatch,
}

/// Least-recently-used cache with room for a number of embeddings.
///
/// Simpler than vLLM's `EncoderCacheManager`: an item that does not fit is computed every time instead of
/// holding its request back.
#[derive(Debug)]
pub(crate) struct EncoderCache {
    capacity: usize,
    used: usize,
    clock: u64,
    /// Identifier → embeddings, last use.
    entries: HashMap<String, (usize, u64)>,
}

impl EncoderCache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, used: 0, clock: 0, entries: HashMap::new() }
    }

    /// Looks an item up and keeps it, evicting others if need be.
    pub(crate) fn encode(&mut self, identifier: &str, embeddings: usize) -> Encoded {
        self.clock += 1;
        if let Some((known, used)) = self.entries.get_mut(identifier) {
            if *known != embeddings {
                return Encoded::Mismatch;
            }
            *used = self.clock;
            return Encoded::Before;
        }
        if embeddings <= self.capacity {
            while self.used + embeddings > self.capacity {
                self.evict_oldest();
            }
            self.used += embeddings;
            self.entries.insert(identifier.to_owned(), (embeddings, self.clock));
        }
        Encoded::Now
    }

    fn evict_oldest(&mut self) {
        let oldest = self.entries.iter().min_by_key(|(_, (_, used))| *used).map(|(identifier, _)| identifier.clone());
        if let Some((embeddings, _)) = oldest.and_then(|identifier| self.entries.remove(&identifier)) {
            self.used -= embeddings;
        }
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.used = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_encoded_once() {
        let mut cache = EncoderCache::new(100);
        assert_eq!(cache.encode("a", 80), Encoded::Now);
        assert_eq!(cache.encode("a", 80), Encoded::Before);
        cache.clear();
        assert_eq!(cache.encode("a", 80), Encoded::Now);
    }

    #[test]
    fn the_least_recently_used_one_makes_room() {
        let mut cache = EncoderCache::new(100);
        for identifier in ["a", "b", "a", "c"] {
            cache.encode(identifier, 40);
        }
        assert_eq!(cache.encode("a", 40), Encoded::Before);
        assert_eq!(cache.encode("b", 40), Encoded::Now);
    }

    #[test]
    fn an_identifier_keeps_its_size() {
        let mut cache = EncoderCache::new(100);
        cache.encode("a", 80);
        assert_eq!(cache.encode("a", 72), Encoded::Mismatch);
    }

    #[test]
    fn what_never_fits_is_computed_each_time() {
        let mut cache = EncoderCache::new(100);
        assert_eq!(cache.encode("huge", 101), Encoded::Now);
        assert_eq!(cache.encode("huge", 101), Encoded::Now);
    }
}
