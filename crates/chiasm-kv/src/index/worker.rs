//! One worker: what its events say, for each KV-cache group in each tier.

use chiasm_types::{BlockSize, WorkerId};

use super::WorkerIndexStats;
use super::marks::Marks;
use super::part::{Identity, Name, Part, Shared, name};
use super::source::{Source, Tier};
use super::workers::Workers;
use crate::block_key::{BlockContent, BlockHasher, BlockKey};
use crate::event::{BlockRemoved, BlockStored};

/// More than any model has of groups, times the tiers: what engines send must not take all places.
const MOST_PARTS: usize = 64;

pub(super) struct Worker {
    id: WorkerId,
    block_size: BlockSize,
    /// The first is the group on the device that events named first, or of presumptions; at least that one is there.
    parts: Vec<(Source, Part)>,
    /// Whether events have said which group the first part is.
    named: bool,
    hasher: BlockHasher,
    /// Removed from the index: what still comes is ignored.
    gone: bool,
    /// Without the counts of parts.
    stats: WorkerIndexStats,
}

/// What comes before a stored block.
#[derive(Clone, Copy)]
enum Before {
    StartOfPrompt,
    Block(Name, BlockKey),
    Unknown,
}

impl Worker {
    pub(super) fn new(id: WorkerId, part: Part, block_size: BlockSize) -> Self {
        Self {
            id,
            block_size,
            parts: vec![(Source::default(), part)],
            named: false,
            hasher: BlockHasher::default(),
            gone: false,
            stats: WorkerIndexStats::default(),
        }
    }

    pub(super) fn gone(&self) -> bool {
        self.gone
    }

    pub(super) fn parts(&self) -> &[(Source, Part)] {
        &self.parts
    }

    /// The first one is always there.
    fn first(&mut self) -> &mut Part {
        &mut self.parts[0].1
    }

    pub(super) fn store(&mut self, event: &BlockStored, shared: &Shared, workers: &Workers, added: &mut Vec<BlockKey>) {
        let source = Source::of(event, self.block_size).filter(|source| {
            // Events of lower tiers may come without tokens and without a size; those that have tokens lack the marks of
            // images. So only the hashes of theirs are used.
            source.tier != Tier::Device || event.block_size as usize == self.block_size.get()
        });
        let Some(at) = source.and_then(|source| self.part_of(source, workers)) else {
            self.stats.ignored_events += 1;
            return;
        };
        let from = added.len();
        let mut news =
            News { added, untold: Vec::new(), chains: self.parts.iter().any(|(source, _)| source.is_chain()) };
        let blocks = event.block_hashes.len();
        let fits = event.token_ids.len() == blocks * self.block_size.get()
            && event.extra_keys.as_ref().is_none_or(|keys| keys.len() == blocks);
        if self.parts[at].0.tier != Tier::Device || (!fits && self.parts.len() > 1) {
            self.store_by_name(at, event, shared, &mut news);
        } else if !fits {
            self.stats.unreadable_extra_keys += blocks as u64;
            let part = &mut self.parts[at].1;
            event.block_hashes.iter().for_each(|hash| part.store(name(hash), None, shared, &mut news.untold));
        } else {
            self.store_tokens(at, event, shared, &mut news);
        }
        if self.parts.len() > 1 {
            self.keep_held(from, added, shared);
        }
    }

    /// Blocks that other parts may know: an attention group that skips blocks, and lower tiers.
    fn store_by_name(&mut self, at: usize, event: &BlockStored, shared: &Shared, news: &mut News<'_>) {
        let source = self.parts[at].0;
        for hash in &event.block_hashes {
            let name = name(hash);
            let known = self.known(source, name);
            self.stats.unknown_parents += u64::from(known.is_none());
            self.parts[at].1.store(name, known, shared, news.of(source));
        }
    }

    fn store_tokens(&mut self, at: usize, event: &BlockStored, shared: &Shared, news: &mut News<'_>) {
        let mut before = match event.parent_block_hash.as_ref().map(name) {
            None => Before::StartOfPrompt,
            Some(parent) => self.key_of(parent).map_or(Before::Unknown, |key| Before::Block(parent, key)),
        };
        let lora = event.lora_name.as_deref();
        let tokens = event.token_ids.chunks_exact(self.block_size.get());
        for (block, (hash, tokens)) in event.block_hashes.iter().zip(tokens).enumerate() {
            let name = name(hash);
            let extra_keys = event.extra_keys.as_ref().and_then(|keys| keys[block].as_deref()).unwrap_or_default();
            let first = matches!(before, Before::StartOfPrompt);
            let known = match (before, Marks::read(extra_keys, lora, first)) {
                (Before::Unknown, _) => {
                    self.stats.unknown_parents += 1;
                    None
                }
                (_, None) => {
                    self.stats.unreadable_extra_keys += 1;
                    None
                }
                (before, Some(marks)) => {
                    let (parent, media, salt) = (before.parent(), &marks.media, marks.salt);
                    let content = BlockContent { parent: parent.map(|(_, key)| key), tokens, media, lora, salt };
                    Some(Identity { key: self.hasher.key(&content), parent })
                }
            };
            before = known.map_or(Before::Unknown, |known| Before::Block(name, known.key));
            let several = self.parts.len() > 1;
            let told = known.filter(|_| several);
            let known = known.or_else(|| self.known(self.parts[at].0, name));
            let (source, part) = &mut self.parts[at];
            part.store(name, known, shared, news.of(*source));
            // What one part says of a hash holds for all: the groups of a model and the tiers share the hashes.
            if let Some(identity) = told {
                for (_, (source, part)) in self.parts.iter_mut().enumerate().filter(|(other, _)| *other != at) {
                    part.tell(name, identity, shared, news.of(*source));
                }
            }
        }
    }

