//! The blocks of one worker, by the engine's names for them.

mod presumed;

use std::collections::HashMap;

use chiasm_types::BlockSize;

use super::WorkerIndexStats;
use super::blocks::Blocks;
use super::clock::Clock;
use super::disorder::Disorder;
use super::holders::Place;
use super::marks::Marks;
use super::table::{Slot, Table};
use crate::block_key::{BlockContent, BlockHasher, BlockKey};
use crate::event::{BlockRemoved, BlockStored, ExternalHash};

/// What all workers share.
pub(super) struct Shared {
    pub(super) blocks: Blocks,
    pub(super) disorder: Disorder,
    pub(super) clock: Clock,
}

/// See [`PrefixIndex`](super::PrefixIndex) for the rules.
///
/// # Invariants
/// - The shared table has this worker at a key exactly when an entry with that key is held.
/// - A held entry with a parent is counted in the parent's entry. An entry that is not held but has children stays, as a
///   gap, even without copies, and is written down in [`Disorder`] from before the time that it is not held. So is the
///   whole worker, as tangled, from before the time that links are wrong.
/// - An entry without copies and without children does not exist.
pub(super) struct WorkerBlocks {
    place: Place,
    block_size: BlockSize,
    entries: Table<Entry>,
    /// How many hashes beyond one have this key, for those keys that have several: the engine tells blocks apart that we
    /// don't, such as those of two LoRA adapters with the same name.
    more: HashMap<BlockKey, u32>,
    hasher: BlockHasher,
    /// Removed from the index: what still comes is ignored.
    gone: bool,
    stats: WorkerIndexStats,
}

/// An engine's hash of a block, in 64 bits: those that the engine sent, or of its longer ones as many of their BLAKE3.
type Name = u64;

#[derive(Default)]
struct Entry {
    name: Name,
    /// Its own name when it has none that counts it.
    parent: Name,
    /// Halves of a [`BlockKey`], lest it be aligned to 16 bytes. Of the last time it was held, if it is not.
    key: [u64; 2],
    /// Held entries whose parent it is.
    children: u32,
    /// Copies that the engine holds · 2 + whether it is held: there are copies, and the key is known.
    state: u32,
}

impl Slot for Entry {
    type Key = Name;

    fn key(&self) -> Option<Name> {
        (self.state != 0 || self.children != 0).then_some(self.name)
    }

    /// Engines send hashes, but nothing says that their bits are uniform.
    fn hash(name: Name) -> u64 {
        let product = u128::from(name ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_d6e8_feb8_6659_fd93;
        (product >> 64) as u64 ^ product as u64
    }
}

impl Entry {
    fn held(&self) -> bool {
        self.state & 1 != 0
    }

    fn set_held(&mut self, held: bool) {
        self.state = self.state & !1 | u32::from(held);
    }

    fn copies(&self) -> u32 {
        self.state / 2
    }

    fn key(&self) -> BlockKey {
        BlockKey::from_halves(self.key)
    }
}

/// What comes before a stored block.
#[derive(Clone, Copy)]
enum Before {
    StartOfPrompt,
    Block(BlockKey, Name),
    Unknown,
}

impl WorkerBlocks {
    pub(super) fn new(place: Place, block_size: BlockSize) -> Self {
        Self {
            place,
            block_size,
            entries: Table::new(),
            more: HashMap::new(),
            hasher: BlockHasher::default(),
            gone: false,
            stats: WorkerIndexStats::default(),
        }
    }

    pub(super) fn gone(&self) -> bool {
        self.gone
    }

