//! A worker: the application of its events to its caches, one for each KV-cache group and tier.

use chiasm_types::{BlockSize, WorkerId};

use super::WorkerIndexStats;
use super::cache::{Cache, EngineHash, Prompts, engine_hash};
use super::extra_keys::ExtraKeyReader;
use super::radix_tree::{Position, Segment};
use super::source::{Source, Tier};
use super::trees::{Trees, Writer};
use super::workers::Workers;
use crate::block_key::{BlockContent, BlockHasher, BlockKey, KeyScheme};
use crate::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

/// The maximum number of caches per worker. It exceeds groups times tiers of every model, and keeps
/// an engine from using up all holder ids.
const MAX_CACHES: usize = 64;

/// The maximum number of blocks per worker in all its tiers: ten times the capacity of a large
/// machine. Events about more blocks are ignored, because an engine may send anything.
const MAX_BLOCKS: usize = if cfg!(test) { 1 << 15 } else { 1 << 24 };

/// The maximum number of blocks of an event whose keys are computed with the tree locked. While
/// an engine answers, a step completes at most this many blocks.
const MAX_BLOCKS_HASHED_LOCKED: usize = 2;

/// The number of blocks from which it is faster to compute their keys as a series.
const MIN_SERIES_BLOCKS: usize = 6;

/// The blocks of one engine according to its events. A worker that was removed from the index may
/// live on until a batch has been applied.
pub(super) struct Worker {
    id: WorkerId,
    block_size: BlockSize,
    scheme: KeyScheme,
    /// The caches of KV-cache groups in tiers. The first one is the device group that events named
    /// first, or that of presumed blocks. It exists until the worker is retired.
    caches: Vec<(Source, Cache)>,
    /// `true` if events have named the group of the first cache.
    first_is_named: bool,
    /// `true` if the worker was removed from the index. Further changes are ignored.
    is_retired: bool,
    /// The counts of the whole worker; caches have their own.
    stats: WorkerIndexStats,
}

/// The buffers for a batch, reused by the next batch of any worker.
#[derive(Default)]
pub(super) struct Scratch {
    hasher: BlockHasher,
    extra_keys: ExtraKeyReader,
    hashes: Vec<EngineHash>,
    ends: Vec<EngineHash>,
    keys: Vec<BlockKey>,
    segments: Vec<Segment>,
    /// The blocks new to groups that need all leading blocks, or to any group if there is no such
    /// group.
    added: Vec<(EngineHash, BlockKey)>,
    /// The blocks new to other groups, which are not reported to callers.
    unreported: Vec<(EngineHash, BlockKey)>,
}

/// The block that a stored event continues.
struct ParentBlock<'a> {
    position: Position,
    key: BlockKey,
    /// The tree of the block, if it was kept locked.
    tree: Option<Writer<'a>>,
}

