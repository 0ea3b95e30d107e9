//! The prefix index: the blocks that each worker holds, and lookups of a prompt's overlaps.

mod background;
mod cache;
mod extra_keys;
mod holders;
mod hybrid;
mod list;
mod lookup;
mod radix_tree;
mod release;
mod shedding;
mod snapshot;
mod source;
mod table;
mod trees;
mod use_counter;
mod worker;
mod workers;

use std::cell::RefCell;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use chiasm_types::{BlockSize, WorkerId};

use crate::KvError;
use crate::block_key::{BlockKey, KeyScheme};
use crate::event::{KvEvent, KvEventBatch, with_decoded};
pub use background::Chore;
use background::{Background, run_immediately};
use cache::{Cache, Prompts};
use holders::HolderId;
use hybrid::{Hybrid, Path};
use list::WorkerList;
use lookup::{Lookup, OverlapGroup, SearchBuffers};
pub use snapshot::{Snapshot, SnapshotError};
use trees::Trees;
use use_counter::UseCounter;
use worker::{Scratch, Worker};
use workers::Workers;

/// An index of the blocks that every worker holds, kept up to date by KV events.
///
/// Every method takes `&self` and may be called from any thread. Batches of one worker are applied
/// one at a time; batches of different workers and lookups run in parallel. A lookup returns a
/// consistent snapshot of all workers at one moment during the call. It sees each event of a batch
/// completely or not at all. `docs/prefix-index.md` describes the structure.
///
/// Events identify blocks by the engine's own hashes, and contain a block's tokens only when it is
/// stored. So each worker has a map from these hashes to our [`BlockKey`]s. The key of a stored
/// block follows from its parent's key, its tokens and its extra keys. The map counts the copies of
/// each hash, because engines store the same block several times and remove each copy.
///
/// # Rules that prevent false matches
/// - A block that can't be keyed is recorded by hash, so that its copies are counted. Neither the
///   block nor its children match anything. A block can't be keyed if its parent is unknown because
///   an event was missed, or if an extra key can't be read (digests of prompt embeddings, marks of
///   later versions). The same holds if the numbers of tokens, hashes and extra keys are
///   inconsistent, as for an attention group that skips blocks. If a later event reveals the key,
///   all copies count.
/// - The overlap covers the device: medium `GPU`, or no medium. `CPU` and `STORAGE` count in
///   [`Overlaps::with_lower_tiers`] only. Other media and blocks with `REMOTE` locality are
///   ignored.
/// - The overlap must satisfy every KV-cache group that events have named; see
///   `docs/prefix-index.md`.
/// - Only blocks of the worker's own block size count, because vLLM also reports fragments of
///   blocks.
/// - A hash with two keys is a collision of the engine's 64-bit hashes. It matches nothing.
/// - Blocks that were shed to stay below [`PrefixIndex::with_max_bytes`] count as never stored.
///
/// # Known limits
/// - vLLM reports fragments of blocks and groups with larger blocks alike, by another block size. A
///   model with such groups can hold less than the reported overlap.
/// - With speculative decoding, vLLM computes the last block again.
/// - A client that bypasses Chiasm can request `kv_cache_report_mode: full`. vLLM then reports
///   reused blocks like new copies, and the index counts copies that are never removed.
///
/// ```
/// use chiasm_kv::event::{BlockStored, ExternalHash, KvEvent, KvEventBatch};
/// use chiasm_kv::{PrefixIndex, PromptBlocks, block_keys};
/// use chiasm_types::{BlockSize, TokenId, WorkerId};
///
/// let block_size = BlockSize::new(2).unwrap();
/// let index = PrefixIndex::new();
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
///
/// # Background work
/// Releasing the blocks of a removed or cleared worker, and shedding, take time in proportion to
/// the number of blocks. No lookup waits for this: results exclude these blocks as soon as the call
/// returns, and a [`Chore`] frees the memory. Without [`PrefixIndex::in_background`], the call runs
/// the chore before it returns.
pub struct PrefixIndex {
    core: Arc<Core>,
    background: Background,
}

