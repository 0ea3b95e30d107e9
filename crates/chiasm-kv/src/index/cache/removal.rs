//! The removal of blocks by their hashes.

use super::{Cache, EngineHash, HolderId, Position, Prompts, RadixTree, Trees};
use crate::index::radix_tree::NodeId;
use crate::index::trees::Writer;

/// A buffer of blocks to release from the locked tree. Adjacent blocks of a node, from the last to
/// the first, are released in one step.
pub(super) struct Removal<'a> {
    prompts: &'a Prompts,
    holder: HolderId,
    /// The locked tree and its number.
    tree: Option<(u32, Writer<'a>)>,
    /// The first buffered block, if `len` is not 0.
    position: Position,
    /// The number of buffered blocks.
    len: u32,
}

impl Cache {
    /// Removes one copy of each hash. Returns the number of unknown hashes.
    pub(in crate::index) fn remove(&mut self, hashes: &[EngineHash], prompts: &Prompts) -> u64 {
        let mut unknown = 0;
        let mut removal = Removal::new(prompts, self.holder);
        for hash in hashes.iter().copied() {
            match self.entries.remove_if(hash, |_| true, |entry| !entry.has_several()) {
                None => unknown += 1,
                Some(Ok(entry)) => match entry.position() {
                    Some(position) => self.release_one(position, &mut removal),
                    None => self.counts.unkeyed -= 1,
                },
                Some(Err(entry)) => {
                    let copies = self.copies.entry(hash).or_default();
                    *copies = copies.saturating_sub(1);
                    if *copies == 0 {
                        entry.set_several(false);
                        self.copies.remove(&hash);
                    }
                }
            }
        }
        removal.finish();
        unknown
    }

    /// Releases the blocks of entries that are no longer keyed.
    pub(super) fn release(&mut self, positions: &[Position], prompts: &Prompts) {
        let mut removal = Removal::new(prompts, self.holder);
        positions.iter().for_each(|position| self.release_one(*position, &mut removal));
        removal.finish();
    }

    /// Releases the block of an entry that is no longer keyed, unless another hash has the block.
    pub(super) fn release_one(&mut self, position: Position, removal: &mut Removal<'_>) {
        let tree = removal.tree(position.node);
        let Some(position) = tree.find(position) else { return };
        if self.aliases.is_empty() || !self.remove_alias(tree, position) {
            self.counts.blocks -= 1;
            removal.release(position);
        }
    }

    /// Removes one alias of a block. Returns `false` if the block has none.
    fn remove_alias(&mut self, tree: &RadixTree, position: Position) -> bool {
        let Some(key) = tree.key(position) else { return false };
        let Some(aliases) = self.aliases.get_mut(&key) else { return false };
        *aliases -= 1;
        if *aliases == 0 {
            self.aliases.remove(&key);
        }
        true
    }
}

impl<'a> Removal<'a> {
    pub(super) fn new(prompts: &'a Prompts, holder: HolderId) -> Self {
        Self { prompts, holder, tree: None, position: Position { node: 0, at: 0 }, len: 0 }
    }

    /// Locks the tree that contains a node.
    fn tree(&mut self, node: NodeId) -> &RadixTree {
        let number = Trees::tree_with(node);
        if self.tree.as_ref().is_some_and(|(locked, _)| *locked != number) {
            self.finish();
        }
        let prompts = self.prompts;
        let (_, tree) = self.tree.get_or_insert_with(|| (number, prompts.trees.write(number)));
        tree
    }

    /// Buffers a block of the locked tree.
    fn release(&mut self, position: Position) {
        let is_adjacent = self.len > 0
            && position.node == self.position.node
            && position.at + 1 == self.position.at;
        if !is_adjacent {
            self.flush();
        }
        self.position = position;
        self.len += 1;
    }

    /// Releases the buffered blocks.
    fn flush(&mut self) {
        if let Some((_, tree)) = &mut self.tree
            && self.len > 0
        {
            tree.release(self.position, self.len, self.holder);
        }
        self.len = 0;
    }

    /// Releases the buffered blocks and unlocks the tree. Must be called at the end.
    pub(super) fn finish(&mut self) {
        self.flush();
        self.tree = None;
    }
}