    pub(super) fn store(&mut self, event: &BlockStored, shared: &Shared, added: &mut Vec<BlockKey>) {
        if !counts(event.medium.as_deref(), event.group_idx, event.locality.as_deref())
            || event.block_size as usize != self.block_size.get()
        {
            self.stats.ignored_events += 1;
            return;
        }
        let blocks = event.block_hashes.len();
        let fits = event.token_ids.len() == blocks * self.block_size.get()
            && event.extra_keys.as_ref().is_none_or(|keys| keys.len() == blocks);
        if !fits {
            self.stats.unreadable_extra_keys += blocks as u64;
            event.block_hashes.iter().for_each(|hash| self.add_copy(name(hash), None, shared, added));
            return;
        }

        let mut before = match &event.parent_block_hash {
            None => Before::StartOfPrompt,
            Some(parent) => match self.entries.get(name(parent)) {
                Some(entry) if entry.held() => Before::Block(entry.key(), entry.name),
                _ => Before::Unknown,
            },
        };
        let tokens = event.token_ids.chunks_exact(self.block_size.get());
        for (block, (hash, tokens)) in event.block_hashes.iter().zip(tokens).enumerate() {
            let name = name(hash);
            let extra_keys = event.extra_keys.as_ref().and_then(|keys| keys[block].as_deref()).unwrap_or_default();
            let first = matches!(before, Before::StartOfPrompt);
            let key = match (before, Marks::read(extra_keys, event.lora_name.as_deref(), first)) {
                (Before::Unknown, _) => {
                    self.stats.unknown_parents += 1;
                    None
                }
                (_, None) => {
                    self.stats.unreadable_extra_keys += 1;
                    None
                }
                (before, Some(marks)) => Some(self.hasher.key(&BlockContent {
                    parent: before.key(),
                    tokens,
                    media: &marks.media,
                    lora: event.lora_name.as_deref(),
                    salt: marks.salt,
                })),
            };
            self.add_copy(name, key.map(|key| (key, before.name().unwrap_or(name))), shared, added);
            before = key.map_or(Before::Unknown, |key| Before::Block(key, name));
        }
    }

    pub(super) fn remove(&mut self, event: &BlockRemoved, shared: &Shared) {
        if !counts(event.medium.as_deref(), event.group_idx, event.locality.as_deref()) {
            self.stats.ignored_events += 1;
            return;
        }
        for hash in &event.block_hashes {
            match self.entries.get_mut(name(hash)).filter(|entry| entry.copies() > 0) {
                None => self.stats.unknown_removals += 1,
                Some(entry) if entry.copies() > 1 => entry.state -= 2,
                Some(entry) => {
                    let name = entry.name;
                    self.forget(name, shared);
                }
            }
        }
    }

    /// Holds nothing any more; lookups see all or nothing of it.
    pub(super) fn clear(&mut self, shared: &Shared) {
        shared.disorder.hide(self.place);
        for entry in self.entries.iter() {
            if entry.held() {
                shared.blocks.remove(entry.key(), self.place);
            } else if entry.children > 0 {
                shared.disorder.close_gap(entry.key(), self.place);
            }
        }
        self.entries.clear();
        self.more = HashMap::new();
        (self.stats.blocks, self.stats.unkeyed_blocks) = (0, 0);
        shared.disorder.unhide(self.place);
    }

    /// As [`WorkerBlocks::clear`], for good.
    pub(super) fn end(&mut self, shared: &Shared) {
        self.clear(shared);
        self.gone = true;
    }

    /// Another engine in the same place.
    pub(super) fn start_over(&mut self, block_size: BlockSize, shared: &Shared) {
        self.clear(shared);
        (self.block_size, self.stats) = (block_size, WorkerIndexStats::default());
    }

    pub(super) fn stats(&self) -> WorkerIndexStats {
        self.stats
    }

    pub(super) fn count_event(&mut self, ignored: bool) {
        self.stats.events += 1;
        self.stats.ignored_events += u64::from(ignored);
    }

