//! Tokens of long pieces of text that were encoded before: a conversation has all of its earlier
//! messages in each request, and system prompts are shared.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use chiasm_types::TokenId;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::tokenizer::TokenCacheCounts;

/// Shortest piece that is kept, in bytes: entries and tokens of shorter ones would take more room
/// than their texts.
const SHORTEST: usize = 256;
/// Bytes that an entry takes beside the text and its tokens.
const ENTRY_BYTES: u64 = 128;

/// Pieces between added tokens, and their tokens. Texts are compared in full, so that no other
/// tokens than a piece's own are found. What was asked for more than once outlives what was asked
/// for once, however much of that comes along (S3-FIFO).
pub(in crate::tokenizer) struct PieceCache {
    /// `None` keeps nothing.
    pieces: Option<Pieces>,
    shortest: usize,
    found_tokens: AtomicU64,
}

/// Tokens by text.
type Pieces = Cache<Box<str>, Arc<[TokenId]>, Bytes>;

#[derive(Clone)]
struct Bytes;

impl Weighter<Box<str>, Arc<[TokenId]>> for Bytes {
    fn weight(&self, text: &Box<str>, tokens: &Arc<[TokenId]>) -> u64 {
        (text.len() + size_of_val(&**tokens)) as u64 + ENTRY_BYTES
    }
}

impl PieceCache {
    /// An empty cache for at most `max_bytes`, 0 for one that keeps nothing.
    pub(in crate::tokenizer) fn new(max_bytes: u64) -> Self {
        // One shard: a piece may take as much as all of it. It is locked for a look-up only.
        let options = OptionsBuilder::new()
            .shards(1)
            .weight_capacity(max_bytes)
            .estimated_items_capacity((max_bytes >> 12).clamp(16, 1 << 16) as usize)
            .build();
        let cache =
            |options| Cache::with_options(options, Bytes, Default::default(), Default::default());
        Self {
            pieces: options.ok().filter(|_| max_bytes > 0).map(cache),
            shortest: SHORTEST,
            found_tokens: AtomicU64::new(0),
        }
    }

    /// Appends the tokens of a piece. False if they are not known.
    pub(super) fn push(&self, text: &str, ids: &mut Vec<TokenId>) -> bool {
        let Some(known) = self.of(text).and_then(|pieces| pieces.get(text)) else { return false };
        ids.extend_from_slice(&known);
        self.found_tokens.fetch_add(known.len() as u64, Ordering::Relaxed);
        true
    }

    pub(super) fn keep(&self, text: &str, ids: &[TokenId]) {
        if let Some(pieces) = self.of(text) {
            pieces.insert(text.into(), ids.into());
        }
    }

    pub(in crate::tokenizer) fn counts(&self) -> TokenCacheCounts {
        TokenCacheCounts {
            bytes: self.pieces.as_ref().map_or(0, Cache::weight),
            found_tokens: self.found_tokens.load(Ordering::Relaxed),
        }
    }

    /// Where pieces such as this are kept, if they are.
    fn of(&self, text: &str) -> Option<&Pieces> {
        self.pieces.as_ref().filter(|_| text.len() >= self.shortest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl PieceCache {
        /// One that keeps short pieces too.
        pub(in crate::tokenizer::encoder) fn of_all(max_bytes: u64) -> Self {
            Self { shortest: 1, ..Self::new(max_bytes) }
        }
    }

    fn tokens(of: &PieceCache, text: &str) -> Option<Vec<TokenId>> {
        let mut ids = vec![TokenId(7)];
        of.push(text, &mut ids).then_some(ids)
    }

    #[test]
    fn long_pieces_are_found_and_short_ones_not_kept() {
        let cache = PieceCache::new(1 << 20);
        let (long, short) = ("a".repeat(SHORTEST), "a".repeat(SHORTEST - 1));
        for text in [&long, &short] {
            assert_eq!(tokens(&cache, text), None);
            cache.keep(text, &[TokenId(1), TokenId(2)]);
        }
        assert_eq!(tokens(&cache, &long), Some(vec![TokenId(7), TokenId(1), TokenId(2)]));
        assert_eq!(tokens(&cache, &short), None);
        let expected =
            TokenCacheCounts { bytes: SHORTEST as u64 + 8 + ENTRY_BYTES, found_tokens: 2 };
        assert_eq!(cache.counts(), expected);
        let none = PieceCache::new(0);
        none.keep(&long, &[TokenId(1)]);
        assert_eq!((tokens(&none, &long), none.counts()), (None, TokenCacheCounts::default()));
    }

    #[test]
    fn what_is_kept_has_a_limit_and_new_texts_do_not_drive_out_what_is_used() {
        let cache = PieceCache::new(1 << 20);
        let used = "u".repeat(10_000);
        cache.keep(&used, &[TokenId(1)]);
        for number in 0..1000 {
            assert!(tokens(&cache, &used).is_some(), "{number}");
            cache.keep(&format!("{number:05000}"), &vec![TokenId(number); 1000]);
            assert!(cache.counts().bytes <= 1 << 20, "{:?}", cache.counts());
        }
        assert!(cache.counts().bytes > 1 << 19, "{:?}", cache.counts());
        cache.keep(&"x".repeat(2 << 20), &[TokenId(1)]);
        assert!(
            tokens(&cache, &used).is_some() && cache.counts().bytes <= 1 << 20,
            "what does not fit is not kept"
        );
    }
}
