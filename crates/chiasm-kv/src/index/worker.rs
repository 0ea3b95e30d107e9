//! One worker: what its events say, for each KV-cache group in each tier.

use chiasm_types::{BlockSize, WorkerId};

use super::WorkerIndexStats;
use super::forest::{Forest, Writer};
use super::marks::Marks;
use super::part::{Name, Part, Prompts, name};
use super::source::{Source, Tier};
use super::tree::{Segment, Spot};
use super::workers::Workers;
use crate::block_key::{BlockContent, BlockHasher, BlockKey};
use crate::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

/// Number of parts that a worker may have, more than any model has of groups, times the tiers: what engines send must not take all
/// places.
const MOST_PARTS: usize = 64;

/// Blocks of an event whose keys are made with the tree locked: what an engine says of each step of an answer.
const FEW: usize = 2;

/// Blocks from which on it takes less time to make their keys side by side.
const ROW: usize = 6;

/// What one engine holds, as its events say. A worker that was removed from the index may live on for as long as it takes in a batch.
pub(super) struct Worker {
    id: WorkerId,
    block_size: BlockSize,
    /// Its KV-cache groups in their tiers. The first is the group on the device that events named first, or that of presumptions;
    /// it is there until the worker is gone.
    parts: Vec<(Source, Part)>,
    /// Whether events have said which group the first part is.
    named: bool,
    /// Removed from the index: what still comes is ignored.
    gone: bool,
    /// Counts of the worker as a whole; parts have their own.
    stats: WorkerIndexStats,
}

/// Buffers of a batch, used again by the next one of any worker.
#[derive(Default)]
pub(super) struct Scratch {
    hasher: BlockHasher,
    marks: Marks,
    names: Vec<Name>,
    ends: Vec<Name>,
    keys: Vec<BlockKey>,
    segments: Vec<Segment>,
    /// Blocks newly held in groups that need all leading blocks, if there is such a group; else in any.
    added: Vec<(Name, BlockKey)>,
    /// Blocks newly held in other groups, which are not told to callers.
    untold: Vec<(Name, BlockKey)>,
}

impl Scratch {
    /// Gives the memory back after an event of uncommon size.
    pub(super) fn trim(&mut self) {
        if self.names.capacity() > 1 << 14 {
            *self = Self::default();
        }
    }
}

impl Worker {
    pub(super) fn new(id: WorkerId, part: Part, block_size: BlockSize) -> Self {
        Self {
            id,
            block_size,
            parts: vec![(Source::default(), part)],
            named: false,
            gone: false,
            stats: WorkerIndexStats::default(),
        }
    }

    pub(super) fn gone(&self) -> bool {
        self.gone
    }

    /// The first one is always there.
    fn first(&mut self) -> &mut Part {
        &mut self.parts[0].1
    }

