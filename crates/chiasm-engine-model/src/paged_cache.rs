//! The paged KV cache with prefix reuse.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::ops::Range;

use crate::free_queue::{BlockId, FreeQueue};

/// The blocks of one request. Other requests can find the first [`stored`](BlockTable::stored) of
/// them.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    stored: usize,
}

impl BlockTable {
    /// Returns the number of blocks, including a partly filled last one.
    #[allow(clippy::len_without_is_empty, reason = "is_empty is not needed")]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the number of blocks that other requests can find.
    pub fn stored(&self) -> usize {
        self.stored
    }
}

#[derive(Clone, Copy, Debug)]
struct Block<H> {
    /// The hash by which other requests find the block, once it is full.
    hash: Option<H>,
    references: u32,
    /// The next younger block with the same hash, or 0.
    next_copy: BlockId,
}

impl<H> Block<H> {
    const EMPTY: Self = Self { hash: None, references: 0, next_copy: 0 };
}

/// A cache of blocks with reference counts, found again by hash, evicted least recently used first.
///
/// It works like vLLM 0.32's `BlockPool` and `FullAttentionManager` for one group of full-attention
/// layers:
/// - a full block gets its hash when its tokens are *scheduled*, so that the next request of the
///   same step can hit it;
/// - equal blocks are not merged: a hash may be stored, and later removed, several times; a hit
///   takes the oldest block;
/// - a free block keeps its content until it is allocated again, which is when it is evicted;
/// - a request's blocks are freed from the last to the first; those without a hash are allocated
///   again before all others.
///
/// `H` is the engine's hash of a block and everything before it, `S` the hasher of the hash table.
/// Only blocks that have been used take memory.
#[derive(Debug)]
pub struct PagedCache<H, S = RandomState> {
    block_size: usize,
    /// Blocks by number. A block that was never used has no entry yet; 0 is the null block, which
    /// no request holds.
    blocks: Vec<Block<H>>,
    /// The oldest block with each hash.
    oldest: HashMap<H, BlockId, S>,
    free: FreeQueue,
}

impl<H: Copy + Eq + Hash, S: BuildHasher + Default> PagedCache<H, S> {
    /// Creates an empty cache of `num_blocks` usable blocks. vLLM's `num_gpu_blocks` also counts
    /// its null block.
    pub fn new(num_blocks: u32, block_size: usize) -> Self {
        let free = FreeQueue::new(num_blocks);
        Self { block_size, blocks: vec![Block::EMPTY], oldest: HashMap::default(), free }
    }

    /// Returns the number of blocks that no request holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the fraction of the blocks that requests hold, 0 to 1.
    pub fn usage(&self) -> f64 {
        // The same operations in the same order as vLLM, so that the digits agree.
        1.0 - self.free.len() as f64 / f64::from(self.free.blocks().max(1))
    }

    /// Finds the longest run of cached blocks at the start of `hashes` that covers at most
    /// `max_tokens` tokens, and writes it to `hits`.
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

    /// Returns the number of these blocks that are free.
    pub fn count_free(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.blocks[**block as usize].references == 0).count()
    }

    /// Returns `true` if an empty table that takes `hits`, or any table that takes none, can grow
    /// to `tokens` tokens.
    pub fn fits(&self, table: &BlockTable, hits: &[BlockId], tokens: usize) -> bool {
        let missing = self.missing(table, tokens).saturating_sub(hits.len());
        missing + self.count_free(hits) <= self.free()
    }

    /// Adds `hits` to an empty table. They must have been found without a change in between.
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

    /// Returns the number of blocks that a table lacks for `tokens` tokens.
    pub fn missing(&self, table: &BlockTable, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size).saturating_sub(table.blocks.len())
    }

    /// Grows a table to `tokens` tokens and returns the number of allocated blocks, which must be
    /// free.
    ///
    /// Calls `evicted` with the hash of each allocated block that had one, in the order of
    /// allocation.
    pub fn grow(
        &mut self,
        table: &mut BlockTable,
        tokens: usize,
        mut evicted: impl FnMut(H),
    ) -> usize {
        let missing = self.missing(table, tokens);
        for _ in 0..missing {
            let Some(id) = self.free.pop() else {
                debug_assert!(false, "more blocks are allocated than are free");
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

    /// Makes the blocks findable that are full once `computed` tokens are computed. Returns the
    /// indices of those that were not findable before.
    ///
    /// `hash_of` returns the hash of the request's block at an index.
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
                while self.blocks[last as usize].next_copy != 0 {
                    last = self.blocks[last as usize].next_copy;
                }
                self.blocks[last as usize].next_copy = id;
            }
        }
        table.stored = stored.end;
        stored
    }

    /// Releases the blocks of a table, from the last to the first; the table is empty afterwards.
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

    /// Removes the hash of a block and returns it.
    fn evict(&mut self, id: BlockId) -> Option<H> {
        let Block { hash, next_copy, .. } =
            std::mem::replace(&mut self.blocks[id as usize], Block::EMPTY);
        let hash = hash?;
        match self.oldest.get_mut(&hash) {
            Some(oldest) if *oldest == id && next_copy != 0 => *oldest = next_copy,
            Some(oldest) if *oldest == id => drop(self.oldest.remove(&hash)),
            Some(oldest) => {
                let mut previous = *oldest;
                while self.blocks[previous as usize].next_copy != id {
                    previous = self.blocks[previous as usize].next_copy;
                }
                self.blocks[previous as usize].next_copy = next_copy;
            }
            None => {}
        }
        Some(hash)
    }

    /// Removes all hashes. Returns `false`, without a change, while a request holds blocks.
    pub fn reset(&mut self) -> bool {
        if self.free.len() < self.free.blocks() as usize {
            return false;
        }
        // The queue still lists blocks as cached that have no content any more. Their order makes
        // no difference, and all of them are allocated before any that is cached from now on.
        self.oldest.clear();
        self.blocks.fill(Block::EMPTY);
        true
    }

    /// Returns the number of different hashes that can be found.
    pub fn distinct_hashes(&self) -> usize {
        self.oldest.len()
    }
}

#[cfg(test)]
mod tests;
