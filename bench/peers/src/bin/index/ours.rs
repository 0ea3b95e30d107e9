//! Chiasm's side.

use std::hint::black_box;

use chiasm_kv::event::{KvEvent, KvEventBatch};
use chiasm_kv::{BlockKey, Overlaps, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, TokenId, WorkerId};

use crate::frame::{Variant, decoded_event, frame};
use crate::subject::{Index, Input};
use crate::trace::{BLOCK_SIZE, Trace};

/// `chiasm_kv::PrefixIndex` without a limit.
pub(crate) struct Ours {
    index: PrefixIndex,
    /// The variant of frames; decoded events are plain.
    variant: Variant,
}

const BLOCK: BlockSize = match BlockSize::new(BLOCK_SIZE as u32) {
    Some(size) => size,
    None => panic!("blocks have tokens"),
};

impl Ours {
    /// Creates an index with the workers 0 to `workers` − 1.
    pub(crate) fn new(workers: u32, variant: Variant) -> Self {
        let index = PrefixIndex::new();
        (0..workers).for_each(|worker| index.add_worker(WorkerId(worker), BLOCK));
        Self { index, variant }
    }
}

/// A batch of one worker.
pub(crate) enum Work {
    Batch(WorkerId, KvEventBatch),
    /// A payload that the engine published. Decoding is a part of applying.
    Frame(WorkerId, Vec<u8>),
}

fn batch(events: Vec<KvEvent>) -> KvEventBatch {
    KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None }
}

impl Index for Ours {
    type Work = Work;
    type Token = TokenId;
    type Key = BlockKey;
    type Buffers = Overlaps;

    fn work(&self, trace: &Trace, number: usize, input: Input) -> Work {
        let events = trace.batch(number);
        let worker = WorkerId(events[0].worker);
        if input == Input::Frames {
            return Work::Frame(worker, frame(trace, number, self.variant));
        }
        let events = events.iter().map(|event| decoded_event(trace, event, Variant::Plain));
        Work::Batch(worker, batch(events.collect()))
    }

    fn apply(&self, _: usize, work: Vec<Work>) {
        let mut added = Vec::new();
        for work in work {
            match work {
                Work::Batch(worker, batch) => drop(black_box(self.index.apply(worker, &batch))),
                Work::Frame(worker, payload) => {
                    added.clear();
                    // A malformed payload shows as missing overlaps.
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
        let cleared = batch(vec![KvEvent::AllBlocksCleared]);
        black_box(self.index.apply(WorkerId(worker), &cleared));
    }

    fn bytes(&self) -> Option<usize> {
        Some(self.index.totals().bytes)
    }
}
