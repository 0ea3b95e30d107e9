//! Blocks that no request holds, in the order in which they are taken.

/// A block of the cache, from 1; 0 is none.
pub type BlockId = u32;

/// vLLM's `FreeKVCacheBlockQueue`: first the blocks without content, those last freed before those
/// never used, then the cached ones, least recently used first. A cached block can leave the queue
/// from anywhere.
///
/// Only blocks that were in use once take memory.
#[derive(Debug)]
pub(crate) struct FreeQueue {
    blocks: u32,
    /// Blocks from 1 to this were in use once.
    used: u32,
    empty: Vec<BlockId>,
    /// Neighbours of the cached ones, a ring through 0.
    next: Vec<BlockId>,
    previous: Vec<BlockId>,
    cached: usize,
}

impl FreeQueue {
    /// A queue of blocks that were never used.
    pub(crate) fn new(blocks: u32) -> Self {
        Self { blocks, used: 0, empty: Vec::new(), next: vec![0], previous: vec![0], cached: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.empty.len() + (self.blocks - self.used) as usize + self.cached
    }

    /// Number of blocks, free or not.
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Takes the block whose turn it is. Its number is at most one more than the highest one so
    /// far.
    pub(crate) fn pop(&mut self) -> Option<BlockId> {
        if let Some(block) = self.empty.pop() {
            return Some(block);
        }
        if self.used < self.blocks {
            self.used += 1;
            self.next.push(0);
            self.previous.push(0);
            return Some(self.used);
        }
        let first = self.next[0];
        (first != 0).then(|| {
            self.remove(first);
            first
        })
    }

    /// Takes a cached block out.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let (previous, next) = (self.previous[block as usize], self.next[block as usize]);
        self.next[previous as usize] = next;
        self.previous[next as usize] = previous;
        self.cached -= 1;
    }

    /// Adds a block with content, to be taken after all others.
    pub(crate) fn push_cached(&mut self, block: BlockId) {
        let last = self.previous[0];
        self.next[last as usize] = block;
        self.previous[block as usize] = last;
        self.next[block as usize] = 0;
        self.previous[0] = block;
        self.cached += 1;
    }

    /// Adds a block without content, to be taken before all others.
    pub(crate) fn push_empty(&mut self, block: BlockId) {
        self.empty.push(block);
    }

    /// The blocks that were in use once, in the order in which they are taken, without those never
    /// used.
    #[cfg(test)]
    pub(crate) fn order(&self) -> Vec<BlockId> {
        let mut order: Vec<BlockId> = self.empty.iter().rev().copied().collect();
        let mut at = self.next[0];
        while at != 0 {
            order.push(at);
            at = self.next[at as usize];
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn starts_in_order_and_runs_dry() {
        let mut queue = FreeQueue::new(3);
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some(1), Some(2), Some(3)]);
        assert_eq!(queue.pop(), None);
        queue.push_empty(2);
        queue.push_empty(1);
        assert_eq!(queue.order(), [1, 2]);
    }

    proptest! {
        /// Beside a deque for the cached blocks and a list for the others.
        #[test]
        fn behaves_like_a_deque(operations in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..200)) {
            let mut queue = FreeQueue::new(12);
            let mut empty: Vec<BlockId> = (1..=12).rev().collect();
            let mut cached: VecDeque<BlockId> = VecDeque::new();
            let mut taken: Vec<BlockId> = Vec::new();
            for (operation, index) in operations {
                match operation {
                    0 => {
                        let expected = empty.pop().or_else(|| cached.pop_front());
                        prop_assert_eq!(queue.pop(), expected);
                        taken.extend(expected);
                    }
                    1 if !cached.is_empty() => {
                        let block = cached.remove(index.index(cached.len())).unwrap();
                        queue.remove(block);
                        taken.push(block);
                    }
                    2 => taken.drain(..).for_each(|block| {
                        queue.push_cached(block);
                        cached.push_back(block);
                    }),
                    3 => taken.drain(..).for_each(|block| {
                        queue.push_empty(block);
                        empty.push(block);
                    }),
                    _ => {}
                }
                let never_used = (queue.used + 1..=12).rev();
                let expected: Vec<BlockId> = empty.iter().rev().chain(&cached).copied().collect();
                let in_use_once: Vec<BlockId> = expected.iter().copied().filter(|&block| block <= queue.used).collect();
                prop_assert_eq!(queue.order(), in_use_once);
                prop_assert!(never_used.clone().all(|block| expected.contains(&block)));
                prop_assert_eq!(queue.len(), expected.len());
            }
        }
    }
}
