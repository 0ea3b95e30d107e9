//! What an engine publishes.

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_types::TokenId;

use crate::trace::{BLOCK_SIZE, Event, Trace};

/// How engines call blocks, and how often they tell of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Telling {
    /// All engines call a block the same and tell of it once.
    Plain,
    /// Each engine has a seed of its own for its hashes, as vLLM's have where `PYTHONHASHSEED` is
    /// not set.
    OwnHashes,
    /// Each block is stored twice and evicted twice, as by an engine that computed it for two
    /// requests at the same time.
    Twice,
}

impl Telling {
    /// How often each block is told of.
    pub(crate) fn times(self) -> usize {
        if self == Self::Twice { 2 } else { 1 }
    }

    fn hash(self, worker: u32, hash: u64) -> ExternalHash {
        let seed = if self == Self::OwnHashes { u64::from(worker + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) } else { 0 };
        ExternalHash::U64(hash ^ seed)
    }
}

/// A batch as vLLM 0.32 writes one of text, with its fields for a model with one kind of attention.
pub(crate) fn frame(trace: &Trace, batch: usize, telling: Telling) -> Vec<u8> {
    let events = trace.batch(batch).iter();
    let events = events.flat_map(|it| (0..telling.times()).map(move |_| event(trace, it, telling))).collect();
    KvEventBatch { timestamp: 1.5, events, data_parallel_rank: Some(0) }.encode()
}

fn event(trace: &Trace, event: &Event, telling: Telling) -> KvEvent {
    let hash = |hash: u64| telling.hash(event.worker, hash);
    let block_hashes = trace.hashes(event).iter().copied().map(hash);
    let (medium, group_idx) = (Some("GPU".to_owned()), Some(0));
    if !event.stored {
        let block_hashes = block_hashes.rev().collect();
        return KvEvent::BlockRemoved(BlockRemoved { block_hashes, medium, group_idx, ..Default::default() });
    }
    KvEvent::BlockStored(BlockStored {
        block_hashes: block_hashes.collect(),
        parent_block_hash: trace.parent_hash(event).map(hash),
        token_ids: trace.tokens(event).map(TokenId).collect(),
        block_size: BLOCK_SIZE as u32,
        medium,
        extra_keys: Some(vec![None; event.blocks as usize]),
        group_idx,
        kv_cache_spec_kind: Some("full_attention".to_owned()),
        ..Default::default()
    })
}