/// The state that calls and chores share.
struct Core {
    workers: Workers,
    prompts: Prompts,
    max_bytes: Option<usize>,
    /// The number of the worker at which shedding continues. Locked by the one thread that sheds.
    shedding: Mutex<usize>,
    /// The number of chores that release blocks, running or not started yet.
    pending_releases: AtomicUsize,
}

/// The counts of one worker: its blocks, and the events that the index could not use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerIndexStats {
    /// The number of distinct block keys that the worker holds, summed over KV-cache groups and
    /// tiers.
    pub blocks: usize,
    /// The number of hashes that the worker holds and that match nothing.
    pub unkeyed_blocks: usize,
    /// The number of events applied since the worker was added.
    pub events: u64,
    /// The number of events with other media, other block sizes or of unknown kinds.
    pub ignored_events: u64,
    /// The number of blocks stored without a known parent.
    pub unknown_parents: u64,
    /// The number of blocks whose extra keys could not be read.
    pub unreadable_extra_keys: u64,
    /// The number of removed hashes that were not known.
    pub unknown_removals: u64,
    /// The number of hashes shed to stay below the cap.
    pub shed_blocks: u64,
    /// The number of calls that changed the worker's blocks: [`PrefixIndex::apply`],
    /// [`PrefixIndex::apply_payload`] with a readable payload, [`PrefixIndex::presume`],
    /// [`PrefixIndex::forget`] and [`PrefixIndex::clear`]. It continues from the revision of a
    /// restored [`PrefixIndex::snapshot`].
    pub revision: u64,
}

/// The counts of the whole index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// The number of distinct blocks that any worker holds.
    pub blocks: usize,
    /// The number of pairs of a worker and a hash of its engine.
    pub entries: usize,
    /// The number of bytes on the heap, without the allocator's overhead. Includes tree memory that
    /// chores have not freed yet.
    pub bytes: usize,
    /// The number of nodes of the radix trees. A node is a run of blocks that belong to the same
    /// prompts. Lookups go from node to node.
    pub nodes: usize,
    /// The number of pairs shed to stay below the cap, over the present workers.
    pub shed: u64,
}

/// The result of a lookup. Reuse it for the next lookup to reuse its buffers.
#[derive(Default)]
pub struct Overlaps {
    /// The list of workers at the last lookup.
    list: Arc<WorkerList>,
    found: Vec<(WorkerId, usize)>,
    search: SearchBuffers,
    /// The overlap of each holder, 64 per element.
    depths: Vec<[u32; 64]>,
    lower: Vec<(WorkerId, usize)>,
    has_lower: bool,
}

impl Overlaps {
    /// Returns each worker that holds at least the first block, with its number of leading blocks,
    /// in the order of worker ids.
    pub fn found(&self) -> &[(WorkerId, usize)] {
        &self.found
    }

    /// Returns the workers like [`Overlaps::found`], with overlaps that include lower tiers: also
    /// the blocks that follow without a gap on the CPU or in storage. A worker can load these
    /// blocks instead of computing them.
    pub fn with_lower_tiers(&self) -> &[(WorkerId, usize)] {
        if self.has_lower { &self.lower } else { &self.found }
    }

    /// Returns one worker's overlap, or 0 if the worker was not found. Takes time logarithmic in
    /// the number of workers found.
    pub fn get(&self, worker: WorkerId) -> usize {
        overlap_of(&self.found, worker)
    }

    /// Returns one worker's overlap including lower tiers, like [`Overlaps::with_lower_tiers`], or
    /// 0 if the worker was not found.
    pub fn get_with_lower_tiers(&self, worker: WorkerId) -> usize {
        overlap_of(self.with_lower_tiers(), worker)
    }
}

fn overlap_of(found: &[(WorkerId, usize)], worker: WorkerId) -> usize {
    found.binary_search_by_key(&worker, |(id, _)| *id).map_or(0, |at| found[at].1)
}

