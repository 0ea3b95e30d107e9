//! Which blocks each worker holds.

mod worker_blocks;

use std::collections::BTreeMap;

use chiasm_types::{BlockSize, WorkerId};

use crate::block_key::{BlockHasher, BlockKey};
use crate::event::{KvEvent, KvEventBatch};
use worker_blocks::WorkerBlocks;

/// The blocks of every worker, kept up to date by their KV events.
///
/// Each worker has a map from the engine's own block hashes to our [`BlockKey`]s, because events name blocks by hash and
/// give tokens only once. The key of a stored block follows from its parent's key, its tokens and its extra keys. A hash
/// counts its copies: engines store the same block several times and remove each copy.
///
/// # Rules that keep blocks from looking present when they aren't
/// - A block that can't be keyed is remembered by hash, so that its copies are counted, but matches nothing, and neither
///   do its children: the parent is unknown (its event was missed), an extra key can't be read (digests of prompt
///   embeddings, marks of later versions), or the number of tokens, hashes and extra keys don't fit together (an
///   attention group that skips blocks). When a later event tells the key after all, all copies count.
/// - Only medium `GPU` (or none given) counts; blocks offloaded to `CPU` or `STORAGE` and blocks with `REMOTE` locality
///   are ignored, stored and removed alike.
/// - Only KV-cache group 0 (or none given) counts. The groups of a model share the hashes, so counting several would
///   mix up copies. A model with several groups can therefore hold less than the overlap says, when another group of it
///   evicted earlier.
/// - Only blocks of the worker's own block size count: vLLM also reports fragments of blocks.
/// - One hash with two keys is a collision of the engine's 64-bit hashes: it matches nothing.
///
/// Known limit: a client that talks to an engine past us can ask for `kv_cache_report_mode: full`; vLLM then reports
/// reused blocks exactly as it reports new copies, and we count copies that will never be removed.
///
/// ```
/// use chiasm_kv::event::{BlockStored, ExternalHash, KvEvent, KvEventBatch};
/// use chiasm_kv::{PrefixIndex, PromptBlocks, block_keys};
/// use chiasm_types::{BlockSize, TokenId, WorkerId};
///
/// let block_size = BlockSize::new(2).unwrap();
/// let mut index = PrefixIndex::new();
/// index.add_worker(WorkerId(0), block_size);
///
/// let tokens: Vec<TokenId> = [7, 8, 9, 9].map(TokenId).to_vec();
/// let stored = BlockStored {
///     block_hashes: vec![ExternalHash::U64(1)],
///     token_ids: tokens[..2].to_vec(),
///     block_size: 2,
///     ..Default::default()
/// };
/// let events = vec![KvEvent::BlockStored(stored)];
/// index.apply(WorkerId(0), &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None });
///
/// let keys = block_keys(&PromptBlocks { tokens: &tokens, ..Default::default() }, block_size);
/// assert_eq!(index.overlaps(&keys), [(WorkerId(0), 1)]);
/// ```
#[derive(Default)]
pub struct PrefixIndex {
    workers: BTreeMap<WorkerId, WorkerBlocks>,
    hasher: BlockHasher,
}

/// What the index knows of one worker, and what it could not use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerIndexStats {
    /// Distinct block keys that the worker holds now.
    pub blocks: usize,
    /// Hashes that the worker holds now and that match nothing.
    pub unkeyed_blocks: usize,
    /// Events applied since the worker was added.
    pub events: u64,
    /// Events of other media, groups, block sizes or unknown kinds.
    pub ignored_events: u64,
    /// Blocks stored without a known parent.
    pub unknown_parents: u64,
    /// Blocks whose extra keys could not be read.
    pub unreadable_extra_keys: u64,
    /// Removed hashes that were not known.
    pub unknown_removals: u64,
}

impl PrefixIndex {
    /// An index without workers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a worker that holds nothing. One that is known already starts over.
    pub fn add_worker(&mut self, worker: WorkerId, block_size: BlockSize) {
        self.workers.insert(worker, WorkerBlocks::new(block_size));
    }

    /// Forgets a worker.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    /// Takes in what happened to a worker's cache. Returns the keys that it holds now and did not before the event that
    /// stored them. Events of an unknown worker are ignored: they come from one that was just removed.
    pub fn apply(&mut self, worker: WorkerId, batch: &KvEventBatch) -> Vec<BlockKey> {
        let mut added = Vec::new();
        let Some(blocks) = self.workers.get_mut(&worker) else {
            return added;
        };
        for event in &batch.events {
            blocks.stats.events += 1;
            match event {
                KvEvent::BlockStored(stored) => blocks.store(stored, &mut self.hasher, &mut added),
                KvEvent::BlockRemoved(removed) => blocks.remove(removed),
                KvEvent::AllBlocksCleared => blocks.clear(),
                KvEvent::Unknown(_) => blocks.stats.ignored_events += 1,
            }
        }
        added
    }

    /// Forgets a worker's blocks, not the worker: after a restart or lost events.
    pub fn clear(&mut self, worker: WorkerId) {
        if let Some(blocks) = self.workers.get_mut(&worker) {
            blocks.clear();
        }
    }

    /// For each worker, in the order of their ids: how many of the leading `keys` it holds.
    pub fn overlaps(&self, keys: &[BlockKey]) -> Vec<(WorkerId, usize)> {
        self.workers.iter().map(|(worker, blocks)| (*worker, blocks.overlap(keys))).collect()
    }

    /// Whether a worker holds a block.
    pub fn holds(&self, worker: WorkerId, key: BlockKey) -> bool {
        self.workers.get(&worker).is_some_and(|blocks| blocks.holds(key))
    }

    /// Counts for one worker; `None` when it is unknown.
    pub fn stats(&self, worker: WorkerId) -> Option<WorkerIndexStats> {
        self.workers.get(&worker).map(WorkerBlocks::stats)
    }
}

#[cfg(test)]
mod tests;
