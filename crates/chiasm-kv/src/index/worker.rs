//! One worker: what its events say, for each KV-cache group in each tier.

use chiasm_types::{BlockSize, WorkerId};

use super::WorkerIndexStats;
use super::cache::{Cache, EngineHash, Prompts, engine_hash};
use super::marks::Marks;
use super::radix_tree::{Position, Segment};
use super::source::{Source, Tier};
use super::trees::{Trees, Writer};
use super::workers::Workers;
use crate::block_key::{BlockContent, BlockHasher, BlockKey, KeyScheme};
use crate::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

/// Number of caches that a worker may have, more than any model has of groups, times the tiers:
/// what engines send must not take all ids of holders.
const MOST_CACHES: usize = 64;

/// Blocks that a worker may hold in all its tiers: ten times what a large machine has room for.
/// What it says of more is ignored, as it may say anything.
const MOST_BLOCKS: usize = if cfg!(test) { 1 << 15 } else { 1 << 24 };

/// Blocks of an event whose keys are made with the tree locked: what an engine says of each step of
/// an answer.
const FEW: usize = 2;

/// Blocks from which on it takes less time to make their keys side by side.
const ROW: usize = 6;

/// What one engine holds, as its events say. A worker that was removed from the index may live on
/// for as long as it takes in a batch.
pub(super) struct Worker {
    id: WorkerId,
    block_size: BlockSize,
    scheme: KeyScheme,
    /// Its KV-cache groups in their tiers. The first is the group on the device that events named
    /// first, or that of presumptions; it is there until the worker is gone.
    caches: Vec<(Source, Cache)>,
    /// Whether events have said which group the first cache is.
    named: bool,
    /// Removed from the index: what still comes is ignored.
    gone: bool,
    /// Counts of the worker as a whole; caches have their own.
    stats: WorkerIndexStats,
}

/// Buffers of a batch, used again by the next one of any worker.
#[derive(Default)]
pub(super) struct Scratch {
    hasher: BlockHasher,
    marks: Marks,
    hashes: Vec<EngineHash>,
    ends: Vec<EngineHash>,
    keys: Vec<BlockKey>,
    segments: Vec<Segment>,
    /// Blocks newly held in groups that need all leading blocks, if there is such a group; else in
    /// any.
    added: Vec<(EngineHash, BlockKey)>,
    /// Blocks newly held in other groups, which are not told to callers.
    untold: Vec<(EngineHash, BlockKey)>,
}

impl Scratch {
    /// Gives the memory back after an event of uncommon size.
    pub(super) fn trim(&mut self) {
        if self.hashes.capacity() > 1 << 14 {
            *self = Self::default();
        }
    }
}

impl Worker {
    pub(super) fn new(
        id: WorkerId,
        cache: Cache,
        block_size: BlockSize,
        scheme: KeyScheme,
    ) -> Self {
        Self {
            id,
            block_size,
            scheme,
            caches: vec![(Source::default(), cache)],
            named: false,
            gone: false,
            stats: WorkerIndexStats::default(),
        }
    }

    pub(super) fn id(&self) -> WorkerId {
        self.id
    }

    pub(super) fn gone(&self) -> bool {
        self.gone
    }

    pub(super) fn block_size(&self) -> BlockSize {
        self.block_size
    }

    pub(super) fn scheme(&self) -> &KeyScheme {
        &self.scheme
    }

    pub(super) fn named(&self) -> bool {
        self.named
    }

    pub(super) fn caches(&self) -> &[(Source, Cache)] {
        &self.caches
    }

    /// Becomes what another index knew at this revision, but for its caches.
    pub(super) fn go_on_from(&mut self, revision: u64, named: bool) {
        (self.stats.revision, self.named) = (revision, named);
    }

    /// The empty cache of this number, which is the next, for what it is to be about. `None` when
    /// the worker has as many as it may have.
    pub(super) fn new_cache(
        &mut self,
        number: usize,
        source: Source,
        workers: &Workers,
    ) -> Option<&mut Cache> {
        if number == self.caches.len() && number < MOST_CACHES {
            self.caches.push((source, Cache::new(workers.new_holder())));
        }
        let (known, cache) = self.caches.get_mut(number)?;
        *known = source;
        Some(cache)
    }

    /// The first one is always there.
    fn first(&mut self) -> &mut Cache {
        &mut self.caches[0].1
    }

