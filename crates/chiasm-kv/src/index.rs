//! Which blocks each worker holds.

mod background;
mod cache;
mod holders;
mod hybrid;
mod leaving;
mod list;
mod lookup;
mod marks;
mod radix_tree;
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
use background::{Background, do_at_once};
use cache::{Cache, Prompts};
use holders::HolderId;
use hybrid::{Hybrid, Path};
use list::List;
use lookup::{Ended, Found, Lookup};
pub use snapshot::{Snapshot, SnapshotError};
use trees::Trees;
use use_counter::UseCounter;
use worker::{Scratch, Worker};
use workers::Workers;

/// The blocks of every worker, kept up to date by their KV events.
///
/// All methods take `&self` and may be called from any thread; see `docs/index.md` for the
/// structure. Batches of one worker wait for each other; batches of different workers and lookups
/// run side by side. What a lookup tells is true of all workers at one moment during the call; each
/// event of a batch is seen whole or not at all.
///
/// Each worker has a map from the engine's own block hashes to our [`BlockKey`]s, because events
/// hash blocks by hash and give tokens only once. The key of a stored block follows from its
/// parent's key, its tokens and its extra keys. A hash counts its copies: engines store the same
/// block several times and remove each copy.
///
/// # Rules that keep blocks from looking present when they aren't
/// - A block that can't be keyed is remembered by hash, so that its copies are counted, but matches
///   nothing, and neither do its children: the parent is unknown (its event was missed), an extra
///   key can't be read (digests of prompt embeddings, marks of later versions), or the number of
///   tokens, hashes and extra keys don't fit together (an attention group that skips blocks). When
///   a later event tells the key after all, all copies count.
/// - The overlap is of the device: medium `GPU` or none given. `CPU` and `STORAGE` count in
///   [`Overlaps::with_lower_tiers`] only; other media and blocks with `REMOTE` locality are
///   ignored.
/// - Every KV-cache group that events named has to suit: `docs/index.md` says how.
/// - Only blocks of the worker's own block size count: vLLM also reports fragments of blocks.
/// - One hash with two keys is a collision of the engine's 64-bit hashes. It matches nothing.
/// - Blocks that were shed to stay below [`PrefixIndex::with_max_bytes`] are as if never stored.
///
/// Known limits: vLLM reports fragments of blocks and groups with larger blocks alike, by another
/// block size; a model with such groups can hold less than the overlap says. With speculative
/// decoding vLLM computes the last block again. A client that talks to an engine past us can ask
/// for `kv_cache_report_mode: full`; vLLM then reports reused blocks exactly as it reports new
/// copies, and we count copies that will never be removed.
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
/// # What takes long
/// To give back the blocks of a worker that left or starts over, and to shed, takes time in
/// proportion to the blocks. No lookup waits for it: what goes is in no result from the call on,
/// and the rest is a [`Chore`]. Without [`PrefixIndex::in_background`], the call does it before it
/// returns.
pub struct PrefixIndex {
    core: Arc<Core>,
    background: Background,
}

/// What chores work on too.
struct Core {
    workers: Workers,
    prompts: Prompts,
    max_bytes: Option<usize>,
    /// Held by the one thread that sheds: where it goes on next time, as a number of workers.
    shedding: Mutex<usize>,
    /// Chores that are giving back blocks, or will.
    leaving: AtomicUsize,
}

/// What the index knows of one worker, and what it could not use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerIndexStats {
    /// Distinct block keys that the worker holds now, in each KV-cache group and tier.
    pub blocks: usize,
    /// Hashes that the worker holds now and that match nothing.
    pub unkeyed_blocks: usize,
    /// Events applied since the worker was added.
    pub events: u64,
    /// Events of other media, block sizes or unknown kinds.
    pub ignored_events: u64,
    /// Blocks stored without a known parent.
    pub unknown_parents: u64,
    /// Blocks whose extra keys could not be read.
    pub unreadable_extra_keys: u64,
    /// Removed hashes that were not known.
    pub unknown_removals: u64,
    /// Hashes forgotten to stay below the cap.
    pub shed_blocks: u64,
    /// Calls that told of what the worker holds: [`PrefixIndex::apply`],
    /// [`PrefixIndex::apply_payload`] of what could be read, [`PrefixIndex::presume`],
    /// [`PrefixIndex::forget`] and [`PrefixIndex::clear`]. A [`PrefixIndex::snapshot`] goes on with
    /// it.
    pub revision: u64,
}

