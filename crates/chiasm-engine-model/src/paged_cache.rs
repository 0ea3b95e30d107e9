//! The paged KV cache with prefix reuse.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::ops::Range;

use crate::free_queue::{BlockId, FreeQueue};

/// The blocks of one request, the first [`stored`](BlockTable::stored) of which others can find.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    stored: usize,
}

impl BlockTable {
    /// Number of its blocks, the last of which may be partly filled.
    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Number of its blocks that other requests can find.
    pub fn stored(&self) -> usize {
        self.stored
    }
}

#[derive(Clone, Copy, Debug)]
struct Block<H> {
    /// What others find it by, once it is full.
    hash: Option<H>,
    references: u32,
    /// The next younger copy with the same hash.
    twin: BlockId,
}

impl<H> Block<H> {
    const EMPTY: Self = Self { hash: None, references: 0, twin: 0 };
}

/// Blocks with reference counts, found again by hash, evicted least recently used first.
///
/// What vLLM 0.32's `BlockPool` and `FullAttentionManager` do for one group of full-attention
/// layers:
/// - a full block gets its hash when its tokens are *scheduled*, so that the next request of the
///   same step can hit it;
/// - equal blocks are not merged: a hash may be stored, and later removed, several times; a hit
///   takes the oldest;
/// - a free block keeps its content until it is taken for something else, which is when its
///   eviction is told;
/// - a request's blocks become free last block first; those without a hash are taken again before
///   all others.
///
/// `H` is the engine's hash of a block and everything before it, `S` how the table of hashes hashes
/// those. Only blocks that were in use once take memory.
#[derive(Debug)]
pub struct PagedCache<H, S = RandomState> {
    block_size: usize,
    /// Blocks by id. One that was never used has no entry yet; 0 is the null block, which nobody
    /// holds.
    blocks: Vec<Block<H>>,
    /// The oldest block with each hash.
    oldest: HashMap<H, BlockId, S>,
    free: FreeQueue,
}

impl<H: Copy + Eq + Hash, S: BuildHasher + Default> PagedCache<H, S> {
    /// An empty cache of `num_blocks` blocks that can be used. vLLM's `num_gpu_blocks` counts its
    /// null block too.
    pub fn new(num_blocks: u32, block_size: usize) -> Self {
        let free = FreeQueue::new(num_blocks);
        Self { block_size, blocks: vec![Block::EMPTY], oldest: HashMap::default(), free }
    }

    /// Number of blocks that no request holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Share of the blocks that requests hold, 0 to 1.
    pub fn usage(&self) -> f64 {
        // The same operations in the same order as vLLM, so that the digits agree.
        1.0 - self.free.len() as f64 / f64::from(self.free.blocks().max(1))
    }

    /// Finds the longest run of cached blocks at the start of `hashes` that covers at most
    /// `max_tokens` tokens. `hits` holds nothing else afterwards.
    pub fn find(
        &self,
        hashes: impl IntoIterator<Item = H>,
        max_tokens: usize,
        hits: &mut Vec<BlockId>,
    ) {
        hits.clear();
        let hashes = hashes.into_iter().take(max_tokens / self.block_size);
        hits.extend(hashes.map_while(|hash| self.oldest.get(&hash).copied()));
    }

