//! What the indexes of `dynamo-kv-router` have in common: their events and their hashes.
//!
//! Dynamo hashes the tokens of each block where events are published, in `zmq_wire::create_stored_blocks`, block by block
//! and with a vector for each. Here a whole event is hashed at once with the same function, which is less work.

use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, compute_block_hash_for_seq,
};

use crate::subject::From;
use crate::trace::{BLOCK_SIZE, Event, Trace};

/// The crate's name and version.
pub(crate) const CRATE: &str = "dynamo-kv-router 1.6.1";

/// A batch of one worker.
pub(crate) enum Work {
    /// As the engine tells it.
    Tokens(Vec<Told>),
    /// As Dynamo's publisher passes it on.
    Hashed(Vec<RouterEvent>),
}

/// An event as an engine tells it.
pub(crate) struct Told {
    worker: u32,
    /// None if blocks were removed.
    tokens: Option<Vec<u32>>,
    hashes: Vec<u64>,
    parent: Option<u64>,
}

impl Work {
    /// Makes a batch ready.
    pub(crate) fn new(trace: &Trace, batch: usize, from: From) -> Self {
        let told = trace.batch(batch).iter().map(|event| told(trace, event));
        match from {
            From::Tokens => Self::Tokens(told.collect()),
            From::Hashes => Self::Hashed(told.map(publish).collect()),
        }
    }

    /// Hands on what the indexes apply, after what of the work is left to do.
    pub(crate) fn each(self, apply: impl FnMut(RouterEvent)) {
        match self {
            Self::Tokens(told) => told.into_iter().map(publish).for_each(apply),
            Self::Hashed(events) => events.into_iter().for_each(apply),
        }
    }
}

fn told(trace: &Trace, event: &Event) -> Told {
    let hashes = trace.hashes(event).iter().copied();
    Told {
        worker: event.worker,
        tokens: event.stored.then(|| trace.tokens(event).collect()),
        hashes: if event.stored { hashes.collect() } else { hashes.rev().collect() },
        parent: trace.parent_hash(event),
    }
}

fn publish(told: Told) -> RouterEvent {
    let Told { worker, tokens, hashes, parent } = told;
    let hashes = hashes.into_iter().map(ExternalSequenceBlockHash);
    let data = match tokens {
        None => KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: hashes.collect() }),
        Some(tokens) => KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: (block_hashes(&tokens).into_iter().zip(hashes))
                .map(|(tokens_hash, block_hash)| KvCacheStoredBlockData {
                    block_hash,
                    tokens_hash,
                    mm_extra_info: None,
                })
                .collect(),
        }),
    };
    event(worker, data)
}

/// That a worker holds nothing any more.
pub(crate) fn cleared(worker: u32) -> RouterEvent {
    event(worker, KvCacheEventData::Cleared)
}

fn event(worker: u32, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(u64::from(worker), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

/// The hashes of a text's full blocks.
pub(crate) fn block_hashes(tokens: &[u32]) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(tokens, BLOCK_SIZE as u32, BlockHashOptions::default())
}

/// In the order of workers.
pub(crate) fn overlaps(scores: &OverlapScores) -> Vec<(u32, u32)> {
    let mut overlaps: Vec<_> =
        scores.scores.iter().map(|(worker, &blocks)| (worker.worker_id as u32, blocks)).collect();
    overlaps.sort_unstable();
    overlaps
}
