//! A cache that records its events, with the calls that the engine's batch makes.

use chiasm_engine_model::{BlockId, BlockTable, PagedCache};
use chiasm_kv::event::KvEvent;
use chiasm_types::TokenId;

use super::CacheEvents;
use crate::block_chain::{BlockChain, BlockHash};

pub(super) struct CacheWithEvents {
    cache: PagedCache<BlockHash>,
    events: CacheEvents,
}

impl CacheWithEvents {
    /// Creates a cache. `num_blocks` includes the null block, as vLLM's `num_gpu_blocks` does.
    pub(super) fn new(num_blocks: u32, block_size: usize) -> Self {
        Self {
            cache: PagedCache::new(num_blocks - 1, block_size),
            events: CacheEvents::new(block_size),
        }
    }

    pub(super) fn find(&self, hashes: &[BlockHash], max_tokens: usize) -> Vec<BlockId> {
        let mut hits = Vec::new();
        self.cache.find(hashes.iter().copied(), max_tokens, &mut hits);
        hits
    }

    pub(super) fn fits(&self, table: &BlockTable, hits: &[BlockId], tokens: usize) -> bool {
        self.cache.fits(table, hits, tokens)
    }

    /// Grows a table. Returns `false` and changes nothing if there are too few free blocks.
    pub(super) fn grow(&mut self, table: &mut BlockTable, hits: &[BlockId], tokens: usize) -> bool {
        if !self.cache.fits(table, hits, tokens) {
            return false;
        }
        if !hits.is_empty() {
            self.cache.take(table, hits);
        }
        self.cache.grow(table, tokens, |hash| self.events.evicted(hash));
        true
    }

    pub(super) fn store(
        &mut self,
        table: &mut BlockTable,
        chain: &BlockChain,
        tokens: &[TokenId],
        computed: usize,
    ) {
        let stored = self.cache.store(table, computed, |block| chain.hashes()[block]);
        if !stored.is_empty() {
            self.events.stored(chain, tokens, stored);
        }
    }

    pub(super) fn release(&mut self, table: &mut BlockTable) {
        self.cache.release(table);
    }

    pub(super) fn reset(&mut self) -> bool {
        let emptied = self.cache.reset();
        if emptied {
            self.events.cleared();
        }
        emptied
    }

    pub(super) fn usage(&self) -> f64 {
        self.cache.usage()
    }

    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.take()
    }
}
