//! The release of a cache's blocks from the trees, after lookups have stopped seeing them.

use super::cache::{Cache, Prompts};
use super::holders::HolderId;
use super::radix_tree::Position;
use super::trees::Trees;

/// The maximum number of blocks released with a tree locked: some microseconds, for which lookups
/// in that tree wait.
pub(super) const MAX_BLOCKS_PER_LOCK: usize = 64;

/// A release in steps. The trees may change between two steps.
pub(super) struct CacheRelease {
    holder: HolderId,
    /// The blocks left to release, in order; the last one is next.
    positions: Vec<Position>,
}

impl CacheRelease {
    pub(super) fn new(cache: Cache) -> Self {
        Self { holder: cache.holder(), positions: cache.positions() }
    }

    pub(super) fn holder(&self) -> HolderId {
        self.holder
    }

    /// Releases some blocks of one tree. Returns `false` if no blocks were left.
    pub(super) fn step(&mut self, prompts: &Prompts) -> bool {
        let Some(next) = self.positions.last() else { return false };
        let number = Trees::tree_with(next.node);
        let mut tree = prompts.trees.write(number);
        for _ in 0..MAX_BLOCKS_PER_LOCK {
            let Some(position) =
                self.positions.pop_if(|position| Trees::tree_with(position.node) == number)
            else {
                break;
            };
            tree.release_node(position, self.holder);
        }
        true
    }
}
