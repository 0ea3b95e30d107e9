//! `PositionalIndexer`, a hash map by position and block.
//!
//! It computes the engines' hashes itself, so engines have to hash as Dynamo does. The engines of
//! the traces do.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};

use dynamo_kv_router::indexer::SyncIndexer;
use dynamo_kv_router::indexer::positional::{LevelIndex, PositionalIndexer, SearchMode};
use dynamo_kv_router::protocols::{LocalBlockHash, WorkerWithDpRank};
use rustc_hash::FxHashMap;

use crate::dynamo::{Listeners, Work, block_hashes, cleared, overlaps};
use crate::subject::{Index, Input, LANES, lane};
use crate::trace::Trace;

/// The jump of the search, as its documentation proposes.
const JUMP: usize = 32;

/// The state of a thread.
#[derive(Default)]
struct Lane {
    /// The blocks of the lane's workers by the engine's hash.
    blocks: FxHashMap<WorkerWithDpRank, LevelIndex>,
    listeners: Listeners,
}

pub(crate) struct Positional {
    index: PositionalIndexer,
    lanes: [Mutex<Lane>; LANES],
}

impl Positional {
    /// Creates an empty index with the default search.
    pub(crate) fn new() -> Self {
        let index = PositionalIndexer::new_with_mode(JUMP, SearchMode::Strided);
        Self { index, lanes: Default::default() }
    }
}

impl Index for Positional {
    type Work = Work;
    type Token = u32;
    type Key = LocalBlockHash;
    type Buffers = ();

    fn work(&self, trace: &Trace, batch: usize, input: Input) -> Work {
        Work::new(trace, batch, input)
    }

    fn apply(&self, lane: usize, work: Vec<Work>) {
        let mut lane = self.lanes[lane].lock().unwrap_or_else(PoisonError::into_inner);
        let Lane { blocks, listeners } = &mut *lane;
        for work in work {
            // A refused event shows as missing overlaps.
            work.for_each(listeners, |event| {
                let _ = self.index.apply_event(blocks, event, None);
            });
        }
    }

    fn text(tokens: &[u32]) -> Vec<u32> {
        tokens.to_vec()
    }

    fn keys(tokens: &[u32]) -> Vec<LocalBlockHash> {
        block_hashes(tokens)
    }

    fn look_up(&self, keys: &[LocalBlockHash], (): &mut ()) {
        black_box(self.index.find_matches(keys, false));
    }

    fn overlaps(&self, keys: &[LocalBlockHash]) -> Vec<(u32, u32)> {
        overlaps(&self.index.find_matches(keys, false))
    }

    fn clear(&self, worker: u32) {
        let mut lane = self.lanes[lane(worker)].lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.index.apply_event(&mut lane.blocks, cleared(worker), None);
    }
}
