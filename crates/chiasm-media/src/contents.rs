//! Encoded images that were seen before, by content.

use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::{ContentHash, EncodedImage};

/// Bytes that an entry takes beside the file: header facts, keys and the cache's own.
const ENTRY_BYTES: u64 = 256;

/// The most valuable images that fit. What was asked for more than once outlives what was asked for once, however much of
/// that comes along (S3-FIFO).
pub(crate) struct Contents {
    /// `None` keeps nothing.
    images: Option<Cache<ContentHash, EncodedImage, Bytes>>,
}

#[derive(Clone)]
struct Bytes;

impl Weighter<ContentHash, EncodedImage> for Bytes {
    fn weight(&self, _: &ContentHash, image: &EncodedImage) -> u64 {
        image.bytes.len() as u64 + ENTRY_BYTES
    }
}

impl Contents {
    /// Of `max_bytes` at most, 0 for none.
    pub(crate) fn new(max_bytes: u64) -> Self {
        // One shard: an image may take as much as all of it. It is locked for a look-up only.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(max_bytes)
            .estimated_items_capacity((max_bytes >> 17).clamp(16, 1 << 16) as usize)
            .build();
        let cache = |options| Cache::with_options(options, Bytes, Default::default(), Default::default());
        Self { images: options.ok().filter(|_| max_bytes > 0).map(cache) }
    }

    /// The image of this content, if it is still there.
    pub(crate) fn get(&self, content: &ContentHash) -> Option<EncodedImage> {
        self.images.as_ref()?.get(content)
    }

    /// Keeps an image if there is room. Returns the copy to use, so that equal ones share memory.
    pub(crate) fn keep(&self, image: EncodedImage) -> EncodedImage {
        let Some(images) = &self.images else { return image };
        if let Some(kept) = images.get(&image.content) {
            return kept;
        }
        images.insert(image.content, image.clone());
        image
    }

    /// Bytes in use.
    pub(crate) fn bytes(&self) -> u64 {
        self.images.as_ref().map_or(0, Cache::weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GIF of one pixel, and bytes after it that make it another file.
    fn image(number: u32, bytes: usize) -> EncodedImage {
        let mut file = b"GIF87a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;".to_vec();
        file.extend(number.to_le_bytes());
        file.resize(bytes, 0);
        EncodedImage::from_bytes(file.into(), 100).unwrap()
    }

    #[test]
    fn equal_images_share_memory() {
        let contents = Contents::new(1 << 20);
        let first = contents.keep(image(1, 100));
        let second = contents.keep(image(1, 100));
        assert_eq!(first.bytes.as_ptr(), second.bytes.as_ptr());
        assert_eq!(contents.get(&first.content), Some(first));
    }

    #[test]
    fn no_more_than_the_limit_is_kept_and_what_is_popular_stays() {
        let contents = Contents::new(100_000);
        let popular = contents.keep(image(0, 1000));
        for number in 1..2000 {
            assert!(contents.get(&popular.content).is_some(), "{number}");
            contents.keep(image(number, 1000));
            assert!(contents.bytes() <= 100_000);
        }
    }

    #[test]
    fn an_image_may_take_nearly_all_the_room_and_no_more() {
        let contents = Contents::new(100_000);
        let large = contents.keep(image(1, 90_000));
        assert!(contents.get(&large.content).is_some());
        let larger = contents.keep(image(2, 100_001));
        assert!(contents.get(&larger.content).is_none());
        assert!(contents.bytes() <= 100_000);
    }

    #[test]
    fn a_cache_of_no_bytes_keeps_nothing() {
        let contents = Contents::new(0);
        let image = contents.keep(image(1, 100));
        assert_eq!((contents.get(&image.content), contents.bytes()), (None, 0));
    }
}
