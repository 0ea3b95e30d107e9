//! What an engine publishes.

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_types::TokenId;

use crate::trace::{BLOCK_SIZE, Event, Trace};

/// A batch as vLLM 0.32 writes one of text, with its fields for a model with one kind of attention.
pub(crate) fn frame(trace: &Trace, batch: usize) -> Vec<u8> {
    let events = trace.batch(batch).iter().map(|it| event(trace, it)).collect();
    KvEventBatch { timestamp: 1.5, events, data_parallel_rank: Some(0) }.encode()
}

fn event(trace: &Trace, event: &Event) -> KvEvent {
    let block_hashes = trace.hashes(event).iter().copied().map(ExternalHash::U64);
    let (medium, group_idx) = (Some("GPU".to_owned()), Some(0));
    if !event.stored {
        let block_hashes = block_hashes.rev().collect();
        return KvEvent::BlockRemoved(BlockRemoved { block_hashes, medium, group_idx, ..Default::default() });
    }
    KvEvent::BlockStored(BlockStored {
        block_hashes: block_hashes.collect(),
        parent_block_hash: trace.parent_hash(event).map(ExternalHash::U64),
        token_ids: trace.tokens(event).map(TokenId).collect(),
        block_size: BLOCK_SIZE as u32,
        medium,
        extra_keys: Some(vec![None; event.blocks as usize]),
        group_idx,
        kv_cache_spec_kind: Some("full_attention".to_owned()),
        ..Default::default()
    })
}
