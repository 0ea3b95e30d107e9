//! The prefix cache of an upstream: blocks that were computed, of which the least recently used go
//! first.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use crate::routers::prompt::BLOCK;

/// Bounded by a number of blocks.
pub(crate) struct Cache {
    /// When each block was used last: by a clock that counts uses.
    used: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    clock: u64,
    capacity: usize,
}

/// What a prompt found, and what it changed.
pub(crate) struct Taken {
    /// Tokens at its begin that were there.
    pub(crate) cached: usize,
    /// Runs of its blocks that were not.
    pub(crate) stored: Vec<Range<usize>>,
    /// Blocks that have made room.
    pub(crate) removed: Vec<u64>,
}

impl Cache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { used: HashMap::new(), by_use: BTreeMap::new(), clock: 0, capacity }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Computes a prompt of so many tokens with these full blocks.
    pub(crate) fn take(&mut self, blocks: &[u64], tokens: usize) -> Taken {
        let held = blocks.iter().take_while(|block| self.used.contains_key(block)).count();
        // An engine computes the last token in any case, as the next one comes of it.
        let cached = held.min(tokens.saturating_sub(1) / BLOCK) * BLOCK;
        let mut stored: Vec<Range<usize>> = Vec::new();
        for number in (0..blocks.len()).filter(|&number| !self.used.contains_key(&blocks[number])) {
            match stored.last_mut() {
                Some(run) if run.end == number => run.end += 1,
                _ => stored.push(number..number + 1),
            }
        }
        // The last block is used first, as no block is of use without those before it.
        for &block in blocks.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used.insert(block, self.clock) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.clock, block);
        }
        let mut removed = Vec::new();
        while self.used.len() > self.capacity
            && let Some((_, block)) = self.by_use.pop_first()
        {
            self.used.remove(&block);
            removed.push(block);
        }
        Taken { cached, stored, removed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_least_recently_goes_from_its_end() {
        let mut cache = Cache::new(4);
        let runs = |taken: &Taken| taken.stored.iter().map(|run| (run.start, run.end)).collect::<Vec<_>>();
        let first = cache.take(&[1, 2, 3], 3 * BLOCK + 1);
        assert_eq!((first.cached, runs(&first), first.removed.is_empty()), (0, vec![(0, 3)], true));
        assert_eq!(cache.take(&[1, 2, 3], 3 * BLOCK).cached, 2 * BLOCK, "the last token is computed");
        let other = cache.take(&[1, 7, 8], 3 * BLOCK + 1);
        assert_eq!((other.cached, runs(&other), other.removed), (BLOCK, vec![(1, 3)], vec![3]));
        assert_eq!(cache.take(&[1, 2, 3], 3 * BLOCK + 1).cached, 2 * BLOCK);
        assert_eq!(cache.used.len(), cache.capacity());
    }
}
