//! A cache with room for a total weight, the least recently used leaves first.

use lru::LruCache;

/// What an engine keeps by item: tensors by bytes, or embeddings by number.
#[derive(Debug)]
pub(crate) struct Lru<V> {
    capacity: u64,
    used: u64,
    entries: LruCache<u64, (u64, V)>,
}

impl<V> Lru<V> {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, used: 0, entries: LruCache::unbounded() }
    }

    /// Looks a key up, which is a use of it.
    pub(crate) fn get(&mut self, key: u64) -> Option<&V> {
        self.entries.get(&key).map(|(_, value)| value)
    }

    /// Keeps a key that is not there. One that is heavier than the capacity is not kept.
    pub(crate) fn insert(&mut self, key: u64, weight: u64, value: V) {
        if weight > self.capacity {
            return;
        }
        while self.used + weight > self.capacity {
            let Some((_, (oldest, _))) = self.entries.pop_lru() else { break };
            self.used -= oldest;
        }
        self.used += weight;
        self.entries.put(key, (weight, value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_makes_room() {
        let mut cache = Lru::new(100);
        cache.insert(1, 40, 'a');
        cache.insert(2, 40, 'b');
        assert_eq!(cache.get(1), Some(&'a'));
        cache.insert(3, 60, 'c');
        assert_eq!([cache.get(1).copied(), cache.get(2).copied(), cache.get(3).copied()], [Some('a'), None, Some('c')]);
    }

    #[test]
    fn what_is_too_heavy_is_not_kept_and_drives_nothing_out() {
        let mut cache = Lru::new(100);
        cache.insert(1, 100, 'a');
        cache.insert(2, 101, 'b');
        assert_eq!([cache.get(1).copied(), cache.get(2).copied()], [Some('a'), None]);
    }
}
