//! The prefix cache of an upstream, which evicts the least recently used blocks.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::routers::prompt::BLOCK_SIZE;

/// A cache of a number of blocks.
pub(crate) struct Cache {
    /// The last use of each block, and the block of each use. Uses are numbered.
    uses: HashMap<u64, u64>,
    blocks: BTreeMap<u64, u64>,
    next_use: u64,
    pub(crate) capacity: usize,
}

/// The changes that a prompt makes to the cache.
pub(crate) struct Changes {
    /// The number of leading tokens that were cached.
    pub(crate) cached: usize,
    /// The runs of blocks that were stored.
    pub(crate) stored: Vec<Range<usize>>,
    /// The blocks that were evicted.
    pub(crate) removed: Vec<u64>,
}

impl Cache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { uses: HashMap::new(), blocks: BTreeMap::new(), next_use: 0, capacity }
    }

    /// Uses or stores the full blocks of a prompt of this number of tokens.
    pub(crate) fn add(&mut self, blocks: &[u64], tokens: usize) -> Changes {
        let held = blocks.iter().take_while(|block| self.uses.contains_key(block)).count();
        // An engine always computes the last token, because the next one follows from it.
        let cached = held.min(tokens.saturating_sub(1) / BLOCK_SIZE) * BLOCK_SIZE;
        let mut stored: Vec<Range<usize>> = Vec::new();
        let is_new = |number: &usize| !self.uses.contains_key(&blocks[*number]);
        for number in (0..blocks.len()).filter(is_new) {
            match stored.last_mut() {
                Some(run) if run.end == number => run.end += 1,
                _ => stored.push(number..number + 1),
            }
        }
        // The last block is used first: no block is useful without the blocks before it.
        for &block in blocks.iter().rev() {
            self.next_use += 1;
            if let Some(before) = self.uses.insert(block, self.next_use) {
                self.blocks.remove(&before);
            }
            self.blocks.insert(self.next_use, block);
        }
        let mut removed = Vec::new();
        while self.uses.len() > self.capacity
            && let Some((_, block)) = self.blocks.pop_first()
        {
            self.uses.remove(&block);
            removed.push(block);
        }
        Changes { cached, stored, removed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_blocks_are_evicted() {
        const BLOCK: usize = BLOCK_SIZE;
        let mut cache = Cache::new(4);
        let first = cache.add(&[1, 2, 3], 3 * BLOCK + 1);
        assert_eq!((first.cached, first.stored, first.removed), (0, vec![0..3], vec![]));
        assert_eq!(cache.add(&[1, 2, 3], 3 * BLOCK).cached, 2 * BLOCK, "the last token");
        let other = cache.add(&[1, 7, 8], 3 * BLOCK + 1);
        assert_eq!((other.cached, other.stored, other.removed), (BLOCK, vec![1..3], vec![3]));
        assert_eq!(cache.add(&[1, 2, 3], 3 * BLOCK + 1).cached, 2 * BLOCK);
        assert_eq!(cache.uses.len(), cache.capacity);
    }
}