impl Scratch {
    /// Frees the memory after an event of uncommon size.
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
            first_is_named: false,
            is_retired: false,
            stats: WorkerIndexStats::default(),
        }
    }

    pub(super) fn id(&self) -> WorkerId {
        self.id
    }

    pub(super) fn is_retired(&self) -> bool {
        self.is_retired
    }

    pub(super) fn block_size(&self) -> BlockSize {
        self.block_size
    }

    pub(super) fn scheme(&self) -> &KeyScheme {
        &self.scheme
    }

    pub(super) fn first_is_named(&self) -> bool {
        self.first_is_named
    }

    pub(super) fn caches(&self) -> &[(Source, Cache)] {
        &self.caches
    }

    /// Continues from a snapshot's revision. The caller restores the caches.
    pub(super) fn continue_from(&mut self, revision: u64, first_is_named: bool) {
        self.stats.revision = revision;
        self.first_is_named = first_is_named;
    }

    /// Returns the empty cache with the next `number` and sets its source. Returns `None` if the
    /// worker already has the maximum number of caches.
    pub(super) fn new_cache(
        &mut self,
        number: usize,
        source: Source,
        workers: &Workers,
    ) -> Option<&mut Cache> {
        if number == self.caches.len() && number < MAX_CACHES {
            self.caches.push((source, Cache::new(workers.new_holder())));
        }
        let (known, cache) = self.caches.get_mut(number)?;
        *known = source;
        Some(cache)
    }

    /// Returns the first cache, which always exists.
    fn first(&mut self) -> &mut Cache {
        &mut self.caches[0].1
    }

    /// Loads the memory that a batch needs into the cache; see [`Cache::prefetch`].
    pub(super) fn prefetch(&self, events: &[KvEvent], prompts: &Prompts, scratch: &mut Scratch) {
        let [(_, cache)] = &self.caches[..] else { return };
        let Scratch { hashes, ends, .. } = scratch;
        hashes.clear();
        ends.clear();
        // Long hashes are left out, because shortening them twice would take longer.
        let short =
            |hash: &ExternalHash| matches!(hash, ExternalHash::U64(_)).then(|| engine_hash(hash));
        let mut touched = 0;
        for event in events {
            match event {
                KvEvent::BlockStored(stored) => {
                    ends.extend(stored.parent_block_hash.as_ref().and_then(short));
                    hashes.extend(stored.block_hashes.iter().filter_map(short));
                    // One token per cache line.
                    for token in stored.token_ids.iter().step_by(16) {
                        touched ^= token.0;
                    }
                }
                KvEvent::BlockRemoved(removed) => {
                    ends.extend(removed.block_hashes.first().and_then(short));
                    hashes.extend(removed.block_hashes.iter().skip(1).filter_map(short));
                }
                KvEvent::AllBlocksCleared | KvEvent::Unknown(_) => {}
            }
        }
        std::hint::black_box(touched);
        hashes.extend(&ends[..]);
        if hashes.len() > 1 {
            cache.prefetch(hashes, ends, prompts);
        }
    }

    /// Applies a stored event. Appends the keys that are new to the worker to `added`.
    pub(super) fn store(
        &mut self,
        event: &BlockStored,
        prompts: &Prompts,
        workers: &Workers,
        scratch: &mut Scratch,
        added: &mut Vec<BlockKey>,
    ) {
        let has_room = self.entries().saturating_add(event.block_hashes.len()) <= MAX_BLOCKS;
        let source = Source::from_stored(event, self.block_size);
        let source = source.filter(|_| has_room).filter(|source| {
            // Events of lower tiers may lack tokens and a block size, and their tokens lack the
            // marks of images. So only their hashes are used.
            source.tier != Tier::Device || event.block_size as usize == self.block_size.get()
        });
        let Some(at) = source.and_then(|source| self.find_or_add_cache(source, workers)) else {
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
        // The number of blocks that have no key because of their content, not because of their
        // parent.
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
        let is_in_all_chains = |hash| {
            let mut chains = self.caches.iter().filter(|(source, _)| source.is_chain());
            chains.all(|(_, cache)| cache.position_of(hash).is_some())
        };
        if several {
            scratch.added.retain(|(hash, _)| is_in_all_chains(*hash));
        }
        added.extend(scratch.added.drain(..).map(|(_, key)| key));
        scratch.unreported.clear();
    }

    /// Stores the blocks of an event that have keys. Returns `false` if their parent is unknown.
    fn store_tokens(
        &mut self,
        at: usize,
        event: &BlockStored,
        parent: Option<EngineHash>,
        prompts: &Prompts,
        scratch: &mut Scratch,
    ) -> bool {
        // For so few blocks, a second lock takes longer than hashing them with the tree locked.
        let keep_locked = event.block_hashes.len() <= MAX_BLOCKS_HASHED_LOCKED;
        let mut parent_block = None;
        if let Some(parent) = parent {
            let Some(found) = self.find_parent(parent, keep_locked, prompts) else {
                return false;
            };
            parent_block = Some(found);
        }
        self.compute_keys(event, parent_block.as_ref().map(|parent| parent.key), scratch);
        let Scratch { hashes, keys, segments, added, unreported, .. } = scratch;
        let Some(first) = keys.first() else { return true };
        let after = parent_block.as_ref().map(|parent| parent.position);
        let number = after.map_or(Trees::tree_of(*first), |parent| Trees::tree_with(parent.node));
        let locked = parent_block.and_then(|parent| parent.tree);
        let mut tree = locked.unwrap_or_else(|| prompts.trees.write(number));
        let has_chains = self.caches.iter().any(|(source, _)| source.is_chain());
        let several = self.caches.len() > 1;
        let (source, cache) = &mut self.caches[at];
        let new = if source.is_chain() || !has_chains { &mut *added } else { &mut *unreported };
        segments.clear();
        tree.hold(after, keys, cache.holder(), &prompts.uses, segments);
        if !several {
            drop(tree);
            cache.count_copies(hashes, keys, segments, new);
            if cache.needs_recheck() {
                cache.recheck(&mut prompts.trees.write(number), new);
            }
            return true;
        }
        cache.count_copies(hashes, keys, segments, new);
        cache.recheck(&mut tree, new);
        // The groups of a model and its tiers share the hashes, so a key found by one cache holds
        // for all.
        for hash in hashes[..keys.len()].iter().copied() {
            let Some(position) = self.caches[at].1.position_of(hash) else { continue };
            for (_, (source, cache)) in
                self.caches.iter_mut().enumerate().filter(|(other, _)| *other != at)
            {
                let new = if source.is_chain() { &mut *added } else { &mut *unreported };
                cache.resolve(hash, position, &mut tree, &prompts.uses, new);
            }
        }
        true
    }

    /// Computes the keys of the leading blocks that can be keyed, after the block `parent` or from
    /// the start of a prompt.
    fn compute_keys(&self, event: &BlockStored, parent: Option<BlockKey>, scratch: &mut Scratch) {
        let Scratch { hasher, extra_keys: reader, keys, .. } = scratch;
        keys.clear();
        if let KeyScheme::EngineHashes(scheme) = &self.scheme {
            return keys.extend(event.block_hashes.iter().map(|hash| scheme.key(hash)));
        }
        let lora = event.lora_name.as_deref();
        let has_extra_keys =
            event.extra_keys.as_ref().is_some_and(|keys| keys.iter().any(Option::is_some));
        let size = self.block_size.get();
        let mut last = parent;
        for (block, tokens) in event.token_ids.chunks_exact(size).enumerate() {
            if let Some(parent) = last
                && !has_extra_keys
                && lora.is_none()
                && event.token_ids.len() >= (block + MIN_SERIES_BLOCKS) * size
            {
                hasher.text_keys(parent, &event.token_ids[block * size..], size, keys);
                break;
            }
            let extra_keys = event
                .extra_keys
                .as_ref()
                .and_then(|keys| keys[block].as_deref())
                .unwrap_or_default();
            let Some(salt) = reader.read(extra_keys, lora, last.is_none()) else { break };
            let media = &reader.media;
            let key = hasher.key(&BlockContent { parent: last, tokens, media, lora, salt });
            keys.push(key);
            last = Some(key);
        }
    }

    /// Finds the block that an event continues. Keeps its tree locked if `keep_locked`.
    fn find_parent<'a>(
        &self,
        hash: EngineHash,
        keep_locked: bool,
        prompts: &'a Prompts,
    ) -> Option<ParentBlock<'a>> {
        let position = self.position_of(hash)?;
        let number = Trees::tree_with(position.node);
        if keep_locked {
            let tree = prompts.trees.write(number);
            return Some(ParentBlock { position, key: tree.key(position)?, tree: Some(tree) });
        }
        let key = prompts.trees.read(number).key(position)?;
        Some(ParentBlock { position, key, tree: None })
    }

    /// Stores the blocks of an event that have no keys. Another cache may know their keys, for
    /// example if an attention group skips blocks, or for lower tiers.
    fn store_by_hash(
        &mut self,
        at: usize,
        unreadable: usize,
        prompts: &Prompts,
        scratch: &mut Scratch,
    ) {
        let Scratch { hashes, keys, added, unreported, .. } = scratch;
        let from = keys.len();
        for (block, hash) in hashes.iter().copied().enumerate().skip(from) {
            let position = self.position_of(hash);
            let has_chains = self.caches.iter().any(|(source, _)| source.is_chain());
            let (source, cache) = &mut self.caches[at];
            let new = if source.is_chain() || !has_chains { &mut *added } else { &mut *unreported };
            match position {
                Some(position) => cache.store_at(hash, position, prompts, new),
                None => {
                    let is_unreadable = block - from < unreadable;
                    self.stats.unreadable_extra_keys += u64::from(is_unreadable);
                    self.stats.unknown_parents += u64::from(!is_unreadable);
                    cache.store_unknown(hash);
                }
            }
        }
    }

    /// Applies a removed event.
    pub(super) fn remove(
        &mut self,
        event: &BlockRemoved,
        prompts: &Prompts,
        scratch: &mut Scratch,
    ) {
        let removed =
            Source::from_names(event.medium.as_deref(), event.group_idx, event.locality.as_deref());
        let Some(removed) = removed else {
            self.stats.ignored_events += 1;
            return;
        };
        let is_removed =
            |source: &Source| source.tier == removed.tier && source.group == removed.group;
        let Some((_, cache)) = self.caches.iter_mut().find(|(source, _)| is_removed(source)) else {
            self.stats.unknown_removals += event.block_hashes.len() as u64;
            return;
        };
        scratch.hashes.clear();
        scratch.hashes.extend(event.block_hashes.iter().map(engine_hash));
        self.stats.unknown_removals += cache.remove(&scratch.hashes, prompts);
    }

    /// Records presumed blocks; see [`PrefixIndex::presume`](super::PrefixIndex::presume).
    pub(super) fn presume(&mut self, chain: &[BlockKey], prompts: &Prompts) {
        self.first().presume(chain, prompts);
        self.first().release_collided(prompts);
    }

    /// Removes presumed blocks; see [`PrefixIndex::forget`](super::PrefixIndex::forget).
    pub(super) fn forget_presumed(&mut self, keys: &[BlockKey], prompts: &Prompts) {
        self.stats.unknown_removals += self.first().forget_presumed(keys, prompts);
    }

    /// Removes all blocks in all tiers, but keeps the groups. Returns the old caches if they held
    /// anything.
    pub(super) fn clear(&mut self, workers: &Workers) -> Vec<Cache> {
        if self.entries() > 0 {
            return workers.renew_caches(self.id, &mut self.caches);
        }
        self.caches.iter_mut().for_each(|(_, cache)| drop(cache.replace(cache.holder())));
        Vec::new()
    }

    /// Makes the worker ignore all further changes. Returns its caches.
    pub(super) fn retire(&mut self) -> Vec<Cache> {
        self.is_retired = true;
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

    /// Returns the number of hashes in all caches.
    pub(super) fn entries(&self) -> usize {
        self.caches.iter().map(|(_, cache)| cache.len()).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        self.caches.iter().map(|(_, cache)| cache.bytes()).sum()
    }

    /// Returns the cache with this number, or `None` after the last one.
    pub(super) fn cache(&mut self, number: usize) -> Option<&mut Cache> {
        self.caches.get_mut(number).map(|(_, cache)| cache)
    }

    /// Returns the position of a hash's block, if a cache has a keyed entry for it.
    fn position_of(&self, hash: EngineHash) -> Option<Position> {
        self.caches.iter().find_map(|(_, cache)| cache.position_of(hash))
    }

    /// Returns the number of the cache that a stored event is about. Adds the cache if necessary.
    /// Returns `None` if the worker already has the maximum number of caches.
    fn find_or_add_cache(&mut self, source: Source, workers: &Workers) -> Option<usize> {
        let known =
            |(known, _): &(Source, Cache)| known.tier == source.tier && known.group == source.group;
        if source.tier == Tier::Device && !self.first_is_named {
            self.first_is_named = true;
            // If the first cache already holds presumed blocks, it keeps them and stays a chain.
            if source != self.caches[0].0 && self.caches[0].1.len() == 0 {
                self.caches[0].0 = source;
                workers.list_caches(self.id, &self.caches);
            }
        }
        if let Some(at) = self.caches.iter().position(known) {
            return Some(at);
        }
        if self.caches.len() == MAX_CACHES {
            return None;
        }
        self.caches.push((source, Cache::new(workers.new_holder())));
        workers.list_caches(self.id, &self.caches);
        Some(self.caches.len() - 1)
    }
}