    /// How many of these blocks are free.
    pub fn idle(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.blocks[**block as usize].references == 0).count()
    }

    /// Whether an empty table that takes `hits`, or any table that takes none, could grow to so
    /// many tokens.
    pub fn fits(&self, table: &BlockTable, hits: &[BlockId], tokens: usize) -> bool {
        self.missing(table, tokens).saturating_sub(hits.len()) + self.idle(hits) <= self.free()
    }

    /// Gives an empty table these blocks, which were found just now.
    pub fn take(&mut self, table: &mut BlockTable, hits: &[BlockId]) {
        for &id in hits {
            let block = &mut self.blocks[id as usize];
            if block.references == 0 {
                self.free.remove(id);
            }
            block.references += 1;
        }
        table.blocks.extend_from_slice(hits);
        table.stored = hits.len();
    }

    /// Number of blocks that a table lacks for so many tokens.
    pub fn missing(&self, table: &BlockTable, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size).saturating_sub(table.blocks.len())
    }

    /// Gives a table room for so many tokens. Returns how many blocks it took; they must be free.
    /// Tells `evicted` the hash of each that had one, in the order in which they were taken.
    pub fn grow(
        &mut self,
        table: &mut BlockTable,
        tokens: usize,
        mut evicted: impl FnMut(H),
    ) -> usize {
        let missing = self.missing(table, tokens);
        for _ in 0..missing {
            let Some(id) = self.free.pop() else {
                debug_assert!(false, "more blocks are promised than there are");
                break;
            };
            if id as usize == self.blocks.len() {
                self.blocks.push(Block::EMPTY);
            }
            if let Some(hash) = self.evict(id) {
                evicted(hash);
            }
            self.blocks[id as usize].references = 1;
            table.blocks.push(id);
        }
        missing
    }

    /// Makes the blocks findable that are full once `computed` tokens are computed; `hash_of` gives
    /// the hash of the request's block at an index. Returns the indices of those that were not
    /// findable before.
    pub fn store(
        &mut self,
        table: &mut BlockTable,
        computed: usize,
        hash_of: impl Fn(usize) -> H,
    ) -> Range<usize> {
        let first = table.stored;
        let stored = first..(computed / self.block_size).max(first);
        for (index, &id) in stored.clone().zip(&table.blocks[stored.clone()]) {
            let hash = hash_of(index);
            self.blocks[id as usize].hash = Some(hash);
            let oldest = *self.oldest.entry(hash).or_insert(id);
            if oldest != id {
                let mut last = oldest;
                while self.blocks[last as usize].twin != 0 {
                    last = self.blocks[last as usize].twin;
                }
                self.blocks[last as usize].twin = id;
            }
        }
        table.stored = stored.end;
        stored
    }

    /// Gives a request's blocks back, last one first; the table is empty afterwards.
    pub fn release(&mut self, table: &mut BlockTable) {
        for id in table.blocks.drain(..).rev() {
            let block = &mut self.blocks[id as usize];
            block.references -= 1;
            if block.references > 0 {
                continue;
            }
            match block.hash {
                None => self.free.push_empty(id),
                Some(_) => self.free.push_cached(id),
            }
        }
        table.stored = 0;
    }

    /// Takes a block's hash away.
    fn evict(&mut self, id: BlockId) -> Option<H> {
        let Block { hash, twin, .. } =
            std::mem::replace(&mut self.blocks[id as usize], Block::EMPTY);
        let hash = hash?;
        match self.oldest.get_mut(&hash) {
            Some(oldest) if *oldest == id && twin != 0 => *oldest = twin,
            Some(oldest) if *oldest == id => drop(self.oldest.remove(&hash)),
            Some(oldest) => {
                let mut before = *oldest;
                while self.blocks[before as usize].twin != id {
                    before = self.blocks[before as usize].twin;
                }
                self.blocks[before as usize].twin = twin;
            }
            None => {}
        }
        Some(hash)
    }

    /// Forgets all hashes. False, and nothing is changed, while a request holds blocks.
    pub fn reset(&mut self) -> bool {
        if self.free.len() < self.free.blocks() as usize {
            return false;
        }
        // The queue still has some for cached that no longer are. As now none is, their order makes
        // no difference, and all of them are taken before any that is cached from now on.
        self.oldest.clear();
        self.blocks.fill(Block::EMPTY);
        true
    }

    /// Number of different hashes that can be found.
    pub fn distinct(&self) -> usize {
        self.oldest.len()
    }
}

#[cfg(test)]
mod tests;
