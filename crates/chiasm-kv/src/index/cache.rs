//! A cache: the blocks of one KV-cache group of one worker in one tier, by the engine's hashes.

mod entry;
mod presumed;
mod removal;
mod shedding;

use std::collections::HashMap;

use super::holders::HolderId;
use super::radix_tree::{HeldBlock, Position, RadixTree, Segment};
use super::table::Table;
use super::trees::Trees;
use super::use_counter::UseCounter;
use crate::block_key::{BlockKey, BuildBlockKeyHasher, mixed};
use crate::event::ExternalHash;
use entry::Entry;
pub(super) use shedding::ShedCandidate;

/// The trees of all prompts and the clock of their uses, which all workers share.
pub(super) struct Prompts {
    pub(super) trees: Trees,
    pub(super) uses: UseCounter,
}

/// The blocks that one worker holds of one KV-cache group in one tier, by the engine's hashes.
///
/// Events identify blocks by hash. The position of a block in the trees is recorded when the block
/// is stored. A cache is behind its worker's lock, which is taken before any tree's.
/// [`PrefixIndex`](super::PrefixIndex) describes the rules.
///
/// Invariant: between events, a tree has this holder at a block exactly when the position of a
/// keyed entry is that block.
pub(super) struct Cache {
    holder: HolderId,
    /// The hashes of the blocks that the engine holds, with the positions of the blocks.
    entries: Table<Entry>,
    /// The number of copies beyond the first, for hashes with several copies.
    copies: HashMap<EngineHash, u32>,
    /// The number of hashes beyond the first, for keys with several hashes. The engine
    /// distinguishes some blocks that we don't, such as those of two LoRA adapters with the same
    /// name.
    aliases: HashMap<BlockKey, u32, BuildBlockKeyHasher>,
    counts: CacheCounts,
    /// Copies that may be of another block than the first copy.
    to_recheck: Vec<Recheck>,
    /// The blocks to release because their hash is shared with another block.
    collided: Vec<Position>,
}

/// A copy whose hash the cache already has, maybe for another block. [`Cache::recheck`] decides it
/// with the tree.
struct Recheck {
    hash: EngineHash,
    key: BlockKey,
    position: Position,
    is_new: bool,
}

/// A cache's share of [`WorkerIndexStats`](super::WorkerIndexStats).
#[derive(Clone, Copy, Default)]
pub(super) struct CacheCounts {
    pub(super) blocks: usize,
    pub(super) unkeyed: usize,
    pub(super) shed: u64,
}

