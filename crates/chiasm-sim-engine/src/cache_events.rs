//! Changes of the KV cache as vLLM's events.

use std::ops::Range;

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};
use chiasm_types::TokenId;

use crate::block_chain::{BlockChain, BlockHash};

/// vLLM's name of the cache's memory, also on CPU.
const MEDIUM: &str = "GPU";
/// The cache group; all layers belong to one.
const GROUP: u32 = 0;

fn external(hash: BlockHash) -> ExternalHash {
    ExternalHash::U64(hash.external())
}

/// The events since the last call of [`take`](Self::take).
#[derive(Debug)]
pub(crate) struct CacheEvents {
    block_size: usize,
    events: Vec<KvEvent>,
}

impl CacheEvents {
    pub(crate) fn new(block_size: usize) -> Self {
        Self { block_size, events: Vec::new() }
    }

    /// Records that other requests can find these blocks of a request. `chain` and `tokens` extend
    /// at least to the end of the blocks.
    pub(crate) fn stored(&mut self, chain: &BlockChain, tokens: &[TokenId], blocks: Range<usize>) {
        self.events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: chain.hashes()[blocks.clone()].iter().copied().map(external).collect(),
            parent_block_hash: blocks
                .start
                .checked_sub(1)
                .map(|parent| external(chain.hashes()[parent])),
            token_ids: tokens[blocks.start * self.block_size..blocks.end * self.block_size]
                .to_vec(),
            block_size: self.block_size as u32,
            medium: Some(MEDIUM.to_owned()),
            lora_name: chain.lora().map(str::to_owned),
            extra_keys: Some(chain.extra_keys()[blocks].to_vec()),
            group_idx: Some(GROUP),
            kv_cache_spec_kind: Some("full_attention".to_owned()),
            ..BlockStored::default()
        }));
    }

    /// Records that a block was evicted; vLLM has one event per block.
    pub(crate) fn evicted(&mut self, hash: BlockHash) {
        self.events.push(KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: vec![external(hash)],
            medium: Some(MEDIUM.to_owned()),
            group_idx: Some(GROUP),
            ..BlockRemoved::default()
        }));
    }

    /// Records that all blocks were removed.
    pub(crate) fn cleared(&mut self) {
        self.events.push(KvEvent::AllBlocksCleared);
    }

    pub(crate) fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }
}

#[cfg(test)]
mod cache_with_events;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trace;
