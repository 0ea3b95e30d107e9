//! Encoded media that were seen before, by content.

use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::{ByteBudget, ContentHash, EncodedMedia};

/// Bytes that an entry takes beside the file: header facts, keys and the cache's own.
const ENTRY_BYTES: u64 = 256;

/// The most valuable items that fit. What was asked for more than once outlives what was asked for
/// once, however much of that comes along (S3-FIFO).
pub(crate) struct Contents {
    /// `None` keeps nothing.
    items: Option<Cache<ContentHash, EncodedMedia, Bytes>>,
    budget: ByteBudget,
}

#[derive(Clone)]
struct Bytes;

impl Weighter<ContentHash, EncodedMedia> for Bytes {
    fn weight(&self, _: &ContentHash, item: &EncodedMedia) -> u64 {
        item.bytes.len() as u64 + ENTRY_BYTES
    }
}

impl Contents {
    /// An empty cache for at most `max_bytes`, 0 for one that keeps nothing.
    pub(crate) fn new(max_bytes: u64, budget: ByteBudget) -> Self {
        // One shard: an item may take as much as all of it. It is locked for a look-up only.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(max_bytes)
            .estimated_items_capacity((max_bytes >> 17).clamp(16, 1 << 16) as usize)
            .build();
        let cache =
            |options| Cache::with_options(options, Bytes, Default::default(), Default::default());
        Self { items: options.ok().filter(|_| max_bytes > 0).map(cache), budget }
    }

    /// The item of this content, if it is still there.
    pub(crate) fn get(&self, content: &ContentHash) -> Option<EncodedMedia> {
        self.items.as_ref()?.get(content)
    }

    /// Keeps an item if there is room. Returns the copy to use, so that equal ones share memory.
    pub(crate) fn keep(&self, mut item: EncodedMedia) -> EncodedMedia {
        let Some(items) = &self.items else { return item };
        if let Some(kept) = items.get(&item.content) {
            return kept;
        }
        item.bytes = self.budget.settle(item.bytes);
        items.insert(item.content, item.clone());
        item
    }

    /// The bytes that the items and their entries take now.
    pub(crate) fn bytes(&self) -> u64 {
        self.items.as_ref().map_or(0, Cache::weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MediaLimits;

    /// A GIF of one pixel, and bytes after it that make it another file.
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
        let contents = Contents::new(1 << 20, ByteBudget::new(1 << 30));
        let first = contents.keep(item(1, 100));
        let second = contents.keep(item(1, 100));
        assert_eq!(first.bytes.as_ptr(), second.bytes.as_ptr());
        assert_eq!(contents.get(&first.content), Some(first));
    }

    #[test]
    fn no_more_than_the_limit_is_kept_and_what_is_popular_stays() {
        let contents = Contents::new(100_000, ByteBudget::new(1 << 30));
        let popular = contents.keep(item(0, 1000));
        for number in 1..2000 {
            assert!(contents.get(&popular.content).is_some(), "{number}");
            contents.keep(item(number, 1000));
            assert!(contents.bytes() <= 100_000);
        }
    }

    #[test]
    fn an_item_may_take_nearly_all_the_room_and_no_more() {
        let contents = Contents::new(100_000, ByteBudget::new(1 << 30));
        let large = contents.keep(item(1, 90_000));
        assert!(contents.get(&large.content).is_some());
        let larger = contents.keep(item(2, 100_001));
        assert!(contents.get(&larger.content).is_none());
        assert!(contents.bytes() <= 100_000);
    }

    #[test]
    fn a_cache_of_no_bytes_keeps_nothing() {
        let contents = Contents::new(0, ByteBudget::new(1 << 30));
        let item = contents.keep(item(1, 100));
        assert_eq!((contents.get(&item.content), contents.bytes()), (None, 0));
    }
}
