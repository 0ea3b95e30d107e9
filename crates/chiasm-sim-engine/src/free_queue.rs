//! The free blocks in the order in which they are taken; any block can leave in constant time.

/// Index of a block in the pool.
pub(crate) type BlockId = u32;

/// A doubly linked list over block ids, stored as two arrays.
///
/// It mirrors vLLM's `FreeKVCacheBlockQueue`: blocks are taken from the front, cached blocks come back at the
/// end (least recently used first), blocks without a hash come back at the front.
#[derive(Debug)]
pub(crate) struct FreeQueue {
    next: Vec<BlockId>,
    previous: Vec<BlockId>,
    length: usize,
}

impl FreeQueue {
    /// All of `0..blocks` free, in that order.
    pub(crate) fn new(blocks: u32) -> Self {
        // The sentinel sits at index `blocks`: before the first and after the last.
        let around = blocks + 1;
        Self {
            next: (0..around).map(|i| (i + 1) % around).collect(),
            previous: (0..around).map(|i| (i + around - 1) % around).collect(),
            length: blocks as usize,
        }
    }

    fn sentinel(&self) -> BlockId {
        (self.next.len() - 1) as BlockId
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Takes the block whose turn it is.
    pub(crate) fn pop_front(&mut self) -> Option<BlockId> {
        let first = self.next[self.sentinel() as usize];
        if first == self.sentinel() {
            return None;
        }
        self.remove(first);
        Some(first)
    }

    /// Takes out a block that is in the queue.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let (previous, next) = (self.previous[block as usize], self.next[block as usize]);
        self.next[previous as usize] = next;
        self.previous[next as usize] = previous;
        self.length -= 1;
    }

    fn insert_between(&mut self, previous: BlockId, block: BlockId, next: BlockId) {
        self.next[previous as usize] = block;
        self.previous[block as usize] = previous;
        self.next[block as usize] = next;
        self.previous[next as usize] = block;
        self.length += 1;
    }

    /// Adds blocks that are not in the queue to its end, keeping their order.
    pub(crate) fn append(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            let end = self.sentinel();
            self.insert_between(self.previous[end as usize], block, end);
        }
    }

    /// Adds blocks that are not in the queue to its front; the first of them is taken first.
    pub(crate) fn prepend(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            let front = self.sentinel();
            self.insert_between(front, block, self.next[front as usize]);
        }
    }

    /// Front to back.
    #[cfg(test)]
    pub(crate) fn order(&self) -> Vec<BlockId> {
        let mut order = Vec::new();
        let mut at = self.next[self.sentinel() as usize];
        while at != self.sentinel() {
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
        assert_eq!(queue.order(), [0, 1, 2]);
        assert_eq!([queue.pop_front(), queue.pop_front(), queue.pop_front()], [Some(0), Some(1), Some(2)]);
        assert_eq!(queue.pop_front(), None);
        queue.prepend(&[2, 1]);
        assert_eq!(queue.order(), [2, 1]);
    }

    proptest! {
        #[test]
        fn behaves_like_a_deque(operations in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..200)) {
            let mut queue = FreeQueue::new(12);
            let mut model: VecDeque<BlockId> = (0..12).collect();
            let mut taken: Vec<BlockId> = Vec::new();
            for (operation, index) in operations {
                match operation {
                    0 => {
                        prop_assert_eq!(queue.pop_front(), model.front().copied());
                        taken.extend(model.pop_front());
                    }
                    1 if !model.is_empty() => {
                        let block = model.remove(index.index(model.len())).unwrap();
                        queue.remove(block);
                        taken.push(block);
                    }
                    2 => {
                        queue.append(&taken);
                        model.extend(taken.drain(..));
                    }
                    3 => {
                        queue.prepend(&taken);
                        for block in taken.drain(..).rev() {
                            model.push_front(block);
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(queue.order(), Vec::from(model.clone()));
                prop_assert_eq!(queue.len(), model.len());
            }
        }
    }
}