    /// Brings near what a batch needs; see [`Cache::warm`].
    pub(super) fn warm(&self, events: &[KvEvent], prompts: &Prompts, scratch: &mut Scratch) {
        let [(_, cache)] = &self.caches[..] else { return };
        let Scratch { hashes, ends, .. } = scratch;
        hashes.clear();
        ends.clear();
        // Long hashes are left out, as shortening them twice would take longer.
        let short =
            |hash: &ExternalHash| matches!(hash, ExternalHash::U64(_)).then(|| engine_hash(hash));
        let mut all = 0;
        for event in events {
            match event {
                KvEvent::BlockStored(stored) => {
                    ends.extend(stored.parent_block_hash.as_ref().and_then(short));
                    hashes.extend(stored.block_hashes.iter().filter_map(short));
                    // Each line of theirs.
                    all = stored.token_ids.iter().step_by(16).fold(all, |all, token| all ^ token.0);
                }
                KvEvent::BlockRemoved(removed) => {
                    ends.extend(removed.block_hashes.first().and_then(short));
                    hashes.extend(removed.block_hashes.iter().skip(1).filter_map(short));
                }
                KvEvent::AllBlocksCleared | KvEvent::Unknown(_) => {}
            }
        }
        std::hint::black_box(all);
        hashes.extend(&ends[..]);
        if hashes.len() > 1 {
            cache.warm(hashes, ends, prompts);
        }
    }

    pub(super) fn store(
        &mut self,
        event: &BlockStored,
        prompts: &Prompts,
        workers: &Workers,
        scratch: &mut Scratch,
        added: &mut Vec<BlockKey>,
    ) {
        let has_room = self.entries().saturating_add(event.block_hashes.len()) <= MOST_BLOCKS;
        let source = Source::of(event, self.block_size).filter(|_| has_room).filter(|source| {
            // Events of lower tiers may come without tokens and without a size; those that have
            // tokens lack the marks of images. So only the hashes of theirs are used.
            source.tier != Tier::Device || event.block_size as usize == self.block_size.get()
        });
        let Some(at) = source.and_then(|source| self.cache_of(source, workers)) else {
            self.stats.ignored_events += 1;
            return;
        };
        let blocks = event.block_hashes.len();
        let fits = self.scheme != KeyScheme::Content
            || event.token_ids.len() == blocks * self.block_size.get()
                && event.extra_keys.as_ref().is_none_or(|keys| keys.len() == blocks);
        scratch.hashes.clear();
        scratch.hashes.extend(event.block_hashes.iter().map(engine_hash));
        scratch.keys.clear();
        let parent = event.parent_block_hash.as_ref().map(engine_hash);
        // Of the blocks without keys, how many have none because of what they are, not for want of
        // a parent.
        let mut unreadable = if fits { 0 } else { blocks };
        if self.caches[at].0.tier == Tier::Device
            && fits
            && self.store_tokens(at, event, parent, prompts, scratch)
        {
            unreadable = 1;
        }
        self.store_by_hash(at, unreadable, prompts, scratch);
        self.caches.iter_mut().for_each(|(_, cache)| cache.release_collided(prompts));
        let several = self.caches.len() > 1;
        let held = |hash| {
            let mut leading = self.caches.iter().filter(|(source, _)| source.is_chain());
            leading.all(|(_, cache)| cache.position_of(hash).is_some())
        };
        if several {
            scratch.added.retain(|(hash, _)| held(*hash));
        }
        added.extend(scratch.added.drain(..).map(|(_, key)| key));
        scratch.untold.clear();
    }