thread_local! {
    /// The buffers for the batch that this thread applies.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::new()
    }
}

impl PrefixIndex {
    /// Creates an index without workers and without a cap.
    pub fn new() -> Self {
        Self::build(None)
    }

    /// Creates an index that sheds the least recently used blocks to stay below `bytes` bytes on
    /// the heap.
    ///
    /// A block is used when it or a later block of its node is stored, and when a lookup passes it.
    /// The index may exceed the cap while a batch is applied.
    pub fn with_max_bytes(bytes: usize) -> Self {
        Self::build(Some(bytes))
    }

    fn build(max_bytes: Option<usize>) -> Self {
        let uses = UseCounter::new(max_bytes.is_some());
        let core = Core {
            workers: Workers::default(),
            prompts: Prompts { trees: Trees::new(), uses },
            max_bytes,
            shedding: Mutex::default(),
            pending_releases: AtomicUsize::new(0),
        };
        Self { core: Arc::new(core), background: Arc::new(run_immediately) }
    }

    /// Passes long-running work to `run`, usually to run it on another thread. `run` is called
    /// without any lock of the index.
    pub fn in_background(self, run: impl Fn(Chore) + Send + Sync + 'static) -> Self {
        Self { background: Arc::new(run), ..self }
    }

    /// Adds a worker that holds nothing. Replaces a worker with the same id.
    pub fn add_worker(&self, worker: WorkerId, block_size: BlockSize) {
        self.add_worker_with(worker, block_size, KeyScheme::Content);
    }

    /// Adds a worker like [`PrefixIndex::add_worker`], with keys of the given scheme.
    pub fn add_worker_with(&self, worker: WorkerId, block_size: BlockSize, scheme: KeyScheme) {
        let workers = &self.core.workers;
        let new = workers.new_worker(worker, block_size, scheme);
        self.release_in_background(workers.list_worker(&new), Vec::new());
    }

    /// Removes a worker and its blocks.
    pub fn remove_worker(&self, worker: WorkerId) {
        let removed = self.core.workers.remove(worker);
        self.release_in_background(removed, Vec::new());
    }

    /// Applies a batch of events to a worker. Returns the keys that are new to the worker: those
    /// that it did not hold before the event that stored them.
    ///
    /// Events of an unknown worker are ignored, because they come from a worker that was just
    /// removed.
    pub fn apply(&self, worker: WorkerId, batch: &KvEventBatch) -> Vec<BlockKey> {
        let mut added = Vec::new();
        let cleared = self.apply_batch(worker, batch, &mut added);
        self.finish_batch(cleared);
        added
    }

    /// Applies a batch like [`PrefixIndex::apply`], from the payload that the engine publishes.
    /// Appends the new keys to `added`.
    ///
    /// `inspect` receives the batch before it is applied and must not apply another payload.
    /// Decoding allocates nothing once the thread has decoded payloads of the same size.
    ///
    /// # Errors
    /// [`KvError::Malformed`] if the payload can't be read. Then nothing was applied, and `inspect`
    /// was not called.
    pub fn apply_payload(
        &self,
        worker: WorkerId,
        payload: &[u8],
        added: &mut Vec<BlockKey>,
        inspect: impl FnOnce(&KvEventBatch),
    ) -> Result<(), KvError> {
        let cleared = with_decoded(payload, |batch| {
            inspect(batch);
            self.apply_batch(worker, batch, added)
        })?;
        self.finish_batch(cleared);
        Ok(())
    }

    /// Applies a batch and returns the caches that it cleared. The caller must pass them to
    /// [`PrefixIndex::finish_batch`].
    fn apply_batch(
        &self,
        worker: WorkerId,
        batch: &KvEventBatch,
        added: &mut Vec<BlockKey>,
    ) -> Vec<Cache> {
        self.core.prompts.uses.tick();
        SCRATCH.with_borrow_mut(|scratch| {
            let cleared =
                self.change_worker(worker, |worker| self.apply_to(worker, batch, scratch, added));
            scratch.trim();
            cleared.unwrap_or_default()
        })
    }

