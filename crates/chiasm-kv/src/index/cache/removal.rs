//! Blocks that are removed, each by its hash.

use super::{Cache, EngineHash, HolderId, Position, Prompts, RadixTree, Trees};
use crate::index::radix_tree::NodeId;
use crate::index::trees::Writer;

/// Blocks on their way out of the tree that they are in: those of a node that follow each other go
/// in one step.
pub(super) struct Removal<'a> {
    prompts: &'a Prompts,
    holder: HolderId,
    tree: Option<(u32, Writer<'a>)>,
    /// The first of them, if there are any.
    position: Position,
    len: u32,
}

impl Cache {
    /// One copy less of each of these. Returns how many there were none of.
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

    /// Keyed entries are so no longer.
    pub(super) fn release(&mut self, positions: &[Position], prompts: &Prompts) {
        let mut removal = Removal::new(prompts, self.holder);
        positions.iter().for_each(|position| self.release_one(*position, &mut removal));
        removal.finish();
    }

    /// A keyed entry is so no longer.
    pub(super) fn release_one(&mut self, position: Position, removal: &mut Removal<'_>) {
        let tree = removal.tree(position.node);
        let Some(position) = tree.find(position) else { return };
        if self.aliases.is_empty() || !self.one_alias_less(tree, position) {
            self.counts.blocks -= 1;
            removal.release(position);
        }
    }

    /// Whether a block has other hashes yet, of which one goes.
    fn one_alias_less(&mut self, tree: &RadixTree, position: Position) -> bool {
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

    /// The tree that a node is in, locked.
    fn tree(&mut self, node: NodeId) -> &RadixTree {
        let number = Trees::tree_with(node);
        if self.tree.as_ref().is_some_and(|(locked, _)| *locked != number) {
            self.finish();
        }
        let prompts = self.prompts;
        let (_, tree) = self.tree.get_or_insert_with(|| (number, prompts.trees.write(number)));
        tree
    }

    /// A block of the tree that is locked.
    fn release(&mut self, position: Position) {
        let comes_before = self.len > 0
            && position.node == self.position.node
            && position.at + 1 == self.position.at;
        if !comes_before {
            self.flush();
        }
        self.position = position;
        self.len += 1;
    }

    fn flush(&mut self) {
        if let Some((_, tree)) = &mut self.tree
            && self.len > 0
        {
            tree.release(self.position, self.len, self.holder);
        }
        self.len = 0;
    }

    /// Has to be called at the end.
    pub(super) fn finish(&mut self) {
        self.flush();
        self.tree = None;
    }
}