/// What the index is as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Distinct blocks that any worker holds.
    pub blocks: usize,
    /// Pairs of a worker and a hash of its engine.
    pub entries: usize,
    /// Bytes on the heap, without what the allocator keeps for itself. What chores have still to
    /// give back of the trees is included.
    pub bytes: usize,
    /// Nodes of the radix trees: blocks that prompts have in common, or one has for itself. Lookups
    /// go from node to node.
    pub nodes: usize,
    /// Pairs forgotten to stay below the cap, of workers that are still there.
    pub shed: u64,
}

/// The buffers of lookups, to be used again.
#[derive(Default)]
pub struct Overlaps {
    /// The workers as the last lookup saw them.
    list: Arc<List>,
    found: Vec<(WorkerId, usize)>,
    search: Found,
    /// The overlap of each holder.
    depths: Vec<[u32; 64]>,
    lower: Vec<(WorkerId, usize)>,
    has_lower: bool,
}

impl Overlaps {
    /// Workers that hold at least the first block, in the order of their ids, and how many of the
    /// leading blocks.
    pub fn found(&self) -> &[(WorkerId, usize)] {
        &self.found
    }

    /// The same workers, with the blocks after those of [`Overlaps::found`] that each holds on the
    /// CPU or in storage, without a break: what it can load instead of computing.
    pub fn with_lower_tiers(&self) -> &[(WorkerId, usize)] {
        if self.has_lower { &self.lower } else { &self.found }
    }

    /// One worker's overlap; 0 for those not found. Takes time logarithmic in the number of those
    /// found.
    pub fn of(&self, worker: WorkerId) -> usize {
        of(&self.found, worker)
    }

    /// One worker's overlap with the blocks behind it that it holds on the CPU or in storage, as
    /// [`Overlaps::of`].
    pub fn of_lower_tiers(&self, worker: WorkerId) -> usize {
        of(self.with_lower_tiers(), worker)
    }
}

fn of(found: &[(WorkerId, usize)], worker: WorkerId) -> usize {
    found.binary_search_by_key(&worker, |(id, _)| *id).map_or(0, |at| found[at].1)
}

thread_local! {
    /// Buffers of the batch that this thread applies.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::new()
    }
}

impl PrefixIndex {
    /// An index without workers and without a cap.
    pub fn new() -> Self {
        Self::make(None)
    }

    /// An index that forgets the least recently used blocks to stay below a number of bytes on the
    /// heap. A block is used when it or one after it in its node is stored, and when a lookup
    /// passes it. Above the cap for as long as it takes to apply a batch.
    pub fn with_max_bytes(bytes: usize) -> Self {
        Self::make(Some(bytes))
    }

    fn make(max_bytes: Option<usize>) -> Self {
        let uses = UseCounter::new(max_bytes.is_some());
        let core = Core {
            workers: Workers::default(),
            prompts: Prompts { trees: Trees::new(), uses },
            max_bytes,
            shedding: Mutex::default(),
            leaving: AtomicUsize::new(0),
        };
        Self { core: Arc::new(core), background: Arc::new(do_at_once) }
    }

    /// Hands work that takes long to `run` instead of doing it: to run it on another thread,
    /// mostly. `run` is called without any lock of the index.
    pub fn in_background(self, run: impl Fn(Chore) + Send + Sync + 'static) -> Self {
        Self { background: Arc::new(run), ..self }
    }

    /// Adds a worker that holds nothing. One that is known already starts over.
    pub fn add_worker(&self, worker: WorkerId, block_size: BlockSize) {
        self.add_worker_with(worker, block_size, KeyScheme::Content);
    }