    /// Brings near what a batch needs; see [`Part::warm`].
    pub(super) fn warm(&self, events: &[KvEvent], prompts: &Prompts, scratch: &mut Scratch) {
        let [(_, part)] = &self.parts[..] else { return };
        let Scratch { names, ends, .. } = scratch;
        names.clear();
        ends.clear();
        // To hash long names twice would take longer.
        let short = |hash: &ExternalHash| matches!(hash, ExternalHash::U64(_)).then(|| name(hash));
        let mut all = 0;
        for event in events {
            match event {
                KvEvent::BlockStored(stored) => {
                    ends.extend(stored.parent_block_hash.as_ref().and_then(short));
                    names.extend(stored.block_hashes.iter().filter_map(short));
                    // Each line of theirs.
                    all = stored.token_ids.iter().step_by(16).fold(all, |all, token| all ^ token.0);
                }
                KvEvent::BlockRemoved(removed) => {
                    ends.extend(removed.block_hashes.first().and_then(short));
                    names.extend(removed.block_hashes.iter().skip(1).filter_map(short));
                }
                KvEvent::AllBlocksCleared | KvEvent::Unknown(_) => {}
            }
        }
        std::hint::black_box(all);
        names.extend(&ends[..]);
        if names.len() > 1 {
            part.warm(names, ends, prompts);
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
        let source = Source::of(event, self.block_size).filter(|source| {
            // Events of lower tiers may come without tokens and without a size; those that have tokens lack the marks of
            // images. So only the hashes of theirs are used.
            source.tier != Tier::Device || event.block_size as usize == self.block_size.get()
        });
        let Some(at) = source.and_then(|source| self.part_of(source, workers)) else {
            self.stats.ignored_events += 1;
            return;
        };
        let blocks = event.block_hashes.len();
        let fits = event.token_ids.len() == blocks * self.block_size.get()
            && event.extra_keys.as_ref().is_none_or(|keys| keys.len() == blocks);
        scratch.names.clear();
        scratch.names.extend(event.block_hashes.iter().map(name));
        scratch.keys.clear();
        let parent = event.parent_block_hash.as_ref().map(name);
        // Of the blocks without keys, how many have none because of what they are, not for want of a parent.
        let mut unreadable = if fits { 0 } else { blocks };
        if self.parts[at].0.tier == Tier::Device && fits && self.store_tokens(at, event, parent, prompts, scratch) {
            unreadable = 1;
        }
        self.store_by_name(at, unreadable, prompts, scratch);
        self.parts.iter_mut().for_each(|(_, part)| part.release_collided(prompts));
        let several = self.parts.len() > 1;
        let held = |name| {
            let mut leading = self.parts.iter().filter(|(source, _)| source.is_chain());
            leading.all(|(_, part)| part.spot_of(name).is_some())
        };
        if several {
            scratch.added.retain(|(name, _)| held(*name));
        }
        added.extend(scratch.added.drain(..).map(|(_, key)| key));
        scratch.untold.clear();
    }

    /// Stores the blocks of an event that have keys; says whether their parent is known.
    fn store_tokens(
        &mut self,
        at: usize,
        event: &BlockStored,
        parent: Option<Name>,
        prompts: &Prompts,
        scratch: &mut Scratch,
    ) -> bool {
        // To take the lock twice takes longer than to hash these with it.
        let few = event.block_hashes.len() <= FEW;
        let (mut tree, mut after, mut before) = (None, None, None);
        if let Some(parent) = parent {
            let Some((spot, key, locked)) = self.parent(parent, few, prompts) else { return false };
            (tree, after, before) = (locked, Some(spot), Some(key));
        }
        self.make_keys(event, before, scratch);
        let Scratch { names, keys, segments, added, untold, .. } = scratch;
        let Some(first) = keys.first() else { return true };
        let number = after.map_or(Forest::tree_of(*first), |parent| Forest::tree_with(parent.run));
        let mut tree = tree.take().unwrap_or_else(|| prompts.forest.write(number));
        let chains = self.parts.iter().any(|(source, _)| source.is_chain());
        let several = self.parts.len() > 1;
        let (source, part) = &mut self.parts[at];
        let news = if source.is_chain() || !chains { &mut *added } else { &mut *untold };
        segments.clear();
        tree.hold(after, keys, part.place(), &prompts.uses, segments);
        if !several {
            drop(tree);
            part.name(names, keys, segments, news);
            if part.doubts() {
                part.settle_doubts(&mut prompts.forest.write(number), news);
            }
            return true;
        }
        part.name(names, keys, segments, news);
        part.settle_doubts(&mut tree, news);
        // What one part says of a hash holds for all: the groups of a model and the tiers share the hashes.
        for name in names[..keys.len()].iter().copied() {
            let Some(spot) = self.parts[at].1.spot_of(name) else { continue };
            for (_, (source, part)) in self.parts.iter_mut().enumerate().filter(|(other, _)| *other != at) {
                let news = if source.is_chain() { &mut *added } else { &mut *untold };
                part.tell(name, spot, &mut tree, &prompts.uses, news);
            }
        }
        true
    }

    /// Makes the keys of as many blocks as can be keyed, after a block with the key `before` or from the start.
    fn make_keys(&self, event: &BlockStored, before: Option<BlockKey>, scratch: &mut Scratch) {
        let Scratch { hasher, marks, keys, .. } = scratch;
        let lora = event.lora_name.as_deref();
        let marked = event.extra_keys.as_ref().is_some_and(|keys| keys.iter().any(Option::is_some));
        let size = self.block_size.get();
        keys.clear();
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
            let extra_keys = event.extra_keys.as_ref().and_then(|keys| keys[block].as_deref()).unwrap_or_default();
            let Some(salt) = marks.read(extra_keys, lora, last.is_none()) else { break };
            let key = hasher.key(&BlockContent { parent: last, tokens, media: &marks.media, lora, salt });
            keys.push(key);
            last = Some(key);
        }
    }