    fn finish_batch(&self, cleared: Vec<Cache>) {
        self.release_in_background(None, cleared);
        self.shed_if_needed();
    }

    fn apply_to(
        &self,
        worker: &mut Worker,
        batch: &KvEventBatch,
        scratch: &mut Scratch,
        added: &mut Vec<BlockKey>,
    ) -> Vec<Cache> {
        let mut cleared = Vec::new();
        worker.prefetch(&batch.events, &self.core.prompts, scratch);
        for event in &batch.events {
            worker.count_event(matches!(event, KvEvent::Unknown(_)));
            match event {
                KvEvent::BlockStored(stored) => {
                    worker.store(stored, &self.core.prompts, &self.core.workers, scratch, added);
                }
                KvEvent::BlockRemoved(removed) => {
                    worker.remove(removed, &self.core.prompts, scratch)
                }
                KvEvent::AllBlocksCleared => {
                    cleared.extend(worker.clear(&self.core.workers));
                }
                KvEvent::Unknown(_) => {}
            }
        }
        cleared
    }

    /// Records that a worker presumably holds a chain of blocks, for workers that publish no
    /// events.
    ///
    /// `keys` are the keys of a prompt from the first block on. A block is recorded once, however
    /// often it is presumed. Presumed blocks count in [`PrefixIndex::stats`], age, and are shed
    /// like other blocks.
    ///
    /// If the worker also has events, a block counts while an event or a presumption holds it.
    pub fn presume(&self, worker: WorkerId, keys: &[BlockKey]) {
        self.core.prompts.uses.tick();
        self.change_worker(worker, |worker| worker.presume(keys, &self.core.prompts));
        self.shed_if_needed();
    }

    /// Withdraws [`PrefixIndex::presume`] for these blocks, in this order.
    ///
    /// Pass children before their parents; another order only splits nodes needlessly. Blocks that
    /// are not presumed, or no longer, count as unknown removals.
    pub fn forget(&self, worker: WorkerId, keys: &[BlockKey]) {
        self.change_worker(worker, |worker| worker.forget_presumed(keys, &self.core.prompts));
    }

    /// Removes all blocks of a worker but not the worker, after a restart or lost events.
    pub fn clear(&self, worker: WorkerId) {
        let cleared = self.change_worker(worker, |worker| worker.clear(&self.core.workers));
        self.release_in_background(None, cleared.unwrap_or_default());
    }

    /// Changes a worker and counts the revision. Returns `None` if the worker is unknown.
    fn change_worker<T>(
        &self,
        worker: WorkerId,
        change: impl FnOnce(&mut Worker) -> T,
    ) -> Option<T> {
        self.core.workers.change(worker, |worker| {
            worker.count_revision();
            change(worker)
        })
    }

    /// Returns the number of leading `keys` that each worker holds, in the order of worker ids.
    /// Includes workers that hold none. [`PrefixIndex::lookup`] is faster.
    pub fn overlaps(&self, keys: &[BlockKey]) -> Vec<(WorkerId, usize)> {
        let mut overlaps = Overlaps::default();
        self.search(keys, &mut overlaps, 0);
        overlaps.found
    }

    /// Finds the workers that hold leading `keys` and writes them to `overlaps`. Allocates nothing
    /// once the buffers are large enough.
    pub fn lookup(&self, keys: &[BlockKey], overlaps: &mut Overlaps) {
        self.search(keys, overlaps, 1);
    }

