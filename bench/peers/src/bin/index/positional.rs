//! `PositionalIndexer`: a hash map by position and block.
//!
//! It computes the engines' hashes itself, so engines have to hash as Dynamo does; those of the
//! traces do.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};

use dynamo_kv_router::indexer::SyncIndexer;
use dynamo_kv_router::indexer::positional::{LevelIndex, PositionalIndexer, SearchMode};
use dynamo_kv_router::protocols::{LocalBlockHash, RouterEvent, WorkerWithDpRank};
use rustc_hash::FxHashMap;

use crate::dynamo::{Listeners, Work, block_hashes, cleared, overlaps};
use crate::subject::{From, Index, LANES, lane};
use crate::trace::Trace;

/// How far it jumps: what its documentation proposes.
const JUMP: usize = 32;

/// What each thread keeps for itself.
#[derive(Default)]
struct Lane {
    /// The blocks of a lane's workers by the engine's hash.
    blocks: FxHashMap<WorkerWithDpRank, LevelIndex>,
    listeners: Listeners,
}

/// The index, and what its threads keep.
pub(crate) struct Positional {
    index: PositionalIndexer,
    lanes: [Mutex<Lane>; LANES],
}

impl Positional {
    /// An empty index that searches in strides, which is its default.
    pub(crate) fn new() -> Self {
        let index = PositionalIndexer::new_with_mode(JUMP, SearchMode::Strided);
        Self { index, lanes: [(); LANES].map(|()| Mutex::default()) }
    }

    fn event(&self, blocks: &mut FxHashMap<WorkerWithDpRank, LevelIndex>, event: RouterEvent) {
        // A refused event shows as overlaps that are missing.
        let _ = self.index.apply_event(blocks, event, None);
    }
}

impl Index for Positional {
    type Work = Work;
    type Token = u32;
    type Key = LocalBlockHash;
    type Buffers = ();

    fn work(&self, trace: &Trace, batch: usize, from: From) -> Work {
        Work::new(trace, batch, from)
    }

    fn apply(&self, lane: usize, work: Vec<Work>) {
        let mut lane = self.lanes[lane].lock().unwrap_or_else(PoisonError::into_inner);
        let Lane { blocks, listeners } = &mut *lane;
        work.into_iter().for_each(|work| work.each(listeners, |event| self.event(blocks, event)));
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
        self.event(&mut lane.blocks, cleared(worker));
    }
}
