//! What a worker without KV events is believed to hold: the prompts that it has computed, for a
//! while.

use std::time::Duration;

use chiasm_kv::BlockKey;
use foldhash::fast::RandomState;
use lru::LruCache;

/// Blocks by their last use. Of one prompt the later blocks count as used before the earlier ones,
/// so that a chain is forgotten from its end, as engines evict it.
pub(crate) struct Believed {
    used: LruCache<BlockKey, Duration, RandomState>,
    capacity: usize,
}

impl Believed {
    /// Believes nothing yet, and never more blocks than the engine's cache has.
    pub(crate) fn new(capacity: u64) -> Self {
        Self {
            used: LruCache::unbounded_with_hasher(RandomState::default()),
            capacity: usize::try_from(capacity).unwrap_or(usize::MAX),
        }
    }

    /// The worker has computed a prompt. Returns the blocks of it that it keeps; what it can't hold
    /// beside them any more is added to `forgotten`, children before their parents.
    pub(crate) fn computed<'k>(
        &mut self,
        keys: &'k [BlockKey],
        now: Duration,
        forgotten: &mut Vec<BlockKey>,
    ) -> &'k [BlockKey] {
        let kept = &keys[..keys.len().min(self.capacity)];
        for key in kept.iter().rev() {
            self.used.put(*key, now);
        }
        while self.used.len() > self.capacity {
            forgotten.extend(self.used.pop_lru().map(|(key, _)| key));
        }
        kept
    }

    /// Forgets what was last used at or before `since`, until `forgotten` has `most` blocks.
    pub(crate) fn expire(&mut self, since: Duration, most: usize, forgotten: &mut Vec<BlockKey>) {
        while forgotten.len() < most && self.oldest().is_some_and(|oldest| oldest <= since) {
            forgotten.extend(self.used.pop_lru().map(|(key, _)| key));
        }
    }

    /// The last use of what will be forgotten next.
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
    fn the_end_of_the_least_recently_used_prompt_is_forgotten_first() {
        let (old, new) = (prompt(0, 4), prompt(100, 3));
        let (mut believed, mut forgotten) = (Believed::new(5), Vec::new());
        assert_eq!(believed.computed(&old, Duration::from_secs(1), &mut forgotten), old);
        assert_eq!(believed.computed(&new, Duration::from_secs(2), &mut forgotten), new);
        assert_eq!(forgotten, [old[3], old[2]]);
        believed.expire(Duration::from_secs(1), 3, &mut forgotten);
        assert_eq!(forgotten[2..], [old[1]], "no more than it is told");
        believed.expire(Duration::from_secs(1), usize::MAX, &mut forgotten);
        assert_eq!(forgotten[2..], [old[1], old[0]]);
        assert_eq!(believed.oldest(), Some(Duration::from_secs(2)));
    }

    #[test]
    fn a_prompt_longer_than_the_cache_leaves_its_beginning() {
        let long = prompt(0, 8);
        let (mut believed, mut forgotten) = (Believed::new(5), Vec::new());
        assert_eq!(believed.computed(&long, Duration::ZERO, &mut forgotten), &long[..5]);
        assert!(forgotten.is_empty());
        believed.expire(Duration::ZERO, usize::MAX, &mut forgotten);
        forgotten.reverse();
        assert_eq!(forgotten, long[..5]);
    }
}
