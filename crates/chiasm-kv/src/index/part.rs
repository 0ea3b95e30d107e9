//! The blocks of one KV-cache group of one worker in one tier, by the engine's names for them.

mod entry;
mod presumed;

use std::collections::HashMap;

use super::clock::Clock;
use super::forest::Forest;
use super::holders::Place;
use super::table::Table;
use super::tree::{RunId, Segment, Spot, Tree};
use crate::block_key::{BlockKey, BuildBlockKeyHasher};
use crate::event::ExternalHash;
use entry::{Entry, UNKEYED};

/// What all workers share.
pub(super) struct Shared {
    pub(super) forest: Forest,
    pub(super) clock: Clock,
}

/// See [`PrefixIndex`](super::PrefixIndex) for the rules.
///
/// Invariant: the tree has this place at a block exactly when a keyed entry names that block.
pub(super) struct Part {
    place: Place,
    entries: Table<Entry>,
    /// Copies beyond one, of those hashes that have several.
    copies: HashMap<Name, u32>,
    /// How many hashes beyond one have this key, for those keys that have several: the engine tells blocks apart that we
    /// don't, such as those of two LoRA adapters with the same name.
    more: HashMap<BlockKey, u32, BuildBlockKeyHasher>,
    counts: PartCounts,
    /// Copies of hashes that were here for what may be another block.
    doubted: Vec<Doubt>,
    /// Blocks that share their hash with others, to be released.
    collided: Vec<Spot>,
}

struct Doubt {
    name: Name,
    key: BlockKey,
    spot: Spot,
    new: bool,
}

