//! The cache of encoded media, by content hash.

use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::{ByteBudget, ContentHash, EncodedMedia};

/// The overhead of a cache entry in bytes: header, keys and the cache's own data.
const ENTRY_OVERHEAD_BYTES: u64 = 256;

/// A bounded cache of media items. Eviction is S3-FIFO: items used more than once outlive any
/// number of items used once.
pub(crate) struct ContentCache {
    /// `None` if the cache is disabled.
    items: Option<Cache<ContentHash, EncodedMedia, WeightInBytes>>,
    budget: ByteBudget,
}

/// Weighs an item by the memory of its file and its entry.
#[derive(Clone)]
struct WeightInBytes;

impl Weighter<ContentHash, EncodedMedia> for WeightInBytes {
    fn weight(&self, _: &ContentHash, item: &EncodedMedia) -> u64 {
        item.bytes.len() as u64 + ENTRY_OVERHEAD_BYTES
    }
}

impl ContentCache {
    /// Creates an empty cache of at most `max_bytes`; 0 disables it.
    pub(crate) fn new(max_bytes: u64, budget: ByteBudget) -> Self {
        // A single shard, so that one item may take up the whole capacity. Its lock is held for
        // look-ups only.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(max_bytes)
            .estimated_items_capacity((max_bytes >> 17).clamp(16, 1 << 16) as usize)
            .build();
        let cache = |options| {
            Cache::with_options(options, WeightInBytes, Default::default(), Default::default())
        };
        Self { items: options.ok().filter(|_| max_bytes > 0).map(cache), budget }
    }

    /// Returns the item with this content, if it is cached.
    pub(crate) fn get(&self, content: &ContentHash) -> Option<EncodedMedia> {
        self.items.as_ref()?.get(content)
    }

    /// Caches an item if it fits. Returns the copy to use: equal items share memory.
    pub(crate) fn insert(&self, mut item: EncodedMedia) -> EncodedMedia {
        let Some(items) = &self.items else { return item };
        if let Some(cached) = items.get(&item.content) {
            return cached;
        }
        item.bytes = self.budget.move_to_own_pages(item.bytes);
        items.insert(item.content, item.clone());
        item
    }

    /// Returns the memory of all items and their entries in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.items.as_ref().map_or(0, Cache::weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MediaLimits;

    /// Returns a GIF of one pixel, padded to `bytes` with a unique number.
    fn item(number: u32, bytes: usize) -> EncodedMedia {
        let mut file =
            b"GIF87a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
                .to_vec();
        file.extend(number.to_le_bytes());
        file.resize(bytes, 0);
        EncodedMedia::from_bytes(file.into(), &MediaLimits::default()).unwrap()
    }

    #[test]
    fn equal_items_share_memory() {
        let cache = ContentCache::new(1 << 20, ByteBudget::new(1 << 30));
        let first = cache.insert(item(1, 100));
        let second = cache.insert(item(1, 100));
        assert_eq!(first.bytes.as_ptr(), second.bytes.as_ptr());
        assert_eq!(cache.get(&first.content), Some(first));
    }

    #[test]
    fn full_cache_keeps_popular_items() {
        let cache = ContentCache::new(100_000, ByteBudget::new(1 << 30));
        let popular = cache.insert(item(0, 1000));
        for number in 1..2000 {
            assert!(cache.get(&popular.content).is_some(), "{number}");
            cache.insert(item(number, 1000));
            assert!(cache.bytes() <= 100_000);
        }
    }

    #[test]
    fn item_larger_than_capacity_is_not_cached() {
        let cache = ContentCache::new(100_000, ByteBudget::new(1 << 30));
        let large = cache.insert(item(1, 90_000));
        assert!(cache.get(&large.content).is_some());
        let larger = cache.insert(item(2, 100_001));
        assert!(cache.get(&larger.content).is_none());
        assert!(cache.bytes() <= 100_000);
    }

    #[test]
    fn cache_of_zero_bytes_keeps_nothing() {
        let cache = ContentCache::new(0, ByteBudget::new(1 << 30));
        let item = cache.insert(item(1, 100));
        assert_eq!((cache.get(&item.content), cache.bytes()), (None, 0));
    }
}
