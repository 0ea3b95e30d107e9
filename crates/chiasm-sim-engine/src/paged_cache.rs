//! The engine's paged KV cache with prefix reuse.

use std::collections::HashMap;

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};
use chiasm_types::TokenId;

use crate::block_chain::{BlockChain, BlockHash};
use crate::free_queue::{BlockId, FreeQueue};

/// What vLLM calls the memory of the cache, also on CPU.
const MEDIUM: &str = "GPU";
/// All layers are of one kind.
const GROUP: u32 = 0;

fn external(hash: BlockHash) -> ExternalHash {
    ExternalHash::U64(hash.external())
}

/// The blocks of one request: the first `stored` of them have a hash.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    blocks: Vec<BlockId>,
    stored: usize,
}

impl BlockTable {
    /// Number of its blocks that other requests can find.
    pub(crate) fn stored(&self) -> usize {
        self.stored
    }
}

/// Blocks with reference counts, found again by hash, evicted least recently used first.
///
/// What vLLM 0.32's `BlockPool` and `FullAttentionManager` do for one group of full-attention layers:
/// - block 0 is the null block: it counts in `num_blocks` but is never handed out;
/// - a full block gets its hash when its tokens are *scheduled*, so the next request of the same step can hit it;
/// - equal blocks are not merged: the same hash may be stored, and later removed, several times;
/// - a free block keeps its hash until it is taken for something else, which is when the eviction is reported;
/// - a request's blocks become free last block first; those without a hash are reused before all others.
#[derive(Debug)]
pub(crate) struct PagedCache {
    block_size: usize,
    references: Vec<u32>,
    hash_of: Vec<Option<BlockHash>>,
    /// Holders of each hash, oldest first: a hit takes the first.
    cached: HashMap<BlockHash, Vec<BlockId>>,
    free: FreeQueue,
    events: Vec<KvEvent>,
}

impl PagedCache {
    /// `num_blocks` includes the null block, as vLLM's `num_gpu_blocks` does.
    pub(crate) fn new(num_blocks: u32, block_size: usize) -> Self {
        let mut free = FreeQueue::new(num_blocks);
        free.pop_front();
        Self {
            block_size,
            references: vec![0; num_blocks as usize],
            hash_of: vec![None; num_blocks as usize],
            cached: HashMap::new(),
            free,
            events: Vec::new(),
        }
    }

    /// The longest run of cached blocks at the start of `hashes` that covers at most `max_tokens` tokens.
    pub(crate) fn find(&self, hashes: &[BlockHash], max_tokens: usize) -> Vec<BlockId> {
        hashes
            .iter()
            .take(max_tokens / self.block_size)
            .map_while(|hash| self.cached.get(hash)?.first().copied())
            .collect()
    }

    /// Whether [`PagedCache::grow`] with the same arguments would succeed.
    pub(crate) fn fits(&self, table: &BlockTable, hits: &[BlockId], tokens: usize) -> bool {
        let idle_hits = hits.iter().filter(|&&block| self.references[block as usize] == 0).count();
        self.missing_blocks(table, hits, tokens) + idle_hits <= self.free.len()
    }

    fn missing_blocks(&self, table: &BlockTable, hits: &[BlockId], tokens: usize) -> usize {
        tokens.div_ceil(self.block_size).saturating_sub(table.blocks.len() + hits.len())
    }

    /// Gives `table` room for `tokens` tokens: takes the `hits` over (only into an empty table), then new blocks,
    /// evicting what they held. False, and nothing is changed, when there are too few free blocks.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, hits: &[BlockId], tokens: usize) -> bool {
        if !self.fits(table, hits, tokens) {
            return false;
        }
        let missing = self.missing_blocks(table, hits, tokens);
        for &block in hits {
            if self.references[block as usize] == 0 {
                self.free.remove(block);
            }
            self.references[block as usize] += 1;
        }
        table.stored += hits.len();
        table.blocks.extend_from_slice(hits);
        for _ in 0..missing {
            let Some(block) = self.free.pop_front() else {
                break;
            };
            self.evict(block);
            self.references[block as usize] = 1;
            table.blocks.push(block);
        }
        true
    }

    /// Makes the blocks findable that are full once `computed` tokens have been computed.
    ///
    /// `chain` and `tokens` describe the request's whole sequence, at least `computed` long.
    pub(crate) fn store(&mut self, table: &mut BlockTable, chain: &BlockChain, tokens: &[TokenId], computed: usize) {
        let (first, end) = (table.stored, computed / self.block_size);
        if first >= end {
            return;
        }
        let hashes = &chain.hashes()[first..end];
        for (&block, &hash) in table.blocks[first..end].iter().zip(hashes) {
            self.hash_of[block as usize] = Some(hash);
            self.cached.entry(hash).or_default().push(block);
        }
        table.stored = end;
        self.events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: hashes.iter().copied().map(external).collect(),
            parent_block_hash: first.checked_sub(1).map(|parent| external(chain.hashes()[parent])),
            token_ids: tokens[first * self.block_size..end * self.block_size].to_vec(),
            block_size: self.block_size as u32,
            medium: Some(MEDIUM.to_owned()),
            lora_name: chain.lora().map(str::to_owned),
            extra_keys: Some(chain.extra_keys()[first..end].to_vec()),
            group_idx: Some(GROUP),
            kv_cache_spec_kind: Some("full_attention".to_owned()),
            ..BlockStored::default()
        }));
    }

    /// Gives a request's blocks back, last one first; `table` is empty afterwards.
    pub(crate) fn release(&mut self, table: &mut BlockTable) {
        let (mut with_hash, mut without) = (Vec::new(), Vec::new());
        for block in table.blocks.drain(..).rev() {
            self.references[block as usize] -= 1;
            if self.references[block as usize] == 0 {
                let queue = if self.hash_of[block as usize].is_some() { &mut with_hash } else { &mut without };
                queue.push(block);
            }
        }
        table.stored = 0;
        self.free.prepend(&without);
        self.free.append(&with_hash);
    }

    fn evict(&mut self, block: BlockId) {
        let Some(hash) = self.hash_of[block as usize].take() else {
            return;
        };
        if let Some(holders) = self.cached.get_mut(&hash) {
            holders.retain(|&holder| holder != block);
            if holders.is_empty() {
                self.cached.remove(&hash);
            }
        }
        self.events.push(KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: vec![external(hash)],
            medium: Some(MEDIUM.to_owned()),
            group_idx: Some(GROUP),
            ..BlockRemoved::default()
        }));
    }

    /// Forgets all hashes. False, and nothing is changed, while a request holds blocks.
    pub(crate) fn reset(&mut self) -> bool {
        if self.used_blocks() != 0 {
            return false;
        }
        self.cached.clear();
        self.hash_of.fill(None);
        self.events.push(KvEvent::AllBlocksCleared);
        true
    }

    fn usable_blocks(&self) -> usize {
        self.references.len() - 1
    }

    fn used_blocks(&self) -> usize {
        self.usable_blocks() - self.free.len()
    }

    /// Share of the blocks that requests hold, 0 to 1.
    pub(crate) fn usage(&self) -> f64 {
        // The same operations in the same order as vLLM, so that the digits agree.
        1.0 - self.free.len() as f64 / self.usable_blocks().max(1) as f64
    }

    /// What happened since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod trace;