/// An engine's hash of a block in 64 bits: the hash itself, or 64 bits of the BLAKE3 of a longer
/// one. Mixed, because engines don't guarantee uniform bits.
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

    /// Replaces the cache by an empty one with another holder, and returns the old cache.
    pub(super) fn replace(&mut self, holder: HolderId) -> Self {
        let mut new = Self::new(holder);
        new.counts.shed = self.counts.shed;
        std::mem::replace(self, new)
    }

    pub(super) fn holder(&self) -> HolderId {
        self.holder
    }

    /// Returns the positions of the keyed blocks, sorted.
    pub(super) fn positions(&self) -> Vec<Position> {
        let mut positions: Vec<Position> =
            self.entries.iter().filter_map(Entry::position).collect();
        positions.sort_unstable();
        positions
    }

    /// Returns every hash, with the position of its block if the block is keyed.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (EngineHash, Option<Position>)> {
        self.entries.iter().map(|entry| (entry.hash, entry.position()))
    }

    /// Returns the number of copies beyond the first, for hashes with several copies.
    pub(super) fn extra_copies(&self) -> &HashMap<EngineHash, u32> {
        &self.copies
    }

    /// Returns `true` if the cache has this hash.
    pub(super) fn has(&self, hash: EngineHash) -> bool {
        self.entry(hash).is_some()
    }

    /// Inserts a hash that the cache does not have, for a block that its holder already has in the
    /// tree. `is_first` is `false` if another hash has the same block.
    pub(super) fn insert(
        &mut self,
        hash: EngineHash,
        key: BlockKey,
        position: Position,
        is_first: bool,
    ) {
        self.entries.entry(hash, |_| true, || Entry::new(hash, Some(position)));
        self.count(key, is_first);
    }

    /// Sets the number of copies beyond the first. Returns `false` if the cache does not have the
    /// hash or its copies are already set.
    pub(super) fn set_extra_copies(&mut self, hash: EngineHash, copies: u32) -> bool {
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

    /// Returns the position of a hash's block, if it is keyed.
    pub(super) fn position_of(&self, hash: EngineHash) -> Option<Position> {
        self.entry(hash).and_then(Entry::position)
    }

    /// Counts one more copy of each block in `segments`, which the holder now has in the tree.
    /// Pushes the blocks that are new to the cache to `added`.
    ///
    /// Needs no lock of a tree, but [`Cache::needs_recheck`] may require one afterwards.
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
                let is_new = !(segment.before.0..segment.before.1).contains(&at);
                self.count_copy(hash, HeldBlock { position, key, is_new }, added);
            }
        }
        // The tree had no room for the remaining blocks.
        blocks.for_each(|(hash, _)| self.store_unknown(hash));
    }

    /// Returns `true` if [`Cache::recheck`] must follow.
    pub(super) fn needs_recheck(&self) -> bool {
        !self.to_recheck.is_empty()
    }

    /// Stores one more copy of a block that is already in a tree.
    pub(super) fn store_at(
        &mut self,
        hash: EngineHash,
        position: Position,
        prompts: &Prompts,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        let mut tree = prompts.trees.write(Trees::tree_with(position.node));
        match tree.hold_at(position, self.holder, &prompts.uses) {
            Some(block) => {
                self.count_copy(hash, block, added);
                self.recheck(&mut tree, added);
            }
            None => self.store_unknown(hash),
        }
    }

    /// Stores one more copy of a hash without a key. If an earlier copy has a key, the new one
    /// counts for the same block.
    pub(super) fn store_unknown(&mut self, hash: EngineHash) {
        let (entry, is_new) = self.entries.entry(hash, |_| true, || Entry::new(hash, None));
        if is_new {
            self.counts.unkeyed += 1;
        } else {
            entry.set_several(true);
            *self.copies.entry(hash).or_default() += 1;
        }
    }

    /// Gives a hash without a key the block at `position`.
    pub(super) fn resolve(
        &mut self,
        hash: EngineHash,
        position: Position,
        tree: &mut RadixTree,
        uses: &UseCounter,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        if self.entry(hash).is_some_and(|entry| entry.position().is_none())
            && let Some(block) = tree.hold_at(position, self.holder, uses)
        {
            self.identify(hash, block, added);
        }
    }

    /// Loads the memory that events with these hashes need into the cache, with overlapping loads.
    /// First the slots of `hashes`, then the tree nodes of `ends`.
    pub(super) fn prefetch(&self, hashes: &[EngineHash], ends: &[EngineHash], prompts: &Prompts) {
        self.entries.prefetch(hashes.iter().copied());
        let positions = ends.iter().filter_map(|hash| self.position_of(*hash));
        let mut tree = None;
        let mut touched = 0;
        for position in positions {
            let number = Trees::tree_with(position.node);
            let (_, tree) = match tree.take().filter(|(known, _)| *known == number) {
                Some(known) => tree.insert(known),
                None => tree.insert((number, prompts.trees.read(number))),
            };
            touched ^= tree.touch(position);
        }
        std::hint::black_box(touched);
    }

    pub(super) fn counts(&self) -> CacheCounts {
        self.counts
    }

    /// Returns the number of hashes.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        // A slot of a map takes its content and one byte.
        self.entries.bytes()
            + self.aliases.capacity() * (size_of::<(BlockKey, u32)>() + 1)
            + self.copies.capacity() * (size_of::<(EngineHash, u32)>() + 1)
    }

    /// Counts one copy of a block that the holder now has in the tree.
    fn count_copy(
        &mut self,
        hash: EngineHash,
        block: HeldBlock,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        let HeldBlock { position, key, is_new } = block;
        let (entry, is_first) =
            self.entries.entry(hash, |_| true, || Entry::new(hash, Some(position)));
        if is_first {
            added.extend(is_new.then_some((hash, key)));
            return self.count(key, is_new);
        }
        entry.set_several(true);
        let is_known = entry.position() == Some(position);
        *self.copies.entry(hash).or_default() += 1;
        if !is_known {
            self.to_recheck.push(Recheck { hash, key, position, is_new });
        }
    }

    /// Decides for each copy whose hash had another position, or none, which block it belongs to.
    pub(super) fn recheck(
        &mut self,
        tree: &mut RadixTree,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        for Recheck { hash, key, position, is_new } in std::mem::take(&mut self.to_recheck) {
            let Some(entry) = self.entries.get_mut(hash, |_| true) else { continue };
            match entry.position() {
                None => self.identify(hash, HeldBlock { position, key, is_new }, added),
                Some(other)
                    if Trees::same_tree(other.node, position.node)
                        && tree.find(other) == tree.find(position) => {}
                Some(other) => {
                    // The hash stands for two blocks, so neither counts.
                    entry.set_position(None);
                    self.counts.unkeyed += 1;
                    if is_new {
                        tree.release(position, 1, self.holder);
                    }
                    // The other block may be in another tree.
                    self.collided.push(other);
                }
            }
        }
    }

    /// Releases the blocks that share their hash with another block. The caller must not have
    /// locked any tree, because the blocks may be in all of them.
    pub(super) fn release_collided(&mut self, prompts: &Prompts) {
        if !self.collided.is_empty() {
            let collided = std::mem::take(&mut self.collided);
            self.release(&collided, prompts);
        }
    }

    /// Sets the block of an entry without a key.
    fn identify(
        &mut self,
        hash: EngineHash,
        block: HeldBlock,
        added: &mut Vec<(EngineHash, BlockKey)>,
    ) {
        let HeldBlock { position, key, is_new } = block;
        if let Some(entry) = self.entries.get_mut(hash, |_| true) {
            entry.set_position(Some(position));
            self.counts.unkeyed -= 1;
            added.extend(is_new.then_some((hash, key)));
            self.count(key, is_new);
        }
    }

    /// Counts one more hash of a block: as a new block or as an alias.
    fn count(&mut self, key: BlockKey, is_new: bool) {
        if is_new {
            self.counts.blocks += 1;
        } else {
            *self.aliases.entry(key).or_default() += 1;
        }
    }

    /// Removes all copies of a hash.
    fn remove_all_copies(&mut self, hash: EngineHash, prompts: &Prompts) {
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

/// Returns the hash of a block in the form that tables use.
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

/// Returns the engine's hash before mixing.
#[cfg(test)]
pub(super) fn unmixed(hash: EngineHash) -> u64 {
    let hash = (hash ^ hash >> 31 ^ hash >> 62).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let hash = (hash ^ hash >> 27 ^ hash >> 54).wrapping_mul(0x96de_1b17_3f11_9089);
    hash ^ hash >> 30 ^ hash >> 60
}
