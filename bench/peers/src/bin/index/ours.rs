//! Chiasm's side.

use std::hint::black_box;

use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent, KvEventBatch};
use chiasm_kv::{BlockKey, Overlaps, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, TokenId, WorkerId};

use crate::frame::{Telling, frame};
use crate::subject::{From, Index};
use crate::trace::{BLOCK_SIZE, Event, Trace};

/// `chiasm_kv::PrefixIndex`, without a cap.
pub(crate) struct Ours {
    index: PrefixIndex,
    /// How its engines' frames tell of blocks; decoded events are plain.
    telling: Telling,
}

const BLOCK: BlockSize = match BlockSize::new(BLOCK_SIZE as u32) {
    Some(size) => size,
    None => panic!("blocks have tokens"),
};

impl Ours {
    /// An index that knows the workers 0 to `workers` − 1, which hold nothing yet.
    pub(crate) fn new(workers: u32, telling: Telling) -> Self {
        let index = PrefixIndex::new();
        (0..workers).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
        Self { index, telling }
    }
}

fn event(trace: &Trace, event: &Event) -> KvEvent {
    let hash = |hash: &u64| ExternalHash::U64(*hash);
    let block_hashes = trace.hashes(event).iter().map(hash);
    if !event.stored {
        return KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: block_hashes.rev().collect(),
            ..Default::default()
        });
    }
    KvEvent::BlockStored(BlockStored {
        block_hashes: block_hashes.collect(),
        parent_block_hash: trace.parent_hash(event).map(ExternalHash::U64),
        token_ids: trace.tokens(event).map(TokenId).collect(),
        block_size: BLOCK_SIZE as u32,
        ..Default::default()
    })
}

/// A batch of one worker.
pub(crate) enum Work {
    Batch(WorkerId, KvEventBatch),
    /// A worker and the payload that its engine published; decoding is part of applying.
    Frame(WorkerId, Vec<u8>),
}

impl Index for Ours {
    type Work = Work;
    type Token = TokenId;
    type Key = BlockKey;
    type Buffers = Overlaps;

    fn work(&self, trace: &Trace, batch: usize, from: From) -> Work {
        let events = trace.batch(batch);
        let worker = WorkerId(events[0].worker);
        if from == From::Frames {
            return Work::Frame(worker, frame(trace, batch, self.telling));
        }
        let events = events.iter().map(|it| event(trace, it)).collect();
        Work::Batch(worker, KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None })
    }

    fn apply(&self, _: usize, work: Vec<Work>) {
        let mut added = Vec::new();
        for work in work {
            match work {
                Work::Batch(worker, batch) => drop(black_box(self.index.apply(worker, &batch))),
                Work::Frame(worker, payload) => {
                    added.clear();
                    // One that can't be read shows as overlaps that are missing.
                    let _ = self.index.apply_payload(worker, &payload, &mut added, |_| ());
                    black_box(&added);
                }
            }
        }
    }

    fn text(tokens: &[u32]) -> Vec<TokenId> {
        tokens.iter().copied().map(TokenId).collect()
    }

    fn keys(tokens: &[TokenId]) -> Vec<BlockKey> {
        block_keys(&PromptBlocks { tokens, ..Default::default() }, BLOCK)
    }

    fn look_up(&self, keys: &[BlockKey], overlaps: &mut Overlaps) {
        self.index.lookup(keys, overlaps);
        black_box(overlaps.found());
    }

    fn overlaps(&self, keys: &[BlockKey]) -> Vec<(u32, u32)> {
        let mut overlaps = Overlaps::default();
        self.index.lookup(keys, &mut overlaps);
        overlaps.found().iter().map(|(worker, blocks)| (worker.0, *blocks as u32)).collect()
    }

    fn clear(&self, worker: u32) {
        let (events, worker) = (vec![KvEvent::AllBlocksCleared], WorkerId(worker));
        black_box(self.index.apply(worker, &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None }));
    }

    fn bytes(&self) -> Option<usize> {
        Some(self.index.totals().bytes)
    }
}
