//! The queue of blocks that no request holds, in the order in which they are allocated.

/// The number of a block of the cache, from 1; 0 stands for no block.
pub type BlockId = u32;

/// A queue like vLLM's `FreeKVCacheBlockQueue`. Blocks without content come first: those that were
/// freed, the last one first, then those that were never used. The cached blocks follow, least
/// recently used first. They can be removed from any position.
///
/// Only blocks that have been used take memory.
#[derive(Debug)]
pub(crate) struct FreeQueue {
    blocks: u32,
    /// The highest block that has been used; all below it have been used as well.
    used: u32,
    empty: Vec<BlockId>,
    /// The neighbours of the cached blocks, a ring through 0.
    next: Vec<BlockId>,
    previous: Vec<BlockId>,
    cached: usize,
}

impl FreeQueue {
    /// Creates a queue of this number of blocks, none of them used.
    pub(crate) fn new(blocks: u32) -> Self {
        Self { blocks, used: 0, empty: Vec::new(), next: vec![0], previous: vec![0], cached: 0 }
    }

    /// Returns the number of free blocks.
    pub(crate) fn len(&self) -> usize {
        self.empty.len() + (self.blocks - self.used) as usize + self.cached
    }

    /// Returns the number of blocks, free or not.
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Takes the next block. Its number is at most one more than the highest number so far.
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
        if first == 0 {
            return None;
        }
        self.remove(first);
        Some(first)
    }

    /// Removes a cached block from its position.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let previous = self.previous[block as usize];
        let next = self.next[block as usize];
        self.next[previous as usize] = next;
        self.previous[next as usize] = previous;
        self.cached -= 1;
    }

    /// Adds a block with content, to be allocated after all others.
    pub(crate) fn push_cached(&mut self, block: BlockId) {
        let last = self.previous[0];
        self.next[last as usize] = block;
        self.previous[block as usize] = last;
        self.next[block as usize] = 0;
        self.previous[0] = block;
        self.cached += 1;
    }

    /// Adds a block without content, to be allocated before all others.
    pub(crate) fn push_empty(&mut self, block: BlockId) {
        self.empty.push(block);
    }

    /// Returns the free blocks in the order of allocation, without those that were never used.
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
    fn new_queue_is_in_order_until_it_is_empty() {
        let mut queue = FreeQueue::new(3);
        assert_eq!([queue.pop(), queue.pop(), queue.pop()], [Some(1), Some(2), Some(3)]);
        assert_eq!(queue.pop(), None);
        queue.push_empty(2);
        queue.push_empty(1);
        assert_eq!(queue.order(), [1, 2]);
    }

    proptest! {
        /// Compares the queue with a deque of the cached blocks and a list of the others.
        #[test]
        fn queue_behaves_like_a_deque(
            operations in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..200),
        ) {
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
                let used: Vec<BlockId> =
                    expected.iter().copied().filter(|&block| block <= queue.used).collect();
                prop_assert_eq!(queue.order(), used);
                prop_assert!(never_used.clone().all(|block| expected.contains(&block)));
                prop_assert_eq!(queue.len(), expected.len());
            }
        }
    }
}
