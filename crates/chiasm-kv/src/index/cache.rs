//! The blocks of one KV-cache group of one worker in one tier, by the engine's hashes for them.

mod entry;
mod presumed;
mod removal;
mod shedding;

use std::collections::HashMap;

use super::holders::HolderId;
use super::radix_tree::{Position, RadixTree, Segment};
use super::table::Table;
use super::trees::Trees;
use super::use_counter::UseCounter;
use crate::block_key::{BlockKey, BuildBlockKeyHasher, mixed};
use crate::event::ExternalHash;
use entry::Entry;
pub(super) use shedding::Old;

/// The prompts that any worker holds blocks of, and the count of their uses. All workers share
/// them.
pub(super) struct Prompts {
    pub(super) trees: Trees,
    pub(super) uses: UseCounter,
}

/// The blocks that one worker holds of one KV-cache group in one tier, by its engine's hashes: what
/// engines say is by hash, and where a block is in the trees is told once, when it is stored.
/// Behind its worker's lock, which is taken before any tree's. [`PrefixIndex`](super::PrefixIndex)
/// has the rules.
///
/// Invariant: between events, a tree has this holder at a block exactly when a keyed entry's
/// position is that block.
pub(super) struct Cache {
    holder: HolderId,
    /// Each hash that the engine holds copies of, with where its block is.
    entries: Table<Entry>,
    /// Copies beyond one, of those hashes that have several.
    copies: HashMap<EngineHash, u32>,
    /// How many hashes beyond one have this key, for those keys that have several: the engine tells
    /// blocks apart that we don't, such as those of two LoRA adapters with the same name.
    aliases: HashMap<BlockKey, u32, BuildBlockKeyHasher>,
    counts: CacheCounts,
    /// Copies whose block is not sure yet.
    to_recheck: Vec<Recheck>,
    /// Blocks that share their hash with others, to be released.
    collided: Vec<Position>,
}

/// A copy of a hash that an event tells of as this block, while the cache has the hash for what may
/// be another one. The tree is needed to tell, so it waits for [`Cache::recheck`].
struct Recheck {
    hash: EngineHash,
    key: BlockKey,
    position: Position,
    new: bool,
}

/// A cache's share of [`WorkerIndexStats`](super::WorkerIndexStats).
#[derive(Clone, Copy, Default)]
pub(super) struct CacheCounts {
    pub(super) blocks: usize,
    pub(super) unkeyed: usize,
    pub(super) shed: u64,
}

/// An engine's hash of a block, in 64 bits: those that the engine sent, or of its longer ones as
/// many of their BLAKE3; mixed, as nothing says that their bits are uniform.
pub(super) type EngineHash = u64;

impl Cache {
    pub(super) fn new(holder: HolderId) -> Self {
        Self {
            holder,
            entries: Table::new(),
            copies: HashMap::new(),
            aliases: HashMap::default(),
            counts: CacheCounts::default(),
            to_recheck: Vec::new(),
            collided: Vec::new(),
        }
    }

    /// Becomes an empty cache under another id, and returns what it was.
    pub(super) fn renew(&mut self, holder: HolderId) -> Self {
        let mut new = Self::new(holder);
        new.counts.shed = self.counts.shed;
        std::mem::replace(self, new)
    }

    pub(super) fn holder(&self) -> HolderId {
        self.holder
    }

    /// Where the keyed blocks are, in order.
    pub(super) fn positions(&self) -> Vec<Position> {
        let mut positions: Vec<Position> =
            self.entries.iter().filter_map(Entry::position).collect();
        positions.sort_unstable();
        positions
    }

