//! The blocks of one KV-cache group of one worker in one tier, by the engine's names for them.

mod presumed;

use std::collections::HashMap;

use super::blocks::Blocks;
use super::clock::Clock;
use super::disorder::Disorder;
use super::holders::Place;
use super::table::{Slot, Table};
use crate::block_key::{BlockKey, BuildBlockKeyHasher};
use crate::event::ExternalHash;

/// What all workers share.
pub(super) struct Shared {
    pub(super) blocks: Blocks,
    pub(super) disorder: Disorder,
    pub(super) clock: Clock,
}

/// See [`PrefixIndex`](super::PrefixIndex) for the rules.
///
/// # Invariants
/// - The shared table has this place at a key exactly when an entry with that key is held.
/// - Of a chain, a held entry with a parent is counted in the parent's entry. An entry that is not held but has children
///   stays, as a gap, even without copies, and is written down in [`Disorder`] from before the time that it is not held
///   while it has children. So is the whole place, as tangled, from before the time that links are wrong.
/// - An entry without copies and without children does not exist.
pub(super) struct Part {
    place: Place,
    /// Whether lookups go by links to parents: not where any block may be missing.
    chain: bool,
    entries: Table<Entry>,
    /// How many hashes beyond one have this key, for those keys that have several: the engine tells blocks apart that we
    /// don't, such as those of two LoRA adapters with the same name.
    more: HashMap<BlockKey, u32, BuildBlockKeyHasher>,
    counts: PartCounts,
}

/// As in [`WorkerIndexStats`](super::WorkerIndexStats).
#[derive(Clone, Copy, Default)]
pub(super) struct PartCounts {
    pub(super) blocks: usize,
    pub(super) unkeyed: usize,
    pub(super) shed: u64,
}

