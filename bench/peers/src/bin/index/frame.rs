//! Events as engines publish them.

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_types::TokenId;

use crate::trace::{BLOCK_SIZE, Event, Trace};

/// The engines' hashes of blocks, and the number of events for each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// All engines have the same hashes and publish each block once.
    Plain,
    /// Each engine has a seed for its hashes, as vLLM's engines without `PYTHONHASHSEED`.
    OwnHashes,
    /// Each block is stored and evicted twice, as by an engine that computes it for two concurrent
    /// requests.
    Twice,
}

impl Variant {
    /// Returns the number of times that a block is stored or evicted.
    pub(crate) fn times(self) -> usize {
        if self == Self::Twice { 2 } else { 1 }
    }

    fn hash(self, worker: u32, hash: u64) -> ExternalHash {
        let mut seed = 0;
        if self == Self::OwnHashes {
            seed = u64::from(worker + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        ExternalHash::U64(hash ^ seed)
    }
}

/// Returns a batch of text as vLLM 0.32 encodes it, with the fields for a model with one kind of
/// attention.
pub(crate) fn frame(trace: &Trace, batch: usize, variant: Variant) -> Vec<u8> {
    let repeated = |it| std::iter::repeat_n(it, variant.times());
    let events = trace.batch(batch).iter().flat_map(repeated);
    let events = events.map(|it| published_event(trace, it, variant)).collect();
    KvEventBatch { timestamp: 1.5, events, data_parallel_rank: Some(0) }.encode()
}

fn published_event(trace: &Trace, event: &Event, variant: Variant) -> KvEvent {
    let mut published = decoded_event(trace, event, variant);
    let gpu = Some("GPU".to_owned());
    match &mut published {
        KvEvent::BlockStored(stored) => {
            stored.medium = gpu;
            stored.extra_keys = Some(vec![None; event.blocks as usize]);
            stored.group_idx = Some(0);
            stored.kv_cache_spec_kind = Some("full_attention".to_owned());
        }
        KvEvent::BlockRemoved(removed) => {
            removed.medium = gpu;
            removed.group_idx = Some(0);
        }
        _ => {}
    }
    published
}

/// Returns an event of text with the fields that an index uses.
pub(crate) fn decoded_event(trace: &Trace, event: &Event, variant: Variant) -> KvEvent {
    let hash = |hash: u64| variant.hash(event.worker, hash);
    let block_hashes = trace.hashes(event).iter().copied().map(hash);
    if !event.stored {
        let block_hashes = block_hashes.rev().collect();
        return KvEvent::BlockRemoved(BlockRemoved { block_hashes, ..Default::default() });
    }
    KvEvent::BlockStored(BlockStored {
        block_hashes: block_hashes.collect(),
        parent_block_hash: trace.parent_hash(event).map(hash),
        token_ids: trace.tokens(event).map(TokenId).collect(),
        block_size: BLOCK_SIZE as u32,
        ..Default::default()
    })
}
