//! A cache for the tokens of long text pieces. Requests repeat system prompts and all earlier
//! messages of their conversation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use chiasm_types::TokenId;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::tokenizer::TokenCacheCounts;

/// The minimum length of a cached piece. The entries of shorter pieces would take more memory than
/// their texts.
const MIN_PIECE_BYTES: usize = 256;
/// The memory of an entry beside its text and tokens.
const ENTRY_OVERHEAD_BYTES: u64 = 128;

/// The pieces between added tokens, and their tokens.
///
/// Texts are compared in full, so a lookup never returns the tokens of another text. The eviction
/// policy is S3-FIFO: pieces used more than once survive any number of pieces used once.
pub(in crate::tokenizer) struct PieceCache {
    /// `None` turns caching off.
    pieces: Option<Pieces>,
    min_bytes: usize,
    found_tokens: AtomicU64,
}

/// The tokens by text.
type Pieces = Cache<Box<str>, Arc<[TokenId]>, ByteWeighter>;

#[derive(Clone)]
struct ByteWeighter;

impl Weighter<Box<str>, Arc<[TokenId]>> for ByteWeighter {
    fn weight(&self, text: &Box<str>, tokens: &Arc<[TokenId]>) -> u64 {
        (text.len() + size_of_val(&**tokens)) as u64 + ENTRY_OVERHEAD_BYTES
    }
}

impl PieceCache {
    /// Creates an empty cache of at most `max_bytes`; 0 turns caching off.
    pub(in crate::tokenizer) fn new(max_bytes: u64) -> Self {
        // One shard, so that a single piece may fill the cache. It is locked for lookups only.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(max_bytes)
            .estimated_items_capacity((max_bytes >> 12).clamp(16, 1 << 16) as usize)
            .build();
        let cache = |options| {
            Cache::with_options(options, ByteWeighter, Default::default(), Default::default())
        };
        Self {
            pieces: options.ok().filter(|_| max_bytes > 0).map(cache),
            min_bytes: MIN_PIECE_BYTES,
            found_tokens: AtomicU64::new(0),
        }
    }

    /// Appends the tokens of a piece. Returns `false` if the piece is not cached.
    pub(super) fn append_cached(&self, text: &str, ids: &mut Vec<TokenId>) -> bool {
        let Some(cached) = self.pieces_for(text).and_then(|pieces| pieces.get(text)) else {
            return false;
        };
        ids.extend_from_slice(&cached);
        self.found_tokens.fetch_add(cached.len() as u64, Ordering::Relaxed);
        true
    }

    /// Caches the tokens of a piece if the piece is long enough.
    pub(super) fn insert(&self, text: &str, ids: &[TokenId]) {
        if let Some(pieces) = self.pieces_for(text) {
            pieces.insert(text.into(), ids.into());
        }
    }

    pub(in crate::tokenizer) fn counts(&self) -> TokenCacheCounts {
        TokenCacheCounts {
            bytes: self.pieces.as_ref().map_or(0, Cache::weight),
            found_tokens: self.found_tokens.load(Ordering::Relaxed),
        }
    }

    /// Returns the cache if it is on and `text` is long enough for it.
    fn pieces_for(&self, text: &str) -> Option<&Pieces> {
        self.pieces.as_ref().filter(|_| text.len() >= self.min_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl PieceCache {
        /// Creates a cache that keeps short pieces too.
        pub(in crate::tokenizer::encoder) fn with_short_pieces(max_bytes: u64) -> Self {
            Self { min_bytes: 1, ..Self::new(max_bytes) }
        }
    }

    fn tokens(cache: &PieceCache, text: &str) -> Option<Vec<TokenId>> {
        let mut ids = vec![TokenId(7)];
        cache.append_cached(text, &mut ids).then_some(ids)
    }

    #[test]
    fn only_long_pieces_are_cached() {
        let cache = PieceCache::new(1 << 20);
        let long = "a".repeat(MIN_PIECE_BYTES);
        let short = "a".repeat(MIN_PIECE_BYTES - 1);
        for text in [&long, &short] {
            assert_eq!(tokens(&cache, text), None);
            cache.insert(text, &[TokenId(1), TokenId(2)]);
        }
        assert_eq!(tokens(&cache, &long), Some(vec![TokenId(7), TokenId(1), TokenId(2)]));
        assert_eq!(tokens(&cache, &short), None);
        let bytes = MIN_PIECE_BYTES as u64 + 8 + ENTRY_OVERHEAD_BYTES;
        assert_eq!(cache.counts(), TokenCacheCounts { bytes, found_tokens: 2 });
        let off = PieceCache::new(0);
        off.insert(&long, &[TokenId(1)]);
        assert_eq!((tokens(&off, &long), off.counts()), (None, TokenCacheCounts::default()));
    }

    #[test]
    fn new_pieces_do_not_evict_used_ones() {
        let cache = PieceCache::new(1 << 20);
        let used = "u".repeat(10_000);
        cache.insert(&used, &[TokenId(1)]);
        for number in 0..1000 {
            assert!(tokens(&cache, &used).is_some(), "{number}");
            cache.insert(&format!("{number:05000}"), &vec![TokenId(number); 1000]);
            assert!(cache.counts().bytes <= 1 << 20, "{:?}", cache.counts());
        }
        assert!(cache.counts().bytes > 1 << 19, "{:?}", cache.counts());
        cache.insert(&"x".repeat(2 << 20), &[TokenId(1)]);
        assert!(
            tokens(&cache, &used).is_some() && cache.counts().bytes <= 1 << 20,
            "a piece larger than the cache is not kept"
        );
    }
}
