//! An LRU cache whose entries have weights, with a limited total weight.

use std::borrow::Borrow;
use std::hash::Hash;

use lru::LruCache;

/// A least-recently-used cache with a limited total weight, for items that an engine keeps: tensors
/// weighed in bytes, or embeddings counted.
#[derive(Debug)]
pub struct WeightedLru<K: Eq + Hash, V> {
    capacity: u64,
    used: u64,
    entries: LruCache<K, (u64, V)>,
}

impl<K: Eq + Hash, V> WeightedLru<K, V> {
    /// Creates an empty cache. The total weight of its entries never exceeds `capacity`.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, used: 0, entries: LruCache::unbounded() }
    }

    /// Returns the value of a key and marks it as used.
    pub fn get<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.entries.get(key).map(|(_, value)| value)
    }

    /// Inserts a value as the most recently used one, replacing the key's previous value and
    /// evicting the least recently used entries until it fits.
    ///
    /// A value that is heavier than the capacity is not inserted; it only removes the key's
    /// previous value.
    pub fn insert(&mut self, key: K, weight: u64, value: V) {
        self.remove(&key);
        if weight > self.capacity {
            return;
        }
        while self.used + weight > self.capacity {
            let Some((_, (evicted, _))) = self.entries.pop_lru() else { break };
            self.used -= evicted;
        }
        self.used += weight;
        self.entries.put(key, (weight, value));
    }

    fn remove(&mut self, key: &K) {
        if let Some((weight, _)) = self.entries.pop(key) {
            self.used -= weight;
        }
    }

    /// Returns keys, weights and values, most recently used first.
    pub fn iter(&self) -> impl Iterator<Item = (&K, u64, &V)> {
        self.entries.iter().map(|(key, (weight, value))| (key, *weight, value))
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.used = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn least_recently_used_entry_is_evicted() {
        let mut cache = WeightedLru::new(100);
        cache.insert(1, 40, 'a');
        cache.insert(2, 40, 'b');
        assert_eq!(cache.get(&1), Some(&'a'));
        cache.insert(3, 60, 'c');
        assert_eq!([1, 2, 3].map(|key| cache.get(&key).copied()), [Some('a'), None, Some('c')]);
    }

    #[test]
    fn too_heavy_value_only_removes_its_predecessor() {
        let mut cache = WeightedLru::new(100);
        cache.insert(1, 50, 'a');
        cache.insert(2, 50, 'b');
        cache.insert(3, 101, 'c');
        assert_eq!([1, 2, 3].map(|key| cache.get(&key).copied()), [Some('a'), Some('b'), None]);
        cache.insert(2, 101, 'd');
        assert_eq!([1, 2, 3].map(|key| cache.get(&key).copied()), [Some('a'), None, None]);
    }

    proptest! {
        /// Compares the cache with a list, oldest entry first.
        #[test]
        fn cache_behaves_like_a_list(
            operations in prop::collection::vec((0u8..8, prop::option::of(0u64..60)), 0..80),
        ) {
            let mut cache = WeightedLru::new(100);
            let mut list: Vec<(u8, u64)> = Vec::new();
            for (key, weight) in operations {
                let at = list.iter().position(|(known, _)| *known == key);
                let known = at.map(|at| list.remove(at));
                match weight {
                    None => {
                        prop_assert_eq!(cache.get(&key).copied(), known.map(|(key, _)| key));
                        list.extend(known);
                    }
                    Some(weight) => {
                        cache.insert(key, weight, key);
                        while list.iter().map(|(_, weight)| weight).sum::<u64>() + weight > 100 {
                            list.remove(0);
                        }
                        list.push((key, weight));
                    }
                }
                let contents: Vec<(u8, u64)> =
                    cache.iter().map(|(key, weight, _)| (*key, weight)).collect();
                prop_assert_eq!(contents, list.iter().rev().copied().collect::<Vec<_>>());
                prop_assert_eq!(cache.used, list.iter().map(|(_, weight)| weight).sum::<u64>());
            }
        }
    }
}