    /// Every hash, with where its block is if that is known.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (EngineHash, Option<Position>)> {
        self.entries.iter().map(|entry| (entry.hash, entry.position()))
    }

    /// Copies beyond one, of those hashes that have several.
    pub(super) fn several(&self) -> &HashMap<EngineHash, u32> {
        &self.copies
    }

    pub(super) fn has(&self, hash: EngineHash) -> bool {
        self.entry(hash).is_some()
    }

    /// One copy of a hash that the cache does not have, of a block that the tree says is held here;
    /// `is_first` unless another hash has it too.
    pub(super) fn put(
        &mut self,
        hash: EngineHash,
        key: BlockKey,
        position: Position,
        is_first: bool,
    ) {
        self.entries.entry(hash, |_| true, || Entry::new(hash, Some(position)));
        self.count(key, is_first);
    }

    /// Says how many copies beyond one a hash has. False if the cache does not have it, or knows
    /// already.
    pub(super) fn put_copies(&mut self, hash: EngineHash, copies: u32) -> bool {
        let Some(entry) = self.entries.get_mut(hash, |_| true).filter(|entry| !entry.has_several())
        else {
            return false;
        };
        entry.set_several(true);
        self.copies.insert(hash, copies);
        true
    }

    fn entry(&self, hash: EngineHash) -> Option<&Entry> {
        self.entries.get(hash, |_| true)
    }

    /// Where a block is that is keyed.
    pub(super) fn position_of(&self, hash: EngineHash) -> Option<Position> {
        self.entry(hash).and_then(Entry::position)
    }

    /// One copy more of each of these blocks, which the tree says are held here now. Pushes those
    /// that the cache did not hold. Needs no tree, so that nobody waits for it; but see
    /// [`Cache::has_to_recheck`].
    pub(super) fn count_copies(
        &mut self,
        hashes: &[EngineHash],
        keys: &[BlockKey],
        segments: &[Segment],
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        let mut blocks = hashes.iter().copied().zip(keys.iter().copied());
        for segment in segments {
            for ((hash, key), at) in blocks.by_ref().take(segment.len as usize).zip(0..) {
                let position =
                    Position { node: segment.position.node, at: segment.position.at + at };
                let new = !(segment.before.0..segment.before.1).contains(&at);
                self.count_copy(hash, key, position, new, added);
            }
        }
        // Where the tree has no room.
        blocks.for_each(|(hash, _)| self.store_unknown(hash));
    }

    /// Whether [`Cache::recheck`] has to follow.
    pub(super) fn has_to_recheck(&self) -> bool {
        !self.to_recheck.is_empty()
    }

    /// One copy more of a block that is somewhere in the tree already.
    pub(super) fn store_at(
        &mut self,
        hash: EngineHash,
        position: Position,
        prompts: &Prompts,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        let mut tree = prompts.trees.write(Trees::tree_with(position.node));
        match tree.hold_at(position, self.holder, &prompts.uses) {
            Some((position, key, new)) => {
                self.count_copy(hash, key, position, new, added);
                self.recheck(&mut tree, added);
            }
            None => self.store_unknown(hash),
        }
    }

    /// One copy more of a block whose key is unknown, unless others tell.
    pub(super) fn store_unknown(&mut self, hash: EngineHash) {
        let (entry, is_new) = self.entries.entry(hash, |_| true, || Entry::new(hash, None));
        if is_new {
            self.counts.unkeyed += 1;
        } else {
            entry.set_several(true);
            *self.copies.entry(hash).or_default() += 1;
        }
    }

    /// What the copies are that are here, if that was not known.
    pub(super) fn tell(
        &mut self,
        hash: EngineHash,
        position: Position,
        tree: &mut RadixTree,
        uses: &UseCounter,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        if self.entry(hash).is_some_and(|entry| entry.position().is_none())
            && let Some((position, key, new)) = tree.hold_at(position, self.holder, uses)
        {
            self.identify(hash, key, position, new, added);
        }
    }

    /// Brings near what events about these hashes need, all at a time: to wait for one after the
    /// other takes longer. First the slots, then, for those of `ends`, what the slots lead to.
    pub(super) fn warm(&self, hashes: &[EngineHash], ends: &[EngineHash], prompts: &Prompts) {
        self.entries.warm(hashes.iter().copied());
        let positions = ends.iter().filter_map(|hash| self.position_of(*hash));
        let mut tree = None;
        let mut all = 0;
        for position in positions {
            let number = Trees::tree_with(position.node);
            let (_, tree) = match tree.take().filter(|(known, _)| *known == number) {
                Some(known) => tree.insert(known),
                None => tree.insert((number, prompts.trees.read(number))),
            };
            all ^= tree.touch(position);
        }
        std::hint::black_box(all);
    }

    pub(super) fn counts(&self) -> CacheCounts {
        self.counts
    }

    /// Number of hashes that the worker holds.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> usize {
        // A map's slot is as large as what is in it, and one byte.
        self.entries.bytes()
            + self.aliases.capacity() * (size_of::<(BlockKey, u32)>() + 1)
            + self.copies.capacity() * (size_of::<(EngineHash, u32)>() + 1)
    }

    /// One copy of a block that the tree says is held here now, and whether it was not before.
    fn count_copy(
        &mut self,
        hash: EngineHash,
        key: BlockKey,
        position: Position,
        new: bool,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        let (entry, is_first) =
            self.entries.entry(hash, |_| true, || Entry::new(hash, Some(position)));
        if is_first {
            added.extend(new.then_some((hash, key)));
            return self.count(key, new);
        }
        entry.set_several(true);
        let is_known = entry.position() == Some(position);
        *self.copies.entry(hash).or_default() += 1;
        if !is_known {
            self.to_recheck.push(Recheck { hash, key, position, new });
        }
    }

    /// Looks at copies of hashes that were here for a block with another position, or none.
    pub(super) fn recheck(
        &mut self,
        tree: &mut RadixTree,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        for Recheck { hash, key, position, new } in std::mem::take(&mut self.to_recheck) {
            let Some(entry) = self.entries.get_mut(hash, |_| true) else { continue };
            match entry.position() {
                None => self.identify(hash, key, position, new, added),
                Some(other)
                    if Trees::same_tree(other.node, position.node)
                        && tree.find(other) == tree.find(position) => {}
                Some(other) => {
                    // One hash of two blocks: neither counts.
                    entry.set_position(None);
                    self.counts.unkeyed += 1;
                    if new {
                        tree.release(position, 1, self.holder);
                    }
                    // It may be in another tree.
                    self.collided.push(other);
                }
            }
        }
    }

    /// Releases the blocks that were found to share their hash. No tree may be locked: they may be
    /// in any.
    pub(super) fn release_collided(&mut self, prompts: &Prompts) {
        if !self.collided.is_empty() {
            let collided = std::mem::take(&mut self.collided);
            self.release(&collided, prompts);
        }
    }

    /// The key of an entry becomes known.
    fn identify(
        &mut self,
        hash: EngineHash,
        key: BlockKey,
        position: Position,
        new: bool,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        if let Some(entry) = self.entries.get_mut(hash, |_| true) {
            entry.set_position(Some(position));
            self.counts.unkeyed -= 1;
            added.extend(new.then_some((hash, key)));
            self.count(key, new);
        }
    }

    /// One more hash of a block, its first one if it is `new` here.
    fn count(&mut self, key: BlockKey, new: bool) {
        if new {
            self.counts.blocks += 1;
        } else {
            *self.aliases.entry(key).or_default() += 1;
        }
    }

    /// Forgets all copies of a hash.
    fn forget(&mut self, hash: EngineHash, prompts: &Prompts) {
        let Some(entry) = self.entries.remove(hash, |_| true) else { return };
        if entry.has_several() {
            self.copies.remove(&hash);
        }
        match entry.position() {
            Some(position) => self.release(&[position], prompts),
            None => self.counts.unkeyed -= 1,
        }
    }
}

/// The hash of a block as tables have it.
pub(super) fn engine_hash(hash: &ExternalHash) -> EngineHash {
    mixed(match hash {
        ExternalHash::U64(hash) => *hash,
        ExternalHash::Bytes(bytes) => {
            let digest = blake3::derive_key("chiasm 2026 engine's long block hash", bytes);
            digest
                .iter()
                .take(size_of::<EngineHash>())
                .fold(0, |hash, byte| hash << 8 | EngineHash::from(*byte))
        }
    })
}

/// The hash that was mixed.
#[cfg(test)]
pub(super) fn unmixed(hash: EngineHash) -> u64 {
    let hash = (hash ^ hash >> 31 ^ hash >> 62).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let hash = (hash ^ hash >> 27 ^ hash >> 54).wrapping_mul(0x96de_1b17_3f11_9089);
    hash ^ hash >> 30 ^ hash >> 60
}
