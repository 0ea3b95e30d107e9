//! The engine's paged KV cache: what `chiasm-engine-caches` decides, told in vLLM's events.

use chiasm_engine_caches::{BlockId, BlockTable, PagedCache as Cache};
use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};
use chiasm_types::TokenId;

use crate::block_chain::{BlockChain, BlockHash};

/// What vLLM calls the memory of the cache, also on CPU.
const MEDIUM: &str = "GPU";
/// All layers are of one kind.
const GROUP: u32 = 0;

fn external(hash: BlockHash) -> ExternalHash {
    ExternalHash::U64(hash.external())
}

/// The cache with its null block, which counts in `num_blocks` and is never handed out, and the events since they were last
/// taken.
#[derive(Debug)]
pub(crate) struct PagedCache {
    block_size: usize,
    cache: Cache<BlockHash>,
    events: Vec<KvEvent>,
}

impl PagedCache {
    /// An empty cache. `num_blocks` includes the null block, as vLLM's `num_gpu_blocks` does.
    pub(crate) fn new(num_blocks: u32, block_size: usize) -> Self {
        Self { block_size, cache: Cache::new(num_blocks.saturating_sub(1), block_size), events: Vec::new() }
    }

    /// The longest run of cached blocks at the start of `hashes` that covers at most `max_tokens` tokens.
    pub(crate) fn find(&self, hashes: &[BlockHash], max_tokens: usize) -> Vec<BlockId> {
        let mut hits = Vec::new();
        self.cache.find(hashes.iter().copied(), max_tokens, &mut hits);
        hits
    }

    /// Whether [`PagedCache::grow`] with the same arguments would succeed.
    pub(crate) fn fits(&self, table: &BlockTable, hits: &[BlockId], tokens: usize) -> bool {
        let missing = self.cache.missing(table, tokens).saturating_sub(hits.len());
        missing + self.cache.idle(hits) <= self.cache.free()
    }

    /// Gives `table` room for `tokens` tokens: takes the `hits` over (only into an empty table), then new blocks,
    /// evicting what they held. False, and nothing is changed, when there are too few free blocks.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, hits: &[BlockId], tokens: usize) -> bool {
        if !self.fits(table, hits, tokens) {
            return false;
        }
        let Self { cache, events, .. } = self;
        if !hits.is_empty() {
            cache.take(table, hits);
        }
        cache.grow(table, tokens, |hash| {
            events.push(KvEvent::BlockRemoved(BlockRemoved {
                block_hashes: vec![external(hash)],
                medium: Some(MEDIUM.to_owned()),
                group_idx: Some(GROUP),
                ..BlockRemoved::default()
            }));
        });
        true
    }

    /// Makes the blocks findable that are full once `computed` tokens have been computed.
    ///
    /// `chain` and `tokens` describe the request's whole sequence, at least `computed` long.
    pub(crate) fn store(&mut self, table: &mut BlockTable, chain: &BlockChain, tokens: &[TokenId], computed: usize) {
        let stored = self.cache.store(table, computed, |block| chain.hashes()[block]);
        if stored.is_empty() {
            return;
        }
        self.events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: chain.hashes()[stored.clone()].iter().copied().map(external).collect(),
            parent_block_hash: stored.start.checked_sub(1).map(|parent| external(chain.hashes()[parent])),
            token_ids: tokens[stored.start * self.block_size..stored.end * self.block_size].to_vec(),
            block_size: self.block_size as u32,
            medium: Some(MEDIUM.to_owned()),
            lora_name: chain.lora().map(str::to_owned),
            extra_keys: Some(chain.extra_keys()[stored].to_vec()),
            group_idx: Some(GROUP),
            kv_cache_spec_kind: Some("full_attention".to_owned()),
            ..BlockStored::default()
        }));
    }

    /// Gives a request's blocks back, last one first; `table` is empty afterwards.
    pub(crate) fn release(&mut self, table: &mut BlockTable) {
        self.cache.release(table);
    }

    /// Forgets all hashes. False, and nothing is changed, while a request holds blocks.
    pub(crate) fn reset(&mut self) -> bool {
        let emptied = self.cache.reset();
        self.events.extend(emptied.then_some(KvEvent::AllBlocksCleared));
        emptied
    }

    /// Share of the blocks that requests hold, 0 to 1.
    pub(crate) fn usage(&self) -> f64 {
        self.cache.usage()
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
