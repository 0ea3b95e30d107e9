//! Blocks of a cache that no lookup sees any more, on their way out of the trees.

use super::cache::{Cache, Prompts};
use super::holders::HolderId;
use super::radix_tree::Position;
use super::trees::Trees;

/// Blocks that are given up with a tree locked: some microseconds, for which lookups in that tree
/// wait.
pub(super) const BLOCKS: usize = 64;

/// A few blocks at a time. Others change the trees meanwhile.
pub(super) struct Leaving {
    holder: HolderId,
    /// The last one is next.
    positions: Vec<Position>,
}

impl Leaving {
    pub(super) fn new(cache: Cache) -> Self {
        Self { holder: cache.holder(), positions: cache.positions() }
    }

    pub(super) fn holder(&self) -> HolderId {
        self.holder
    }

    /// Says whether anything may be left.
    pub(super) fn step(&mut self, prompts: &Prompts) -> bool {
        let Some(next) = self.positions.last() else { return false };
        let number = Trees::tree_with(next.node);
        let mut tree = prompts.trees.write(number);
        for _ in 0..BLOCKS {
            let Some(position) =
                self.positions.pop_if(|position| Trees::tree_with(position.node) == number)
            else {
                break;
            };
            tree.leave(position, self.holder);
        }
        true
    }
}