    pub(super) fn remove(&mut self, event: &BlockRemoved, shared: &Shared) {
        let part = Source::named(event.medium.as_deref(), event.group_idx, event.locality.as_deref()).map(|removed| {
            self.parts.iter_mut().find(|(source, _)| source.tier == removed.tier && source.group == removed.group)
        });
        match part {
            None => self.stats.ignored_events += 1,
            Some(None) => self.stats.unknown_removals += event.block_hashes.len() as u64,
            Some(Some((_, part))) => {
                let unknown = event.block_hashes.iter().filter(|hash| !part.remove(name(hash), shared)).count();
                self.stats.unknown_removals += unknown as u64;
            }
        }
    }

    pub(super) fn presume(&mut self, chain: &[BlockKey], shared: &Shared) {
        self.first().presume(chain, shared);
    }

    pub(super) fn forget_presumed(&mut self, keys: &[BlockKey], shared: &Shared) {
        self.stats.unknown_removals += self.first().forget_presumed(keys, shared);
    }

    /// Holds nothing any more, in no tier. The groups are those of the engine still.
    pub(super) fn clear(&mut self, shared: &Shared) {
        self.parts.iter_mut().for_each(|(_, part)| part.clear(shared));
    }

    /// As [`Worker::clear`], for good.
    pub(super) fn end(&mut self, shared: &Shared) {
        self.clear(shared);
        self.gone = true;
    }

    /// Another engine in the same place.
    pub(super) fn start_over(&mut self, block_size: BlockSize, shared: &Shared, workers: &Workers) {
        self.clear(shared);
        let others: Vec<_> = self.parts.drain(1..).map(|(_, part)| part.place()).collect();
        self.parts[0].0 = Source::default();
        self.first().set_chain(true);
        self.named = false;
        (self.block_size, self.stats) = (block_size, WorkerIndexStats::default());
        workers.list_parts(self.id, &self.parts);
        workers.free(others);
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

    /// Ages of blocks without children, in ticks, at most `most` of them.
    pub(super) fn leaf_ages(&self, shared: &Shared, most: usize) -> Vec<u32> {
        let parts =
            self.parts.iter().flat_map(|(_, part)| part.leaf_ages(shared).take(most.div_ceil(self.parts.len())));
        parts.collect()
    }

    /// As [`Part::shed`].
    pub(super) fn shed(&mut self, oldest: u32, most: usize, shared: &Shared) -> usize {
        self.parts.iter_mut().fold(0, |shed, (_, part)| shed + part.shed(oldest, most - shed, shared))
    }

    /// What some part knows of a hash. Not for a chain: it would need to know the parent.
    fn known(&self, source: Source, name: Name) -> Option<Identity> {
        if source.is_chain() {
            return None;
        }
        self.key_of(name).map(|key| Identity { key, parent: None })
    }

    /// Of a hash that some part holds and knows.
    fn key_of(&self, name: Name) -> Option<BlockKey> {
        self.parts.iter().find_map(|(_, part)| part.key_of(name))
    }

    /// The part that a stored event is about, made if need be.
    fn part_of(&mut self, source: Source, workers: &Workers) -> Option<usize> {
        let known = |(known, _): &(Source, Part)| known.tier == source.tier && known.group == source.group;
        if source.tier == Tier::Device && !self.named {
            self.named = true;
            // What was presumed before is what the worker is believed to hold all of.
            if source != self.parts[0].0 && self.parts[0].1.len() == 0 {
                self.parts[0].0 = source;
                self.first().set_chain(source.is_chain());
                workers.list_parts(self.id, &self.parts);
            }
        }
        if let Some(at) = self.parts.iter().position(known) {
            return Some(at);
        }
        if self.parts.len() == MOST_PARTS {
            return None;
        }
        self.parts.push((source, Part::new(workers.new_place(), source.is_chain())));
        workers.list_parts(self.id, &self.parts);
        Some(self.parts.len() - 1)
    }

    /// Of the keys added from `from` on, those that all groups hold that must hold all leading blocks.
    fn keep_held(&self, from: usize, added: &mut Vec<BlockKey>, shared: &Shared) {
        let leading = || self.parts.iter().filter(|(source, _)| source.is_chain());
        let mut at = from;
        while at < added.len() {
            if leading().all(|(_, part)| shared.blocks.contains(added[at], part.place())) {
                at += 1;
            } else {
                added.remove(at);
            }
        }
    }
}

/// Keys newly held.
struct News<'a> {
    added: &'a mut Vec<BlockKey>,
    untold: Vec<BlockKey>,
    /// Whether there is a group that needs all leading blocks: then the others have no news.
    chains: bool,
}

impl News<'_> {
    fn of(&mut self, source: Source) -> &mut Vec<BlockKey> {
        if source.is_chain() || (!self.chains && source.tier == Tier::Device) { self.added } else { &mut self.untold }
    }
}

impl Before {
    fn parent(self) -> Option<(Name, BlockKey)> {
        match self {
            Self::Block(name, key) => Some((name, key)),
            Self::StartOfPrompt | Self::Unknown => None,
        }
    }
}
