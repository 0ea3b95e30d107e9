//! What the indexes of `dynamo-kv-router` have in common: their events and their hashes.
//!
//! Dynamo hashes the tokens of each block where it reads events, in
//! `zmq_wire::create_stored_blocks`, block by block and with a vector for each. Events that come as
//! tokens are hashed here, a whole event at once with the same function, which is less work; frames
//! go through Dynamo's own code.

use std::collections::HashMap;

use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank, compute_block_hash_for_seq,
};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};

use crate::frame::{Telling, frame};
use crate::subject::From;
use crate::trace::{BLOCK_SIZE, Event, Trace};

/// The crate's name and version.
pub(crate) const CRATE: &str = "dynamo-kv-router 1.6.1";

/// A batch of one worker.
pub(crate) enum Work {
    /// Tokens and the engine's hashes of their blocks; hashing the tokens is part of applying.
    Tokens(Vec<Told>),
    /// Events that are hashed already, as Dynamo's publisher passes them on.
    Hashed(Vec<RouterEvent>),
    /// A worker and the payload that its engine published; decoding is part of applying.
    Frame(u32, Vec<u8>),
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
            From::Frames => Self::Frame(trace.batch(batch)[0].worker, frame(trace, batch, Telling::Plain)),
        }
    }

    /// Hands on what the indexes apply, after what of the work is left to do.
    pub(crate) fn each(self, listeners: &mut Listeners, apply: impl FnMut(RouterEvent)) {
        match self {
            Self::Tokens(told) => told.into_iter().map(publish).for_each(apply),
            Self::Hashed(events) => events.into_iter().for_each(apply),
            Self::Frame(worker, payload) => listeners.live_batch(worker, &payload, apply),
        }
    }
}

/// What Dynamo keeps for each engine whose frames it reads: some of `services::indexer::listener`.
#[derive(Default)]
pub(crate) struct Listeners(HashMap<u32, ZmqEventNormalizer>);

impl Listeners {
    /// Decodes a batch and hands its events to `apply`, as `ListenerLoop::apply_live_batch` hands
    /// them to its index.
    fn live_batch(&mut self, worker: u32, payload: &[u8], mut apply: impl FnMut(RouterEvent)) {
        // What is refused here and below shows as overlaps that are missing.
        let Ok(batch) = decode_event_batch(payload) else { return };
        let rank = batch.data_parallel_rank.map_or(0, |rank| rank.cast_unsigned());
        let listener = self.0.entry(worker).or_insert_with(|| ZmqEventNormalizer::new(BLOCK_SIZE as u32));
        for raw in batch.events {
            let worker = WorkerWithDpRank::new(u64::from(worker), rank);
            let Some(placed) = listener.normalize(raw, 0, worker) else { continue };
            if let Some(event) = placed.into_router_event().filter(|event| event.targets_primary() == Ok(true)) {
                apply(event);
            }
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

/// The event that says that a worker holds nothing any more.
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

/// Workers and the number of leading blocks that each holds, sorted by worker so that sides can be
/// compared.
pub(crate) fn overlaps(scores: &OverlapScores) -> Vec<(u32, u32)> {
    let mut overlaps: Vec<_> =
        scores.scores.iter().map(|(worker, &blocks)| (worker.worker_id as u32, blocks)).collect();
    overlaps.sort_unstable();
    overlaps
}
