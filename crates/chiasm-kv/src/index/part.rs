//! The blocks of one KV-cache group of one worker in one tier, by the engine's names for them.

mod entry;
mod presumed;
mod removal;
mod shedding;

use std::collections::HashMap;

use super::forest::Forest;
use super::holders::Place;
use super::table::Table;
use super::tree::{Segment, Spot, Tree};
use super::use_counter::UseCounter;
use crate::block_key::{BlockKey, BuildBlockKeyHasher};
use crate::event::ExternalHash;
use entry::Entry;

/// The prompts that any worker holds blocks of, and the count of their uses. All workers share them.
pub(super) struct Prompts {
    pub(super) forest: Forest,
    pub(super) uses: UseCounter,
}

/// See [`PrefixIndex`](super::PrefixIndex) for the rules.
///
/// Invariant: the tree has this place at a block exactly when a keyed entry names that block.
pub(super) struct Part {
    place: Place,
    /// Each hash that the engine holds copies of, with where its block is.
    entries: Table<Entry>,
    /// Copies beyond one, of those hashes that have several.
    copies: HashMap<Name, u32>,
    /// How many hashes beyond one have this key, for those keys that have several: the engine tells blocks apart that we
    /// don't, such as those of two LoRA adapters with the same name.
    more: HashMap<BlockKey, u32, BuildBlockKeyHasher>,
    counts: PartCounts,
    /// Copies whose block is not sure yet.
    doubted: Vec<Doubt>,
    /// Blocks that share their hash with others, to be released.
    collided: Vec<Spot>,
}

/// A copy of a hash that an event tells of as this block, while the part has the hash for what may be another one. The tree is
/// needed to tell, so it waits for [`Part::settle_doubts`].
struct Doubt {
    name: Name,
    key: BlockKey,
    spot: Spot,
    new: bool,
}

/// A part's share of [`WorkerIndexStats`](super::WorkerIndexStats).
#[derive(Clone, Copy, Default)]
pub(super) struct PartCounts {
    pub(super) blocks: usize,
    pub(super) unkeyed: usize,
    pub(super) shed: u64,
}

/// An engine's hash of a block, in 64 bits: those that the engine sent, or of its longer ones as many of their BLAKE3; mixed,
/// as nothing says that their bits are uniform.
pub(super) type Name = u64;

impl Part {
    pub(super) fn new(place: Place) -> Self {
        Self {
            place,
            entries: Table::new(),
            copies: HashMap::new(),
            more: HashMap::default(),
            counts: PartCounts::default(),
            doubted: Vec::new(),
            collided: Vec::new(),
        }
    }

    /// Becomes an empty part in another place, and returns what it was.
    pub(super) fn renew(&mut self, place: Place) -> Self {
        let mut new = Self::new(place);
        new.counts.shed = self.counts.shed;
        std::mem::replace(self, new)
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Where the keyed blocks are, in order.
    pub(super) fn spots(&self) -> Vec<Spot> {
        let mut spots: Vec<Spot> = self.entries.iter().filter_map(Entry::spot).collect();
        spots.sort_unstable();
        spots
    }

    fn entry(&self, name: Name) -> Option<&Entry> {
        self.entries.get(name, |_| true)
    }

    /// The place in the tree of a block that is keyed.
    pub(super) fn spot_of(&self, name: Name) -> Option<Spot> {
        self.entry(name).and_then(Entry::spot)
    }

    /// One copy more of each of these blocks, which the tree says are held here now. Pushes those that the part did not hold.
    /// Needs no tree, so that nobody waits for it; but see [`Part::doubts`].
    pub(super) fn name(
        &mut self,
        names: &[Name],
        keys: &[BlockKey],
        segments: &[Segment],
        added: &mut Vec<(Name, BlockKey)>,
    ) {
        let mut blocks = names.iter().copied().zip(keys.iter().copied());
        for segment in segments {
            for ((name, key), at) in blocks.by_ref().take(segment.len as usize).zip(0..) {
                let spot = Spot { run: segment.spot.run, at: segment.spot.at + at };
                let new = !(segment.before.0..segment.before.1).contains(&at);
                self.name_one(name, key, spot, new, added);
            }
        }
        // Where the tree has no room.
        blocks.for_each(|(name, _)| self.store_unknown(name));
    }

    /// Whether [`Part::settle_doubts`] has to follow.
    pub(super) fn doubts(&self) -> bool {
        !self.doubted.is_empty()
    }

    /// One copy more of a block that is somewhere in the tree already.
    pub(super) fn store_at(&mut self, name: Name, spot: Spot, prompts: &Prompts, added: &mut Vec<(Name, BlockKey)>) {
        let mut tree = prompts.forest.write(Forest::tree_with(spot.run));
        match tree.hold_at(spot, self.place, &prompts.uses) {
            Some((spot, key, new)) => {
                self.name_one(name, key, spot, new, added);
                self.settle_doubts(&mut tree, added);
            }
            None => self.store_unknown(name),
        }
    }

    /// One copy more of a block whose key is unknown, unless others tell.
    pub(super) fn store_unknown(&mut self, name: Name) {
        let (entry, is_new) = self.entries.entry(name, |_| true, || Entry::new(name, None));
        if is_new {
            self.counts.unkeyed += 1;
        } else {
            entry.set_several(true);
            *self.copies.entry(name).or_default() += 1;
        }
    }

    /// What the copies are that are here, if that was not known.
    pub(super) fn tell(
        &mut self,
        name: Name,
        spot: Spot,
        tree: &mut Tree,
        uses: &UseCounter,
        added: &mut Vec<(Name, BlockKey)>,
    ) {
        if self.entry(name).is_some_and(|entry| entry.spot().is_none())
            && let Some((spot, key, new)) = tree.hold_at(spot, self.place, uses)
        {
            self.identify(name, key, spot, new, added);
        }
    }

    /// Brings near what events about these names need, all at a time: to wait for one after the other takes longer. First the
    /// slots, then, for those of `ends`, what the slots lead to.
    pub(super) fn warm(&self, names: &[Name], ends: &[Name], prompts: &Prompts) {
        self.entries.warm(names.iter().copied());
        let spots = ends.iter().filter_map(|name| self.spot_of(*name));
        let mut tree = None;
        let mut all = 0;
        for spot in spots {
            let number = Forest::tree_with(spot.run);
            let (_, tree) = match tree.take().filter(|(known, _)| *known == number) {
                Some(known) => tree.insert(known),
                None => tree.insert((number, prompts.forest.read(number))),
            };
            all ^= tree.touch(spot);
        }
        std::hint::black_box(all);
    }

    pub(super) fn counts(&self) -> PartCounts {
        self.counts
    }

    /// Number of hashes that the worker holds.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> usize {
        // A map's slot is as large as what is in it, and one byte.
        self.entries.bytes()
            + self.more.capacity() * (size_of::<(BlockKey, u32)>() + 1)
            + self.copies.capacity() * (size_of::<(Name, u32)>() + 1)
    }

