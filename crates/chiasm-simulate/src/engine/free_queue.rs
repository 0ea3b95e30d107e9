//! Blocks that no request holds, in the order in which they are taken.

/// A block of the cache, from 1; 0 is none.
pub(crate) type BlockId = u32;

/// vLLM's `FreeKVCacheBlockQueue`: first the blocks without content, those last freed before those never used, then the
/// cached ones, least recently used first. A cached block can leave the queue from anywhere.
///
/// Takes memory only for blocks that were in use once.
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
    /// Of blocks never used.
    pub(crate) fn new(blocks: u32) -> Self {
        Self { blocks, used: 0, empty: Vec::new(), next: vec![0], previous: vec![0], cached: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.empty.len() + (self.blocks - self.used) as usize + self.cached
    }

    /// Takes the block whose turn it is. Its number is at most one more than the highest one so far.
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

    /// A block with content, to be taken after all others.
    pub(crate) fn push_cached(&mut self, block: BlockId) {
        let last = self.previous[0];
        self.next[last as usize] = block;
        self.previous[block as usize] = last;
        self.next[block as usize] = 0;
        self.previous[0] = block;
        self.cached += 1;
    }

    /// A block without content, to be taken before all others.
    pub(crate) fn push_empty(&mut self, block: BlockId) {
        self.empty.push(block);
    }
}