    pub(super) fn entries(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> usize {
        // A map's slot is as large as what is in it, and one byte.
        self.entries.bytes() + self.more.capacity() * (size_of::<(BlockKey, u32)>() + 1)
    }

    /// Ages of blocks without children, in ticks, at most `most` of them.
    pub(super) fn leaf_ages(&self, shared: &Shared, most: usize) -> Vec<u32> {
        let leaves = self.entries.iter().filter(|entry| entry.children == 0);
        leaves.take(most).map(|entry| age(entry, shared)).collect()
    }

    /// Forgets blocks without children that are at least so old, and then their parents likewise, up to a number. What
    /// the engine says of them later is as of blocks that we never heard of. Returns how many.
    pub(super) fn shed(&mut self, oldest: u32, most: usize, shared: &Shared) -> usize {
        let leaves: Vec<Name> =
            self.entries.iter().filter(|entry| entry.children == 0).map(|entry| entry.name).collect();
        let mut shed = 0;
        for leaf in leaves {
            let mut next = Some(leaf);
            while let Some(name) = next.take().filter(|_| shed < most) {
                let old = |entry: &&Entry| entry.children == 0 && age(entry, shared) >= oldest;
                let Some(entry) = self.entries.get(name).filter(old) else { break };
                next = (entry.held() && entry.parent != name).then_some(entry.parent);
                self.forget(name, shared);
                shed += 1;
            }
        }
        self.stats.shed_blocks += shed as u64;
        self.entries.fit();
        shed
    }

    fn add_copy(&mut self, name: Name, key: Option<(BlockKey, Name)>, shared: &Shared, added: &mut Vec<BlockKey>) {
        let stats = &mut self.stats;
        let new = || Entry { name, parent: name, ..Default::default() };
        let entry = self.entries.get_or_insert_with(name, new);
        if entry.copies() == 0 {
            stats.unkeyed_blocks += 1;
        }
        entry.state += 2;
        match key {
            Some((key, parent)) if !entry.held() => {
                stats.unkeyed_blocks -= 1;
                let gap = (entry.children > 0).then(|| entry.key());
                entry.key = key.halves();
                entry.set_held(true);
                if gap.is_some_and(|gap| gap != key) {
                    shared.disorder.tangle(self.place);
                }
                if shared.blocks.insert(key, self.place, &shared.clock) {
                    stats.blocks += 1;
                    added.push(key);
                } else {
                    *self.more.entry(key).or_default() += 1;
                }
                // Only now: until the block was there, the gap was.
                if let Some(gap) = gap {
                    shared.disorder.close_gap(gap, self.place);
                }
                if parent != name
                    && self.link(parent)
                    && let Some(entry) = self.entries.get_mut(name)
                {
                    entry.parent = parent;
                }
            }
            Some((key, _)) if entry.key() != key => {
                shared.disorder.tangle(self.place);
                stats.unkeyed_blocks += 1;
                self.release(name, shared);
            }
            _ => {}
        }
    }

    /// All copies of an entry that has some.
    fn forget(&mut self, name: Name, shared: &Shared) {
        if self.entries.get(name).is_some_and(Entry::held) {
            self.release(name, shared);
        } else {
            self.stats.unkeyed_blocks -= 1;
        }
        match self.entries.get_mut(name) {
            Some(entry) if entry.children > 0 => entry.state = 0,
            _ => drop(self.entries.remove(name)),
        }
    }

    /// A held entry is no longer: what it counts for in the shared table and in its parent's entry. Its copies stay.
    fn release(&mut self, name: Name, shared: &Shared) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        let (key, parent) = (entry.key(), entry.parent);
        if entry.children > 0 {
            shared.disorder.open_gap(key, self.place);
        }
        entry.set_held(false);
        entry.parent = name;
        match self.more.get_mut(&key) {
            Some(1) => drop(self.more.remove(&key)),
            Some(more) => *more -= 1,
            None => {
                shared.blocks.remove(key, self.place);
                self.stats.blocks -= 1;
            }
        }
        if parent != name {
            self.unlink(parent, shared);
        }
    }

    /// Counts a child in its parent's entry; whether there is one that is held.
    fn link(&mut self, parent: Name) -> bool {
        let entry = self.entries.get_mut(parent).filter(|entry| entry.held());
        entry.map(|entry| entry.children += 1).is_some()
    }

    /// One child less.
    fn unlink(&mut self, parent: Name, shared: &Shared) {
        // None and 0 are for tangled workers only.
        let Some(entry) = self.entries.get_mut(parent).filter(|entry| entry.children > 0) else { return };
        if entry.children == 1 && !entry.held() {
            shared.disorder.close_gap(entry.key(), self.place);
        }
        if entry.children == 1 && entry.state == 0 {
            self.entries.remove(parent);
        } else {
            entry.children -= 1;
        }
    }
}

impl Before {
    fn key(self) -> Option<BlockKey> {
        match self {
            Self::Block(key, _) => Some(key),
            Self::StartOfPrompt | Self::Unknown => None,
        }
    }

    fn name(self) -> Option<Name> {
        match self {
            Self::Block(_, name) => Some(name),
            Self::StartOfPrompt | Self::Unknown => None,
        }
    }
}

/// Ticks since its last use; what matches nothing is of no use.
fn age(entry: &Entry, shared: &Shared) -> u32 {
    let known = entry.held().then(|| shared.blocks.age(entry.key(), &shared.clock));
    known.flatten().unwrap_or(u32::MAX)
}

fn name(hash: &ExternalHash) -> Name {
    match hash {
        ExternalHash::U64(hash) => *hash,
        ExternalHash::Bytes(bytes) => {
            let digest = blake3::derive_key("chiasm 2026 engine's long block hash", bytes);
            digest.iter().take(size_of::<Name>()).fold(0, |name, byte| name << 8 | Name::from(*byte))
        }
    }
}

fn counts(medium: Option<&str>, group: Option<u32>, locality: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium == "GPU") && group.is_none_or(|group| group == 0) && locality != Some("REMOTE")
}