/// An engine's hash of a block, in 64 bits: those that the engine sent, or of its longer ones as many of their BLAKE3.
pub(super) type Name = u64;

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
        let product = u128::from(name ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
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

/// What a block is: its key and the block before it.
#[derive(Clone, Copy)]
pub(super) struct Identity {
    pub(super) key: BlockKey,
    pub(super) parent: Option<(Name, BlockKey)>,
}

impl Part {
    pub(super) fn new(place: Place, chain: bool) -> Self {
        Self { place, chain, entries: Table::new(), more: HashMap::default(), counts: PartCounts::default() }
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Of a part that holds nothing.
    pub(super) fn set_chain(&mut self, chain: bool) {
        self.chain = chain;
    }

    /// Of a block that is held.
    pub(super) fn key_of(&self, name: Name) -> Option<BlockKey> {
        self.entries.get(name).filter(|entry| entry.held()).map(Entry::key)
    }

    /// One copy more. Pushes the key if the part did not hold it.
    pub(super) fn store(&mut self, name: Name, known: Option<Identity>, shared: &Shared, added: &mut Vec<BlockKey>) {
        let new = || Entry { name, parent: name, ..Default::default() };
        let entry = self.entries.get_or_insert_with(name, new);
        if entry.copies() == 0 {
            self.counts.unkeyed += 1;
        }
        entry.state += 2;
        match known {
            Some(identity) if !entry.held() => self.identify(name, identity, shared, added),
            Some(identity) if entry.key() != identity.key => {
                shared.disorder.tangle(self.place);
                self.counts.unkeyed += 1;
                self.release(name, shared);
            }
            _ => {}
        }
    }

    /// What the copies are that are here, if that was not known.
    pub(super) fn tell(&mut self, name: Name, identity: Identity, shared: &Shared, added: &mut Vec<BlockKey>) {
        if self.entries.get(name).is_some_and(|entry| entry.copies() > 0 && !entry.held()) {
            self.identify(name, identity, shared, added);
        }
    }

    /// One copy less; whether there was one.
    pub(super) fn remove(&mut self, name: Name, shared: &Shared) -> bool {
        match self.entries.get_mut(name).filter(|entry| entry.copies() > 0) {
            None => return false,
            Some(entry) if entry.copies() > 1 => entry.state -= 2,
            Some(_) => self.forget(name, shared),
        }
        true
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
        self.more = HashMap::default();
        (self.counts.blocks, self.counts.unkeyed) = (0, 0);
        shared.disorder.unhide(self.place);
    }

    pub(super) fn counts(&self) -> PartCounts {
        self.counts
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> usize {
        // A map's slot is as large as what is in it, and one byte.
        self.entries.bytes() + self.more.capacity() * (size_of::<(BlockKey, u32)>() + 1)
    }

    /// Ages of blocks without children, in ticks.
    pub(super) fn leaf_ages(&self, shared: &Shared) -> impl Iterator<Item = u32> {
        let leaves = self.entries.iter().filter(|entry| entry.children == 0);
        leaves.map(|entry| age(entry, shared))
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
        self.counts.shed += shed as u64;
        self.entries.fit();
        shed
    }

    /// An entry that has copies and is not held is from now on.
    fn identify(&mut self, name: Name, identity: Identity, shared: &Shared, added: &mut Vec<BlockKey>) {
        let parent = identity.parent.filter(|(parent, _)| self.chain && *parent != name);
        if let Some((parent, key)) = parent {
            self.link(parent, key, shared);
        }
        let Some(entry) = self.entries.get_mut(name) else { return };
        let key = identity.key;
        let gap = (entry.children > 0).then(|| entry.key());
        entry.key = key.halves();
        entry.parent = parent.map_or(name, |(parent, _)| parent);
        entry.set_held(true);
        self.counts.unkeyed -= 1;
        if gap.is_some_and(|gap| gap != key) {
            shared.disorder.tangle(self.place);
        }
        if shared.blocks.insert(key, self.place, &shared.clock) {
            self.counts.blocks += 1;
            added.push(key);
        } else {
            *self.more.entry(key).or_default() += 1;
        }
        // Only now: until the block was there, the gap was.
        if let Some(gap) = gap {
            shared.disorder.close_gap(gap, self.place);
        }
    }

    /// All copies of an entry that has some.
    fn forget(&mut self, name: Name, shared: &Shared) {
        if self.entries.get(name).is_some_and(Entry::held) {
            self.release(name, shared);
        } else {
            self.counts.unkeyed -= 1;
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
                self.counts.blocks -= 1;
            }
        }
        if parent != name {
            self.unlink(parent, shared);
        }
    }

    /// Counts a child in its parent's entry. One that is not held here, but elsewhere at this worker, becomes a gap.
    fn link(&mut self, parent: Name, key: BlockKey, shared: &Shared) {
        let entry = self.entries.get_or_insert_with(parent, || Entry { name: parent, parent, ..Default::default() });
        if entry.children == 0 && !entry.held() {
            entry.key = key.halves();
            shared.disorder.open_gap(key, self.place);
        } else if entry.key() != key {
            shared.disorder.tangle(self.place);
        }
        entry.children += 1;
    }

    /// One child less.
    fn unlink(&mut self, parent: Name, shared: &Shared) {
        // None and 0 are for tangled places only.
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

/// Ticks since its last use; what matches nothing is of no use.
fn age(entry: &Entry, shared: &Shared) -> u32 {
    let known = entry.held().then(|| shared.blocks.age(entry.key(), &shared.clock));
    known.flatten().unwrap_or(u32::MAX)
}

pub(super) fn name(hash: &ExternalHash) -> Name {
    match hash {
        ExternalHash::U64(hash) => *hash,
        ExternalHash::Bytes(bytes) => {
            let digest = blake3::derive_key("chiasm 2026 engine's long block hash", bytes);
            digest.iter().take(size_of::<Name>()).fold(0, |name, byte| name << 8 | Name::from(*byte))
        }
    }
}
