//! The blocks of one KV-cache group of one worker in one tier, by the engine's names for them.

mod anchors;
mod entry;
mod presumed;
mod removal;
mod walk;

use std::collections::HashMap;

use super::forest::Forest;
use super::holders::Place;
use super::table::Table;
use super::tree::{Block, Segment, Spot, Tree};
use super::use_counter::UseCounter;
use crate::block_key::{BlockKey, BuildBlockKeyHasher};
use crate::event::ExternalHash;
use anchors::Anchors;
use entry::Entry;

/// The prompts that any worker holds blocks of, and the count of their uses. All workers share them.
pub(super) struct Prompts {
    pub(super) forest: Forest,
    pub(super) uses: UseCounter,
}

/// See [`PrefixIndex`](super::PrefixIndex) for the rules.
///
/// Most blocks that are held need no entry: their runs say what they are called, and engines name blocks beside those that they
/// named before, which the [`Anchors`] lead to. A block has entries as soon as it is called something else, has several copies
/// or several names; a part that is looked at in other ways has entries for all of them.
///
/// Invariant: the tree has this place at a block exactly when a keyed entry names that block, or there are no entries for it
/// and its name in the run is its only one.
pub(super) struct Part {
    place: Place,
    entries: Table<Entry>,
    /// `None` if all blocks have entries.
    anchors: Option<Anchors>,
    /// Removals since all blocks got entries because there were many searches; `None` if they got them for another reason.
    removals: Option<usize>,
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
    /// The block is held already, and this copy of the name is not counted yet.
    uncounted: bool,
}

/// A part's share of [`WorkerIndexStats`](super::WorkerIndexStats).
#[derive(Clone, Copy, Default)]
pub(super) struct PartCounts {
    pub(super) blocks: usize,
    pub(super) unkeyed: usize,
    /// Sum of [`Part::more`].
    more: usize,
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
            anchors: Some(Anchors::default()),
            removals: None,
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

    /// Blocks that lead to all that are held: each of those has an entry, is anchored, or comes before one that is held.
    pub(super) fn starts(&self) -> Vec<Spot> {
        let anchors = self.anchors.iter().flat_map(Anchors::spots);
        let mut starts: Vec<Spot> = self.entries.iter().filter_map(Entry::spot).chain(anchors).collect();
        starts.sort_unstable();
        starts
    }

    fn entry(&self, name: Name) -> Option<&Entry> {
        self.entries.get(name, |_| true)
    }

    fn entry_mut(&mut self, name: Name) -> Option<&mut Entry> {
        self.entries.get_mut(name, |_| true)
    }

    /// The place in the tree of a block that has an entry and is keyed.
    pub(super) fn spot_of(&self, name: Name) -> Option<Spot> {
        self.entry(name).and_then(Entry::spot)
    }

    /// Where a keyed block is likely to be, without looking at the tree: to be confirmed by [`Part::confirm`], or by
    /// [`Part::search`] if it is not there.
    pub(super) fn guess(&self, name: Name) -> Option<Spot> {
        match (self.entry(name), &self.anchors) {
            (Some(entry), _) => entry.spot(),
            (None, Some(anchors)) => anchors.get(name),
            (None, None) => None,
        }
    }

    /// Checks a guess in the tree. Returns where the block is now, with its key; `None` if this part doesn't hold it there.
    pub(super) fn confirm(&self, tree: &Tree, name: Name, guess: Spot) -> Option<(Spot, BlockKey)> {
        let spot = tree.find(guess)?;
        let known = tree.name(spot) == name && tree.holds(spot, self.place) || self.spot_of(name) == Some(guess);
        known.then(|| (spot, tree.run(spot.run).blocks.key(spot.at)))
    }

    /// Holds these blocks, which follow a block or start a prompt. Tells where they are. [`Part::name`] has to follow.
    pub(super) fn hold(
        &self,
        parent: Option<Spot>,
        blocks: &[Block],
        tree: &mut Tree,
        uses: &UseCounter,
        segments: &mut Vec<Segment>,
    ) {
        segments.clear();
        tree.hold(parent, blocks, self.place, uses, segments);
    }

