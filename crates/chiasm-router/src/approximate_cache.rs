//! The expected cache contents of a worker without complete KV events: the prompts that it computed
//! recently.

use std::time::Duration;

use chiasm_kv::BlockKey;
use foldhash::fast::RandomState;
use lru::LruCache;

/// Blocks by their last use. Within a prompt, the last block counts as the least recently used, so
/// that a chain is evicted from its end, as in engines.
pub(crate) struct ApproximateCache {
    used: LruCache<BlockKey, Duration, RandomState>,
    capacity: usize,
}

impl ApproximateCache {
    /// Creates an empty cache of `capacity` blocks, the size of the engine's cache.
    pub(crate) fn new(capacity: u64) -> Self {
        Self {
            used: LruCache::unbounded_with_hasher(RandomState::default()),
            capacity: usize::try_from(capacity).unwrap_or(usize::MAX),
        }
    }

    /// Adds the blocks of a computed prompt. Returns the leading blocks that fit into the cache.
    ///
    /// Blocks that are evicted to make room are added to `evicted`, children before their parents.
    pub(crate) fn insert<'k>(
        &mut self,
        keys: &'k [BlockKey],
        now: Duration,
        evicted: &mut Vec<BlockKey>,
    ) -> &'k [BlockKey] {
        let kept = &keys[..keys.len().min(self.capacity)];
        for key in kept.iter().rev() {
            self.used.put(*key, now);
        }
        while self.used.len() > self.capacity {
            evicted.extend(self.used.pop_lru().map(|(key, _)| key));
        }
        kept
    }

    /// Evicts blocks that were last used at or before `since`, until `evicted` has `max_evicted`
    /// blocks.
    pub(crate) fn expire(
        &mut self,
        since: Duration,
        max_evicted: usize,
        evicted: &mut Vec<BlockKey>,
    ) {
        while evicted.len() < max_evicted && self.oldest().is_some_and(|oldest| oldest <= since) {
            evicted.extend(self.used.pop_lru().map(|(key, _)| key));
        }
    }

    /// Returns the last use of the block that will be evicted next.
    pub(crate) fn oldest(&self) -> Option<Duration> {
        self.used.peek_lru().map(|(_, used)| *used)
    }
}

#[cfg(test)]
mod tests {
    use chiasm_kv::{PromptBlocks, block_keys};
    use chiasm_types::{BlockSize, TokenId};

    use super::*;

    fn prompt(first: u32, blocks: u32) -> Vec<BlockKey> {
        let tokens: Vec<_> = (first..first + blocks).map(TokenId).collect();
        block_keys(
            &PromptBlocks { tokens: &tokens, ..Default::default() },
            BlockSize::new(1).unwrap(),
        )
    }

    #[test]
    fn least_recently_used_prompt_is_evicted_from_its_end() {
        let old = prompt(0, 4);
        let new = prompt(100, 3);
        let mut cache = ApproximateCache::new(5);
        let mut evicted = Vec::new();
        assert_eq!(cache.insert(&old, Duration::from_secs(1), &mut evicted), old);
        assert_eq!(cache.insert(&new, Duration::from_secs(2), &mut evicted), new);
        assert_eq!(evicted, [old[3], old[2]]);
        cache.expire(Duration::from_secs(1), 3, &mut evicted);
        assert_eq!(evicted[2..], [old[1]], "no more than the limit");
        cache.expire(Duration::from_secs(1), usize::MAX, &mut evicted);
        assert_eq!(evicted[2..], [old[1], old[0]]);
        assert_eq!(cache.oldest(), Some(Duration::from_secs(2)));
    }

    #[test]
    fn only_the_beginning_of_too_long_a_prompt_is_kept() {
        let long = prompt(0, 8);
        let mut cache = ApproximateCache::new(5);
        let mut evicted = Vec::new();
        assert_eq!(cache.insert(&long, Duration::ZERO, &mut evicted), &long[..5]);
        assert!(evicted.is_empty());
        cache.expire(Duration::ZERO, usize::MAX, &mut evicted);
        evicted.reverse();
        assert_eq!(evicted, long[..5]);
    }
}