    /// One copy of a block that the tree says is held here now, and whether it was not before.
    fn name_one(&mut self, name: Name, key: BlockKey, spot: Spot, new: bool, added: &mut Vec<(Name, BlockKey)>) {
        let (entry, is_first) = self.entries.entry(name, |_| true, || Entry::new(name, Some(spot)));
        if is_first {
            return self.count(name, key, new, added);
        }
        entry.set_several(true);
        let is_known = entry.spot() == Some(spot);
        *self.copies.entry(name).or_default() += 1;
        if !is_known {
            self.doubted.push(Doubt { name, key, spot, new });
        }
    }

    /// Looks at copies of hashes that were here for a block with another spot, or none.
    pub(super) fn settle_doubts(&mut self, tree: &mut Tree, added: &mut Vec<(Name, BlockKey)>) {
        for Doubt { name, key, spot, new } in std::mem::take(&mut self.doubted) {
            let Some(entry) = self.entries.get_mut(name, |_| true) else { continue };
            match entry.spot() {
                None => self.identify(name, key, spot, new, added),
                Some(other) if Forest::same_tree(other.run, spot.run) && tree.find(other) == tree.find(spot) => {}
                Some(other) => {
                    // One hash of two blocks: neither counts.
                    entry.set_spot(None);
                    self.counts.unkeyed += 1;
                    if new {
                        tree.release(spot, 1, self.place);
                    }
                    // It may be in another tree.
                    self.collided.push(other);
                }
            }
        }
    }

    /// Releases the blocks that were found to share their hash. No tree may be locked: they may be in any.
    pub(super) fn release_collided(&mut self, prompts: &Prompts) {
        if !self.collided.is_empty() {
            let collided = std::mem::take(&mut self.collided);
            self.release(&collided, prompts);
        }
    }

    /// The key of an entry becomes known.
    fn identify(&mut self, name: Name, key: BlockKey, spot: Spot, new: bool, added: &mut Vec<(Name, BlockKey)>) {
        if let Some(entry) = self.entries.get_mut(name, |_| true) {
            entry.set_spot(Some(spot));
            self.counts.unkeyed -= 1;
            self.count(name, key, new, added);
        }
    }

    fn count(&mut self, name: Name, key: BlockKey, new: bool, added: &mut Vec<(Name, BlockKey)>) {
        if new {
            self.counts.blocks += 1;
            added.push((name, key));
        } else {
            *self.more.entry(key).or_default() += 1;
        }
    }

    /// Forgets all copies of a hash.
    fn forget(&mut self, name: Name, prompts: &Prompts) {
        let Some(entry) = self.entries.remove(name, |_| true) else { return };
        if entry.has_several() {
            self.copies.remove(&name);
        }
        match entry.spot() {
            Some(spot) => self.release(&[spot], prompts),
            None => self.counts.unkeyed -= 1,
        }
    }
}

pub(super) fn name(hash: &ExternalHash) -> Name {
    mixed(match hash {
        ExternalHash::U64(hash) => *hash,
        ExternalHash::Bytes(bytes) => {
            let digest = blake3::derive_key("chiasm 2026 engine's long block hash", bytes);
            digest.iter().take(size_of::<Name>()).fold(0, |name, byte| name << 8 | Name::from(*byte))
        }
    })
}

/// One to one (splitmix64's last steps: Steele, Lea and Flood 2014).
fn mixed(hash: u64) -> Name {
    let hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ hash >> 31
}

/// The hash that has a name.
#[cfg(test)]
pub(super) fn unmixed(name: Name) -> u64 {
    let name = (name ^ name >> 31 ^ name >> 62).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let name = (name ^ name >> 27 ^ name >> 54).wrapping_mul(0x96de_1b17_3f11_9089);
    name ^ name >> 30 ^ name >> 60
}