    /// Stores the blocks of an event that have keys; says whether their parent is known.
    fn store_tokens(
        &mut self,
        at: usize,
        event: &BlockStored,
        parent: Option<EngineHash>,
        prompts: &Prompts,
        scratch: &mut Scratch,
    ) -> bool {
        // To take the lock twice takes longer than to hash these with it.
        let few = event.block_hashes.len() <= FEW;
        let (mut tree, mut after, mut before) = (None, None, None);
        if let Some(parent) = parent {
            let Some((position, key, locked)) = self.parent(parent, few, prompts) else {
                return false;
            };
            (tree, after, before) = (locked, Some(position), Some(key));
        }
        self.make_keys(event, before, scratch);
        let Scratch { hashes, keys, segments, added, untold, .. } = scratch;
        let Some(first) = keys.first() else { return true };
        let number = after.map_or(Trees::tree_of(*first), |parent| Trees::tree_with(parent.node));
        let mut tree = tree.take().unwrap_or_else(|| prompts.trees.write(number));
        let chains = self.caches.iter().any(|(source, _)| source.is_chain());
        let several = self.caches.len() > 1;
        let (source, cache) = &mut self.caches[at];
        let news = if source.is_chain() || !chains { &mut *added } else { &mut *untold };
        segments.clear();
        tree.hold(after, keys, cache.holder(), &prompts.uses, segments);
        if !several {
            drop(tree);
            cache.count_copies(hashes, keys, segments, news);
            if cache.has_to_recheck() {
                cache.recheck(&mut prompts.trees.write(number), news);
            }
            return true;
        }
        cache.count_copies(hashes, keys, segments, news);
        cache.recheck(&mut tree, news);
        // What one cache says of a hash holds for all: the groups of a model and the tiers share
        // the hashes.
        for hash in hashes[..keys.len()].iter().copied() {
            let Some(position) = self.caches[at].1.position_of(hash) else { continue };
            for (_, (source, cache)) in
                self.caches.iter_mut().enumerate().filter(|(other, _)| *other != at)
            {
                let news = if source.is_chain() { &mut *added } else { &mut *untold };
                cache.tell(hash, position, &mut tree, &prompts.uses, news);
            }
        }
        true
    }

    /// Makes the keys of as many blocks as can be keyed, after a block with the key `before` or
    /// from the start.
    fn make_keys(&self, event: &BlockStored, before: Option<BlockKey>, scratch: &mut Scratch) {
        let Scratch { hasher, marks, keys, .. } = scratch;
        keys.clear();
        if let KeyScheme::EngineHashes(scheme) = &self.scheme {
            return keys.extend(event.block_hashes.iter().map(|hash| scheme.key(hash)));
        }
        let lora = event.lora_name.as_deref();
        let marked = event.extra_keys.as_ref().is_some_and(|keys| keys.iter().any(Option::is_some));
        let size = self.block_size.get();
        let mut last = before;
        for (block, tokens) in event.token_ids.chunks_exact(size).enumerate() {
            if let Some(parent) = last
                && !marked
                && lora.is_none()
                && event.token_ids.len() >= (block + ROW) * size
            {
                hasher.text_keys(parent, &event.token_ids[block * size..], size, keys);
                break;
            }
            let extra_keys = event
                .extra_keys
                .as_ref()
                .and_then(|keys| keys[block].as_deref())
                .unwrap_or_default();
            let Some(salt) = marks.read(extra_keys, lora, last.is_none()) else { break };
            let key =
                hasher.key(&BlockContent { parent: last, tokens, media: &marks.media, lora, salt });
            keys.push(key);
            last = Some(key);
        }
    }