    /// Finds the block that an event goes on after: where it is, its key, and if `locked` its tree.
    fn parent<'a>(
        &self,
        name: Name,
        locked: bool,
        prompts: &'a Prompts,
    ) -> Option<(Spot, BlockKey, Option<Writer<'a>>)> {
        let spot = self.spot_of(name)?;
        let number = Forest::tree_with(spot.run);
        if locked {
            let tree = prompts.forest.write(number);
            return Some((spot, tree.key(spot)?, Some(tree)));
        }
        Some((spot, prompts.forest.read(number).key(spot)?, None))
    }

    /// Stores the blocks of an event that have no keys: another part may know them. So it is with an attention group that skips
    /// blocks, and with lower tiers.
    fn store_by_name(&mut self, at: usize, unreadable: usize, prompts: &Prompts, scratch: &mut Scratch) {
        let Scratch { names, keys, added, untold, .. } = scratch;
        let from = keys.len();
        for (block, name) in names.iter().copied().enumerate().skip(from) {
            let spot = self.spot_of(name);
            let chains = self.parts.iter().any(|(source, _)| source.is_chain());
            let (source, part) = &mut self.parts[at];
            let news = if source.is_chain() || !chains { &mut *added } else { &mut *untold };
            match spot {
                Some(spot) => part.store_at(name, spot, prompts, news),
                None => {
                    let unreadable = block - from < unreadable;
                    self.stats.unreadable_extra_keys += u64::from(unreadable);
                    self.stats.unknown_parents += u64::from(!unreadable);
                    part.store_unknown(name);
                }
            }
        }
    }

    pub(super) fn remove(&mut self, event: &BlockRemoved, prompts: &Prompts, scratch: &mut Scratch) {
        let part = Source::named(event.medium.as_deref(), event.group_idx, event.locality.as_deref()).map(|removed| {
            self.parts.iter_mut().find(|(source, _)| source.tier == removed.tier && source.group == removed.group)
        });
        match part {
            None => self.stats.ignored_events += 1,
            Some(None) => self.stats.unknown_removals += event.block_hashes.len() as u64,
            Some(Some((_, part))) => {
                scratch.names.clear();
                scratch.names.extend(event.block_hashes.iter().map(name));
                self.stats.unknown_removals += part.remove(&scratch.names, prompts);
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

    /// Makes the worker hold nothing any more, in no tier. The groups are those of the engine still. Returns the parts that it had, if
    /// they held anything.
    pub(super) fn clear(&mut self, workers: &Workers) -> Vec<Part> {
        if self.entries() > 0 {
            return workers.renew_parts(self.id, &mut self.parts);
        }
        self.parts.iter_mut().for_each(|(_, part)| drop(part.renew(part.place())));
        Vec::new()
    }

    /// Makes the worker ignore what still comes. Returns the parts that it had.
    pub(super) fn end(&mut self) -> Vec<Part> {
        self.gone = true;
        self.parts.drain(..).map(|(_, part)| part).collect()
    }

    pub(super) fn stats(&self) -> WorkerIndexStats {
        self.parts.iter().fold(self.stats, |mut stats, (_, part)| {
            let counts = part.counts();
            stats.blocks += counts.blocks;
            stats.unkeyed_blocks += counts.unkeyed;
            stats.shed_blocks += counts.shed;
            stats
        })
    }

    pub(super) fn count_event(&mut self, ignored: bool) {
        self.stats.events += 1;
        self.stats.ignored_events += u64::from(ignored);
    }

    pub(super) fn entries(&self) -> usize {
        self.parts.iter().map(|(_, part)| part.len()).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        self.parts.iter().map(|(_, part)| part.bytes()).sum()
    }

    /// Sheds from one part after the other; see [`Part::shed`].
    pub(super) fn shed(&mut self, oldest: u32, most: usize, prompts: &Prompts) -> usize {
        self.parts.iter_mut().fold(0, |shed, (_, part)| shed + part.shed(oldest, most - shed, prompts))
    }

    /// Where the block is that a hash names, if some part has a keyed entry for it.
    fn spot_of(&self, name: Name) -> Option<Spot> {
        self.parts.iter().find_map(|(_, part)| part.spot_of(name))
    }

    /// The part that a stored event is about, made if need be.
    fn part_of(&mut self, source: Source, workers: &Workers) -> Option<usize> {
        let known = |(known, _): &(Source, Part)| known.tier == source.tier && known.group == source.group;
        if source.tier == Tier::Device && !self.named {
            self.named = true;
            // What was presumed before is what the worker is believed to hold all of.
            if source != self.parts[0].0 && self.parts[0].1.len() == 0 {
                self.parts[0].0 = source;
                workers.list_parts(self.id, &self.parts);
            }
        }
        if let Some(at) = self.parts.iter().position(known) {
            return Some(at);
        }
        if self.parts.len() == MOST_PARTS {
            return None;
        }
        self.parts.push((source, Part::new(workers.new_place())));
        workers.list_parts(self.id, &self.parts);
        Some(self.parts.len() - 1)
    }
}