    /// One copy more of each of these blocks, which are where [`Part::hold`] said, after `parent`. Pushes those that the part
    /// did not hold. Needs no tree, so that nobody waits for it; but see [`Part::doubts`].
    pub(super) fn name(
        &mut self,
        parent: Option<(Name, Spot)>,
        blocks: &[Block],
        segments: &[Segment],
        added: &mut Vec<(Name, BlockKey)>,
    ) {
        let mut rest = blocks;
        for segment in segments {
            let (here, others) = rest.split_at(segment.len as usize);
            rest = others;
            let is_new = segment.before.0 >= segment.before.1;
            if is_new && segment.same_names && self.anchors.is_some() && self.entries.len() == 0 {
                self.counts.blocks += here.len();
                added.extend(here.iter().map(|block| (block.name, block.key)));
                continue;
            }
            for (block, at) in here.iter().zip(0..) {
                let spot = Spot { run: segment.spot.run, at: segment.spot.at + at };
                let new = !(segment.before.0..segment.before.1).contains(&at);
                self.name_one(block, spot, new, segment.same_names, added);
            }
        }
        // Where the tree has no room.
        rest.iter().for_each(|block| self.store_unknown(block.name));
        let Some(anchors) = &mut self.anchors else { return };
        anchors.credit(blocks.len());
        let mut end = 0;
        for segment in segments {
            end += segment.len as usize;
            if segment.same_names {
                anchors.insert(
                    blocks[end - 1].name,
                    Spot { run: segment.spot.run, at: segment.spot.at + segment.len - 1 },
                );
            }
        }
        // Not needed any more: these come after it in its run.
        if let (Some((name, spot)), Some(first)) = (parent, segments.first())
            && first.spot == (Spot { at: spot.at + 1, ..spot })
        {
            anchors.remove(name, |anchor| anchor == spot);
        }
    }

    /// Whether [`Part::settle_doubts`] has to follow.
    pub(super) fn doubts(&self) -> bool {
        !self.doubted.is_empty()
    }

    /// One copy more of a block that is somewhere in the tree already. All blocks have to have entries.
    pub(super) fn store_at(&mut self, name: Name, spot: Spot, prompts: &Prompts, added: &mut Vec<(Name, BlockKey)>) {
        let mut tree = prompts.forest.write(Forest::tree_with(spot.run));
        match tree.hold_at(spot, self.place, &prompts.uses) {
            Some((spot, key, new)) => {
                self.name_one(&Block { key, name }, spot, new, false, added);
                self.settle_doubts(&mut tree, added);
            }
            None => self.store_unknown(name),
        }
    }

    /// One copy more of a block that has no entry and was searched for.
    pub(super) fn store_again(&mut self, name: Name, spot: Spot) {
        self.entries.entry(name, |_| true, || Entry::new(name, Some(spot)));
        self.store_unknown(name);
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
        let spots = ends.iter().filter_map(|name| self.guess(*name));
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
        self.counts.blocks + self.counts.more + self.counts.unkeyed
    }

    pub(super) fn bytes(&self) -> usize {
        // A map's slot is as large as what is in it, and one byte.
        self.entries.bytes()
            + self.anchors.as_ref().map_or(0, Anchors::bytes)
            + self.more.capacity() * (size_of::<(BlockKey, u32)>() + 1)
            + self.copies.capacity() * (size_of::<(Name, u32)>() + 1)
    }

    /// One copy of a block that the tree says is held here now, and whether it was not before.
    fn name_one(&mut self, block: &Block, spot: Spot, new: bool, same_name: bool, added: &mut Vec<(Name, BlockKey)>) {
        let Block { key, name } = *block;
        if let Some(entry) = self.entry_mut(name) {
            entry.set_several(true);
            let known = entry.spot() == Some(spot);
            *self.copies.entry(name).or_default() += 1;
            if !known {
                self.doubted.push(Doubt { name, key, spot, new, uncounted: false });
            }
        } else if self.anchors.is_some() && !new {
            self.doubted.push(Doubt { name, key, spot, new, uncounted: true });
        } else {
            if self.anchors.is_none() || !same_name {
                self.entries.entry(name, |_| true, || Entry::new(name, Some(spot)));
            }
            self.count(name, key, new, added);
        }
    }

    /// Looks at copies of hashes that were here for a block with another spot, or none.
    pub(super) fn settle_doubts(&mut self, tree: &mut Tree, added: &mut Vec<(Name, BlockKey)>) {
        for Doubt { name, key, spot, new, uncounted } in std::mem::take(&mut self.doubted) {
            if uncounted {
                self.name_again(name, key, spot, tree, added);
                continue;
            }
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

    /// One copy more of a block that was held already, under this name or another one.
    fn name_again(&mut self, name: Name, key: BlockKey, spot: Spot, tree: &Tree, added: &mut Vec<(Name, BlockKey)>) {
        let Some(spot) = tree.find(spot) else { return };
        let is_its_name = tree.name(spot) == name && self.has_no_entries(key, spot, tree);
        let (entry, is_first) = self.entries.entry(name, |_| true, || Entry::new(name, Some(spot)));
        if is_its_name || !is_first {
            entry.set_several(true);
            *self.copies.entry(name).or_default() += 1;
        } else {
            self.count(name, key, false, added);
        }
    }

    /// Whether a block that is held is so by its name in the run.
    fn has_no_entries(&self, key: BlockKey, spot: Spot, tree: &Tree) -> bool {
        let of_tree = |other: &Spot| Forest::same_tree(other.run, spot.run);
        let spots = self.entries.iter().filter_map(Entry::spot).filter(of_tree);
        let entries = spots.filter(|other| tree.find(*other) == Some(spot)).count();
        entries < 1 + self.more.get(&key).copied().unwrap_or_default() as usize
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
            self.counts.more += 1;
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