    /// Writes the workers with an overlap of at least `min_overlap` to `overlaps`.
    fn search(&self, keys: &[BlockKey], overlaps: &mut Overlaps, min_overlap: usize) {
        self.core.prompts.uses.tick();
        let Overlaps { list, found, search, depths, lower, has_lower } = overlaps;
        found.clear();
        *has_lower = false;
        let tree =
            self.core.prompts.trees.read(keys.first().map_or(0, |first| Trees::tree_of(*first)));
        let workers = self.core.workers.list(list);
        let plain = workers.hybrid().len() == 0;
        Lookup { tree: &tree, uses: &self.core.prompts.uses, keys, excluded: workers.excluded() }
            .find(search, !plain);
        // Sorting a few workers is faster than a pass over all workers.
        let are_few = || {
            search.groups.iter().map(OverlapGroup::count).sum::<usize>() <= workers.holders() / 16
        };
        if plain && min_overlap > 0 && are_few() {
            let ids = workers.ids();
            let members = search.groups.iter().flat_map(OverlapGroup::members);
            found.extend(
                members.filter_map(|(holder, depth)| Some((ids[holder as usize]?, depth as usize))),
            );
            return found.sort_unstable();
        }
        depths.clear();
        depths.resize(workers.holders().div_ceil(64), [0; 64]);
        search.groups.iter().for_each(|group| group.write_depths(depths));
        let depths = depths.as_flattened_mut();
        let collect = |depths: &[u32], into: &mut Vec<_>| {
            into.clear();
            let is_found = |(_, holder): &(WorkerId, HolderId)| {
                depths[*holder as usize] as usize >= min_overlap
            };
            let mut rest = workers.in_order();
            // Usually most workers or few are found, so runs of consecutive workers are copied at
            // once.
            while let Some(from) = rest.iter().position(is_found) {
                let (_, tail) = rest.split_at(from);
                let run_len =
                    tail.iter().position(|worker| !is_found(worker)).unwrap_or(tail.len());
                let (run, others) = tail.split_at(run_len);
                into.extend(
                    run.iter().map(|(id, holder)| (*id, depths[*holder as usize] as usize)),
                );
                rest = others;
            }
        };
        if plain {
            return collect(depths, found);
        }
        let len = search.path.last().map_or(0, |(node, before)| {
            before + tree.node(*node).matching_keys(0, &keys[*before..]) as usize
        });
        let path = Path { tree: &tree, nodes: &search.path, len };
        for hybrid in workers.hybrid() {
            depths[hybrid.holder() as usize] = hybrid.overlap(depths, &path) as u32;
        }
        collect(depths, found);
        *has_lower = workers.hybrid().any(Hybrid::has_lower);
        if *has_lower {
            for hybrid in workers.hybrid() {
                let overlap = &mut depths[hybrid.holder() as usize];
                *overlap = hybrid.with_lower_tiers(*overlap as usize, &path) as u32;
            }
            collect(depths, lower);
        }
    }

    /// Returns the number of leading `keys` that one worker holds.
    pub fn overlap(&self, worker: WorkerId, keys: &[BlockKey]) -> usize {
        let mut overlaps = Overlaps::default();
        self.lookup(keys, &mut overlaps);
        overlaps.get(worker)
    }

    /// Returns the counts of one worker, or `None` if the worker is unknown.
    pub fn stats(&self, worker: WorkerId) -> Option<WorkerIndexStats> {
        self.core.workers.change(worker, |worker| worker.stats())
    }

    /// Returns the counts of the whole index. Locks each worker for a moment.
    pub fn totals(&self) -> IndexStats {
        let mut totals = IndexStats {
            blocks: self.core.prompts.trees.blocks(),
            bytes: self.core.bytes(),
            nodes: self.core.prompts.trees.each().map(|tree| tree.nodes()).sum(),
            ..Default::default()
        };
        for worker in self.core.workers.all(0) {
            let counted = self
                .core
                .workers
                .with(&worker, |worker| (worker.entries(), worker.stats().shed_blocks));
            let (entries, shed) = counted.unwrap_or_default();
            totals.entries += entries;
            totals.shed += shed;
        }
        totals
    }
}

#[cfg(test)]
mod group_tests;
#[cfg(test)]
mod lookup_tests;
#[cfg(test)]
mod release_tests;
#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod tests;