/// As in [`WorkerIndexStats`](super::WorkerIndexStats).
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

    pub(super) fn place(&self) -> Place {
        self.place
    }

    fn entry(&self, name: Name) -> Option<&Entry> {
        self.entries.get(name, |_| true)
    }

    fn entry_mut(&mut self, name: Name) -> Option<&mut Entry> {
        self.entries.get_mut(name, |_| true)
    }

    /// Of a block that is held and keyed.
    pub(super) fn spot_of(&self, name: Name) -> Option<Spot> {
        self.entry(name).and_then(Entry::spot)
    }

    /// Holds these blocks, which follow a block or start a prompt. Tells where they are. [`Part::name`] has to follow.
    pub(super) fn hold(
        &self,
        parent: Option<Spot>,
        keys: &[BlockKey],
        tree: &mut Tree,
        clock: &Clock,
        segments: &mut Vec<Segment>,
    ) {
        segments.clear();
        tree.hold(parent, keys, self.place, clock, segments);
    }

    /// One copy more of each of these blocks, which are where [`Part::hold`] said. Pushes those that the part did not hold.
    /// Needs no tree, so that nobody waits for it; but see [`Part::doubts`].
    pub(super) fn name(
        &mut self,
        blocks: (&[Name], &[BlockKey]),
        segments: &[Segment],
        added: &mut Vec<(Name, BlockKey)>,
    ) {
        let (names, keys) = blocks;
        let mut block = 0;
        for segment in segments {
            for at in 0..segment.len {
                let spot = Spot { run: segment.spot.run, at: segment.spot.at + at };
                let new = !(segment.before.0..segment.before.1).contains(&at);
                self.name_one(names[block], keys[block], spot, new, added);
                block += 1;
            }
        }
        // Where the tree has no room.
        names[block..].iter().for_each(|name| self.store_unkeyed(*name));
    }

    /// Whether [`Part::settle_doubts`] has to follow.
    pub(super) fn doubts(&self) -> bool {
        !self.doubted.is_empty()
    }

    /// One copy more of a block that is somewhere in the tree already.
    pub(super) fn store_at(&mut self, name: Name, spot: Spot, shared: &Shared, added: &mut Vec<(Name, BlockKey)>) {
        let mut tree = shared.forest.write(Forest::tree_with(spot.run));
        match tree.hold_at(spot, self.place, &shared.clock) {
            Some((spot, key, new)) => {
                self.name_one(name, key, spot, new, added);
                self.settle_doubts(&mut tree, added);
            }
            None => self.store_unkeyed(name),
        }
    }

    /// One copy more of a block whose key is unknown, unless others tell.
    pub(super) fn store_unkeyed(&mut self, name: Name) {
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
        clock: &Clock,
        added: &mut Vec<(Name, BlockKey)>,
    ) {
        if self.entry(name).is_some_and(|entry| entry.spot().is_none())
            && let Some((spot, key, new)) = tree.hold_at(spot, self.place, clock)
        {
            self.identify(name, key, spot, new, added);
        }
    }

    /// Brings near what events about these names need, all at a time: to wait for one after the other takes longer. First the
    /// slots, then, for those of `ends`, what the slots lead to.
    pub(super) fn warm(&self, names: &[Name], ends: &[Name], shared: &Shared) {
        self.entries.warm(names.iter().copied());
        let spots = ends.iter().filter_map(|name| self.spot_of(*name));
        let mut tree = None;
        let mut all = 0;
        for spot in spots {
            let number = Forest::tree_with(spot.run);
            let (_, tree) = match tree.take().filter(|(known, _)| *known == number) {
                Some(known) => tree.insert(known),
                None => tree.insert((number, shared.forest.read(number))),
            };
            all ^= tree.touch(spot);
        }
        std::hint::black_box(all);
    }

    /// One copy less of each of these. Returns how many there were none of.
    pub(super) fn remove(&mut self, names: &[Name], spots: &mut Vec<Spot>, shared: &Shared) -> u64 {
        let mut unknown = 0;
        spots.clear();
        for name in names {
            match self.entries.remove_if(*name, |_| true, |entry| !entry.has_several()) {
                Some(Ok(entry)) => match entry.spot() {
                    Some(spot) => spots.push(spot),
                    None => self.counts.unkeyed -= 1,
                },
                Some(Err(entry)) => {
                    let copies = self.copies.entry(*name).or_default();
                    *copies = copies.saturating_sub(1);
                    if *copies == 0 {
                        entry.set_several(false);
                        self.copies.remove(name);
                    }
                }
                None => unknown += 1,
            }
        }
        self.release(spots, shared);
        unknown
    }

    /// Holds nothing any more; lookups see all or nothing of a prompt.
    pub(super) fn clear(&mut self, shared: &Shared) {
        let mut runs: Vec<RunId> = self.entries.iter().filter_map(Entry::spot).map(|spot| spot.run).collect();
        runs.sort_unstable();
        runs.dedup();
        for runs in runs.chunk_by(|one, other| Forest::same_tree(*one, *other)) {
            let mut tree = shared.forest.write(Forest::tree_with(runs[0]));
            runs.iter().for_each(|run| tree.release_run(*run, self.place));
        }
        let shed = self.counts.shed;
        *self = Self::new(self.place);
        self.counts.shed = shed;
    }

    pub(super) fn counts(&self) -> PartCounts {
        self.counts
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> usize {
        // A map's slot is as large as what is in it, and one byte.
        self.entries.bytes()
            + self.more.capacity() * (size_of::<(BlockKey, u32)>() + 1)
            + self.copies.capacity() * (size_of::<(Name, u32)>() + 1)
    }

    /// Forgets blocks of runs that are at least so old, and those without a key, up to a number. What the engine says of
    /// them later is as of blocks that we never heard of. Returns how many.
    pub(super) fn shed(&mut self, oldest: u32, most: usize, shared: &Shared) -> usize {
        let mut chosen = Vec::new();
        {
            let trees: Vec<_> = shared.forest.each().collect();
            for entry in self.entries.iter() {
                let spot = entry.spot().and_then(|spot| trees[Forest::tree_with(spot.run) as usize].find(spot));
                let used = spot.map(|spot| &trees[Forest::tree_with(spot.run) as usize].run(spot.run).used);
                if used.is_none_or(|used| shared.clock.age(used) >= oldest) {
                    chosen.push((spot.unwrap_or(Spot { run: UNKEYED, at: 0 }), entry.name));
                }
            }
        }
        // Of each run the last block first, lest it be split.
        chosen.sort_unstable_by(|one, other| other.cmp(one));
        chosen.truncate(most);
        chosen.iter().for_each(|(_, name)| self.forget(*name, shared));
        self.counts.shed += chosen.len() as u64;
        self.entries.fit();
        chosen.len()
    }

    /// One copy of a block that the tree says is held here now, and whether it was not before.
    fn name_one(&mut self, name: Name, key: BlockKey, spot: Spot, new: bool, added: &mut Vec<(Name, BlockKey)>) {
        let (entry, is_first) = self.entries.entry(name, |_| true, || Entry::new(name, Some(spot)));
        if is_first {
            return self.count(name, key, new, added);
        }
        entry.set_several(true);
        *self.copies.entry(name).or_default() += 1;
        if entry.spot() != Some(spot) {
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

    /// Without any tree locked: what collided meanwhile.
    pub(super) fn release_collided(&mut self, shared: &Shared) {
        if !self.collided.is_empty() {
            let collided = std::mem::take(&mut self.collided);
            self.release(&collided, shared);
        }
    }

    /// The key of an entry becomes known.
    fn identify(&mut self, name: Name, key: BlockKey, spot: Spot, new: bool, added: &mut Vec<(Name, BlockKey)>) {
        if let Some(entry) = self.entry_mut(name) {
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

    /// All copies.
    fn forget(&mut self, name: Name, shared: &Shared) {
        let Some(entry) = self.entries.remove(name, |_| true) else { return };
        if entry.has_several() {
            self.copies.remove(&name);
        }
        match entry.spot() {
            Some(spot) => self.release(&[spot], shared),
            None => self.counts.unkeyed -= 1,
        }
    }

    /// Keyed entries are so no longer.
    fn release(&mut self, spots: &[Spot], shared: &Shared) {
        for spots in spots.chunk_by(|one, other| Forest::same_tree(one.run, other.run)) {
            let mut tree = shared.forest.write(Forest::tree_with(spots[0].run));
            let mut rest = spots;
            while let [first, ..] = rest {
                if !self.more.is_empty()
                    && let Some(key) = tree.key(*first)
                    && let Some(more) = self.more.get_mut(&key)
                {
                    *more -= 1;
                    if *more == 0 {
                        self.more.remove(&key);
                    }
                    rest = &rest[1..];
                    continue;
                }
                // Engines evict the last blocks of a prompt first.
                let before = |pair: &&[Spot]| pair[0].run == pair[1].run && pair[0].at == pair[1].at + 1;
                let blocks = if self.more.is_empty() { 1 + rest.windows(2).take_while(before).count() } else { 1 };
                let (some, others) = rest.split_at(blocks);
                self.counts.blocks -= blocks;
                tree.release(some[blocks - 1], blocks as u32, self.place);
                rest = others;
            }
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
