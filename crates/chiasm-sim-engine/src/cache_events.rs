//! What happens in the KV cache, in vLLM's events.

use std::ops::Range;

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

/// The events since they were last taken.
#[derive(Debug)]
pub(crate) struct CacheEvents {
    block_size: usize,
    events: Vec<KvEvent>,
}

impl CacheEvents {
    pub(crate) fn new(block_size: usize) -> Self {
        Self { block_size, events: Vec::new() }
    }

    /// Others can find these blocks of a request. `chain` and `tokens` describe it up to their end
    /// at least.
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

    /// A block is gone; vLLM has an event for each.
    pub(crate) fn evicted(&mut self, hash: BlockHash) {
        self.events.push(KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: vec![external(hash)],
            medium: Some(MEDIUM.to_owned()),
            group_idx: Some(GROUP),
            ..BlockRemoved::default()
        }));
    }

    /// All blocks are gone.
    pub(crate) fn cleared(&mut self) {
        self.events.push(KvEvent::AllBlocksCleared);
    }

    pub(crate) fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod told_cache;
#[cfg(test)]
mod trace;