    /// Finds the block that an event goes on after: where it is, its key, and if `locked` its tree.
    fn parent<'a>(
        &self,
        hash: EngineHash,
        locked: bool,
        prompts: &'a Prompts,
    ) -> Option<(Position, BlockKey, Option<Writer<'a>>)> {
        let position = self.position_of(hash)?;
        let number = Trees::tree_with(position.node);
        if locked {
            let tree = prompts.trees.write(number);
            return Some((position, tree.key(position)?, Some(tree)));
        }
        Some((position, prompts.trees.read(number).key(position)?, None))
    }

    /// Stores the blocks of an event that have no keys: another cache may know them. So it is with
    /// an attention group that skips blocks, and with lower tiers.
    fn store_by_hash(
        &mut self,
        at: usize,
        unreadable: usize,
        prompts: &Prompts,
        scratch: &mut Scratch,
    ) {
        let Scratch { hashes, keys, added, untold, .. } = scratch;
        let from = keys.len();
        for (block, hash) in hashes.iter().copied().enumerate().skip(from) {
            let position = self.position_of(hash);
            let chains = self.caches.iter().any(|(source, _)| source.is_chain());
            let (source, cache) = &mut self.caches[at];
            let news = if source.is_chain() || !chains { &mut *added } else { &mut *untold };
            match position {
                Some(position) => cache.store_at(hash, position, prompts, news),
                None => {
                    let unreadable = block - from < unreadable;
                    self.stats.unreadable_extra_keys += u64::from(unreadable);
                    self.stats.unknown_parents += u64::from(!unreadable);
                    cache.store_unknown(hash);
                }
            }
        }
    }

    pub(super) fn remove(
        &mut self,
        event: &BlockRemoved,
        prompts: &Prompts,
        scratch: &mut Scratch,
    ) {
        let cache =
            Source::named(event.medium.as_deref(), event.group_idx, event.locality.as_deref()).map(
                |removed| {
                    self.caches.iter_mut().find(|(source, _)| {
                        source.tier == removed.tier && source.group == removed.group
                    })
                },
            );
        match cache {
            None => self.stats.ignored_events += 1,
            Some(None) => self.stats.unknown_removals += event.block_hashes.len() as u64,
            Some(Some((_, cache))) => {
                scratch.hashes.clear();
                scratch.hashes.extend(event.block_hashes.iter().map(engine_hash));
                self.stats.unknown_removals += cache.remove(&scratch.hashes, prompts);
            }
        }
    }

    pub(super) fn presume(&mut self, chain: &[BlockKey], prompts: &Prompts) {
        self.first().presume(chain, prompts);
        self.first().release_collided(prompts);
    }

    pub(super) fn forget_presumed(&mut self, keys: &[BlockKey], prompts: &Prompts) {
        self.stats.unknown_removals += self.first().forget_presumed(keys, prompts);
    }

    /// Makes the worker hold nothing any more, in no tier. The groups are those of the engine
    /// still. Returns the caches that it had, if they held anything.
    pub(super) fn clear(&mut self, workers: &Workers) -> Vec<Cache> {
        if self.entries() > 0 {
            return workers.renew_caches(self.id, &mut self.caches);
        }
        self.caches.iter_mut().for_each(|(_, cache)| drop(cache.renew(cache.holder())));
        Vec::new()
    }

    /// Makes the worker ignore what still comes. Returns the caches that it had.
    pub(super) fn end(&mut self) -> Vec<Cache> {
        self.gone = true;
        self.caches.drain(..).map(|(_, cache)| cache).collect()
    }

    pub(super) fn stats(&self) -> WorkerIndexStats {
        self.caches.iter().fold(self.stats, |mut stats, (_, cache)| {
            let counts = cache.counts();
            stats.blocks += counts.blocks;
            stats.unkeyed_blocks += counts.unkeyed;
            stats.shed_blocks += counts.shed;
            stats
        })
    }

    pub(super) fn count_revision(&mut self) {
        self.stats.revision += 1;
    }

    pub(super) fn count_event(&mut self, ignored: bool) {
        self.stats.events += 1;
        self.stats.ignored_events += u64::from(ignored);
    }

    pub(super) fn entries(&self) -> usize {
        self.caches.iter().map(|(_, cache)| cache.len()).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        self.caches.iter().map(|(_, cache)| cache.bytes()).sum()
    }

    /// The cache of this number; `None` beyond the last one.
    pub(super) fn cache(&mut self, number: usize) -> Option<&mut Cache> {
        self.caches.get_mut(number).map(|(_, cache)| cache)
    }

    /// Where the block of a hash is, if some cache has a keyed entry for it.
    fn position_of(&self, hash: EngineHash) -> Option<Position> {
        self.caches.iter().find_map(|(_, cache)| cache.position_of(hash))
    }

    /// The cache that a stored event is about, made if need be.
    fn cache_of(&mut self, source: Source, workers: &Workers) -> Option<usize> {
        let known =
            |(known, _): &(Source, Cache)| known.tier == source.tier && known.group == source.group;
        if source.tier == Tier::Device && !self.named {
            self.named = true;
            // What was presumed before is what the worker is believed to hold all of.
            if source != self.caches[0].0 && self.caches[0].1.len() == 0 {
                self.caches[0].0 = source;
                workers.list_caches(self.id, &self.caches);
            }
        }
        if let Some(at) = self.caches.iter().position(known) {
            return Some(at);
        }
        if self.caches.len() == MOST_CACHES {
            return None;
        }
        self.caches.push((source, Cache::new(workers.new_holder())));
        workers.list_caches(self.id, &self.caches);
        Some(self.caches.len() - 1)
    }
}