    /// Adds a worker as [`PrefixIndex::add_worker`] does, whose blocks have keys of this scheme.
    pub fn add_worker_with(&self, worker: WorkerId, block_size: BlockSize, scheme: KeyScheme) {
        let workers = &self.core.workers;
        self.leave(workers.list_worker(&workers.make(worker, block_size, scheme)), Vec::new());
    }

    /// Forgets a worker.
    pub fn remove_worker(&self, worker: WorkerId) {
        let removed = self.core.workers.remove(worker);
        self.leave(removed, Vec::new());
    }

    /// Takes in what happened to a worker's cache. Returns the keys that it holds now and did not
    /// before the event that stored them. Events of an unknown worker are ignored: they come from
    /// one that was just removed.
    pub fn apply(&self, worker: WorkerId, batch: &KvEventBatch) -> Vec<BlockKey> {
        let mut added = Vec::new();
        let cleared = self.apply_batch(worker, batch, &mut added);
        self.finish(cleared);
        added
    }

    /// Does what [`PrefixIndex::apply`] does, from the payload that the engine publishes. `look`
    /// sees the batch before it is applied, and must not apply another; the keys go to the end of
    /// `added`. Reading allocates nothing once the thread has read as large ones.
    ///
    /// # Errors
    /// [`KvError::Malformed`] when the payload can't be read. Nothing was applied then, and `look`
    /// was not called.
    pub fn apply_payload(
        &self,
        worker: WorkerId,
        payload: &[u8],
        added: &mut Vec<BlockKey>,
        look: impl FnOnce(&KvEventBatch),
    ) -> Result<(), KvError> {
        let cleared = with_decoded(payload, |batch| {
            look(batch);
            self.apply_batch(worker, batch, added)
        })?;
        self.finish(cleared);
        Ok(())
    }

    /// Returns what the worker held before it was cleared, if it was; [`PrefixIndex::finish`] has
    /// to follow.
    fn apply_batch(
        &self,
        worker: WorkerId,
        batch: &KvEventBatch,
        added: &mut Vec<BlockKey>,
    ) -> Vec<Cache> {
        self.core.prompts.uses.tick();
        SCRATCH.with_borrow_mut(|scratch| {
            let cleared =
                self.revise(worker, |worker| self.apply_to(worker, batch, scratch, added));
            scratch.trim();
            cleared.unwrap_or_default()
        })
    }

