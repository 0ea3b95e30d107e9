//! The events and hashes of the indexes of `dynamo-kv-router`.
//!
//! Dynamo hashes the tokens of each block when it reads events (`zmq_wire::create_stored_blocks`),
//! block by block and with a vector for each. Events with tokens are hashed here with the same
//! function, a whole event at once, which is less work. Frames go through Dynamo's own code.

use std::collections::HashMap;

use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
    WorkerWithDpRank, compute_block_hash_for_seq,
};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};

use crate::frame::{Variant, frame};
use crate::subject::Input;
use crate::trace::{BLOCK_SIZE, Event, Trace};

/// The crate's name and version.
pub(crate) const CRATE: &str = "dynamo-kv-router 1.6.1";

/// A batch of one worker.
pub(crate) enum Work {
    /// Events with tokens. Hashing is a part of applying.
    Tokens(Vec<TokenEvent>),
    /// Events with hashes, as Dynamo's publisher passes them on.
    Hashed(Vec<RouterEvent>),
    /// A worker and a payload that its engine published. Decoding is a part of applying.
    Frame(u32, Vec<u8>),
}

/// An event as an engine publishes it.
pub(crate) struct TokenEvent {
    worker: u32,
    /// `None` if blocks were removed.
    tokens: Option<Vec<u32>>,
    hashes: Vec<u64>,
    parent: Option<u64>,
}

impl Work {
    pub(crate) fn new(trace: &Trace, batch: usize, input: Input) -> Self {
        let events = trace.batch(batch).iter().map(|event| token_event(trace, event));
        match input {
            Input::Tokens => Self::Tokens(events.collect()),
            Input::Hashes => Self::Hashed(events.map(hash_event).collect()),
            Input::Frames => {
                let worker = trace.batch(batch)[0].worker;
                Self::Frame(worker, frame(trace, batch, Variant::Plain))
            }
        }
    }

    /// Hashes or decodes the batch as needed and passes its events to `apply`.
    pub(crate) fn for_each(self, listeners: &mut Listeners, apply: impl FnMut(RouterEvent)) {
        match self {
            Self::Tokens(events) => events.into_iter().map(hash_event).for_each(apply),
            Self::Hashed(events) => events.into_iter().for_each(apply),
            Self::Frame(worker, payload) => listeners.decode(worker, &payload, apply),
        }
    }
}

/// The state that Dynamo keeps for each engine whose frames it reads, see
/// `services::indexer::listener`.
#[derive(Default)]
pub(crate) struct Listeners(HashMap<u32, ZmqEventNormalizer>);

impl Listeners {
    /// Decodes a batch and passes its events to `apply`, as `ListenerLoop::apply_live_batch` does.
    fn decode(&mut self, worker: u32, payload: &[u8], mut apply: impl FnMut(RouterEvent)) {
        // A refused batch or event shows as missing overlaps.
        let Ok(batch) = decode_event_batch(payload) else { return };
        let rank = batch.data_parallel_rank.map_or(0, |rank| rank.cast_unsigned());
        let create = || ZmqEventNormalizer::new(BLOCK_SIZE as u32);
        let listener = self.0.entry(worker).or_insert_with(create);
        for raw in batch.events {
            let worker = WorkerWithDpRank::new(u64::from(worker), rank);
            let Some(placed) = listener.normalize(raw, 0, worker) else { continue };
            let event = placed.into_router_event();
            if let Some(event) = event.filter(|event| event.targets_primary() == Ok(true)) {
                apply(event);
            }
        }
    }
}

fn token_event(trace: &Trace, event: &Event) -> TokenEvent {
    let hashes = trace.hashes(event).iter().copied();
    TokenEvent {
        worker: event.worker,
        tokens: event.stored.then(|| trace.tokens(event).collect()),
        hashes: if event.stored { hashes.collect() } else { hashes.rev().collect() },
        parent: trace.parent_hash(event),
    }
}

fn hash_event(event: TokenEvent) -> RouterEvent {
    let TokenEvent { worker, tokens, hashes, parent } = event;
    let hashes = hashes.into_iter().map(ExternalSequenceBlockHash);
    let data = match tokens {
        None => KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: hashes.collect() }),
        Some(tokens) => {
            let blocks = block_hashes(&tokens).into_iter().zip(hashes);
            let block = |(tokens_hash, block_hash)| KvCacheStoredBlockData {
                block_hash,
                tokens_hash,
                mm_extra_info: None,
            };
            KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: parent.map(ExternalSequenceBlockHash),
                start_position: None,
                blocks: blocks.map(block).collect(),
            })
        }
    };
    router_event(worker, data)
}

/// Returns the event of a worker that has dropped all blocks.
pub(crate) fn cleared(worker: u32) -> RouterEvent {
    router_event(worker, KvCacheEventData::Cleared)
}

fn router_event(worker: u32, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(u64::from(worker), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

/// Returns the hashes of a text's full blocks.
pub(crate) fn block_hashes(tokens: &[u32]) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(tokens, BLOCK_SIZE as u32, BlockHashOptions::default())
}

/// Returns the workers with their numbers of leading blocks, sorted by worker.
pub(crate) fn overlaps(scores: &OverlapScores) -> Vec<(u32, u32)> {
    let overlap = scores.scores.iter().map(|(worker, blocks)| (worker.worker_id as u32, *blocks));
    let mut overlaps: Vec<_> = overlap.collect();
    overlaps.sort_unstable();
    overlaps
}