    fn finish(&self, cleared: Vec<Cache>) {
        self.leave(None, cleared);
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
        worker.warm(&batch.events, &self.core.prompts, scratch);
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

    /// A worker that publishes no events is believed to hold a chain of blocks: the keys of a
    /// prompt from the first on. Adds what it doesn't hold yet; each block once, however often it
    /// is presumed. Presumed blocks count in [`PrefixIndex::stats`], age and are shed as others.
    ///
    /// For a worker that gets events too, a block counts as long as either says so.
    pub fn presume(&self, worker: WorkerId, keys: &[BlockKey]) {
        self.core.prompts.uses.tick();
        self.revise(worker, |worker| worker.presume(keys, &self.core.prompts));
        self.shed_if_needed();
    }

    /// Takes back [`PrefixIndex::presume`] for these blocks, in this order: children come before
    /// their parents, or else nodes of blocks are cut up, and nothing else. Those that are not
    /// presumed (any more) count as unknown removals.
    pub fn forget(&self, worker: WorkerId, keys: &[BlockKey]) {
        self.revise(worker, |worker| worker.forget_presumed(keys, &self.core.prompts));
    }

    /// Forgets a worker's blocks, not the worker: after a restart or lost events.
    pub fn clear(&self, worker: WorkerId) {
        let cleared = self.revise(worker, |worker| worker.clear(&self.core.workers));
        self.leave(None, cleared.unwrap_or_default());
    }

    /// Changes what is known of a worker. `None` when it is unknown.
    fn revise<T>(&self, worker: WorkerId, change: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        self.core.workers.change(worker, |worker| {
            worker.count_revision();
            change(worker)
        })
    }

    /// How many of the leading `keys` each worker holds, in the order of their ids, and 0 for those
    /// that hold none. [`PrefixIndex::lookup`] takes less work.
    pub fn overlaps(&self, keys: &[BlockKey]) -> Vec<(WorkerId, usize)> {
        let mut overlaps = Overlaps::default();
        self.look_up(keys, &mut overlaps, 0);
        overlaps.found
    }

    /// How many of the leading `keys` each worker holds, of those that hold any. Allocates nothing
    /// once the buffers are large enough.
    pub fn lookup(&self, keys: &[BlockKey], overlaps: &mut Overlaps) {
        self.look_up(keys, overlaps, 1);
    }

    fn look_up(&self, keys: &[BlockKey], overlaps: &mut Overlaps, at_least: usize) {
        self.core.prompts.uses.tick();
        let Overlaps { list, found, search, depths, lower, has_lower } = overlaps;
        found.clear();
        *has_lower = false;
        let tree =
            self.core.prompts.trees.read(keys.first().map_or(0, |first| Trees::tree_of(*first)));
        let workers = self.core.workers.list(list);
        let plain = workers.hybrid().len() == 0;
        Lookup { tree: &tree, uses: &self.core.prompts.uses, keys, aside: workers.aside() }
            .find(search, !plain);
        // Fewer than this are sorted more quickly than looked up one after the other.
        if plain
            && at_least > 0
            && search.ended.iter().map(Ended::workers).sum::<usize>() <= workers.holders() / 16
        {
            let (ids, ended) = (workers.ids(), search.ended.iter().flat_map(Ended::each));
            found.extend(
                ended.filter_map(|(holder, depth)| Some((ids[holder as usize]?, depth as usize))),
            );
            return found.sort_unstable();
        }
        depths.clear();
        depths.resize(workers.holders().div_ceil(64), [0; 64]);
        search.ended.iter().for_each(|ended| ended.write(depths));
        let depths = depths.as_flattened_mut();
        let list = |depths: &[u32], into: &mut Vec<_>| {
            into.clear();
            let found =
                |(_, holder): &(WorkerId, HolderId)| depths[*holder as usize] as usize >= at_least;
            let mut rest = workers.in_order();
            // Most of them or few: so as many at a time as follow each other.
            while let Some(from) = rest.iter().position(found) {
                let (_, those) = rest.split_at(from);
                let (those, others) =
                    those.split_at(those.iter().position(|it| !found(it)).unwrap_or(those.len()));
                into.extend(
                    those.iter().map(|(id, holder)| (*id, depths[*holder as usize] as usize)),
                );
                rest = others;
            }
        };
        if plain {
            return list(depths, found);
        }
        let last = search.path.last();
        let last = last
            .map(|(node, before)| before + tree.node(*node).agrees(0, &keys[*before..]) as usize);
        let path = Path { tree: &tree, nodes: &search.path, len: last.unwrap_or(0) };
        for hybrid in workers.hybrid() {
            depths[hybrid.holder() as usize] = hybrid.overlap(depths, &path) as u32;
        }
        list(depths, found);
        *has_lower = workers.hybrid().any(Hybrid::has_lower);
        if *has_lower {
            for hybrid in workers.hybrid() {
                let overlap = &mut depths[hybrid.holder() as usize];
                *overlap = hybrid.with_lower_tiers(*overlap as usize, &path) as u32;
            }
            list(depths, lower);
        }
    }

    /// How many of the leading `keys` one worker holds.
    pub fn overlap(&self, worker: WorkerId, keys: &[BlockKey]) -> usize {
        let mut overlaps = Overlaps::default();
        self.lookup(keys, &mut overlaps);
        overlaps.of(worker)
    }

    /// Counts for one worker; `None` when it is unknown.
    pub fn stats(&self, worker: WorkerId) -> Option<WorkerIndexStats> {
        self.core.workers.change(worker, |worker| worker.stats())
    }

    /// Counts for all of them. Takes the lock of each worker for a moment.
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
mod leaving_tests;
#[cfg(test)]
mod lookup_tests;
#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod tests;
