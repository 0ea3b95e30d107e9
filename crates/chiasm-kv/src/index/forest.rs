//! The trees, each behind a lock.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::tree::{NONE, RUN_BITS, RunId, Tree};
use crate::BlockKey;

/// Prompts are told apart by their first block. A lock is held for one event or one lookup.
const TREES: u32 = (NONE >> RUN_BITS) + 1;

pub(super) struct Forest {
    trees: Box<[Line]>,
    bytes: AtomicUsize,
    blocks: AtomicUsize,
}

/// On cache lines of its own, lest locks of neighbours disturb each other.
#[repr(align(128))]
struct Line(RwLock<Tree>);

/// Counts what changed when it is done.
pub(super) struct Writer<'a> {
    tree: RwLockWriteGuard<'a, Tree>,
    forest: &'a Forest,
    bytes: usize,
    blocks: usize,
}

impl Forest {
    pub(super) fn new() -> Self {
        let trees: Box<[Line]> = (0..TREES).map(|number| Line(RwLock::new(Tree::new(number)))).collect();
        let bytes = AtomicUsize::new(size_of_val(&*trees));
        Self { trees, bytes, blocks: AtomicUsize::new(0) }
    }

    /// Of a prompt's first block.
    pub(super) fn tree_of(first: BlockKey) -> u32 {
        first.get() as u32 % TREES
    }

    pub(super) fn tree_with(run: RunId) -> u32 {
        run >> RUN_BITS
    }

    pub(super) fn same_tree(one: RunId, other: RunId) -> bool {
        Self::tree_with(one) == Self::tree_with(other)
    }

    // A panic inside a tree's methods would be a fault of ours; what others can read is still in order.

    pub(super) fn read(&self, tree: u32) -> RwLockReadGuard<'_, Tree> {
        self.trees[tree as usize].0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, tree: u32) -> Writer<'_> {
        let tree = self.trees[tree as usize].0.write().unwrap_or_else(PoisonError::into_inner);
        let (bytes, blocks) = (tree.bytes(), tree.blocks());
        Writer { tree, forest: self, bytes, blocks }
    }

    pub(super) fn each(&self) -> impl Iterator<Item = RwLockReadGuard<'_, Tree>> {
        (0..TREES).map(|tree| self.read(tree))
    }

    /// Blocks that somebody holds.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Deref for Writer<'_> {
    type Target = Tree;

    fn deref(&self) -> &Tree {
        &self.tree
    }
}

impl DerefMut for Writer<'_> {
    fn deref_mut(&mut self) -> &mut Tree {
        &mut self.tree
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        let note = |sum: &AtomicUsize, before: usize, after: usize| {
            if after != before {
                // Wraps around for a decrease, as the sum does.
                sum.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
            }
        };
        note(&self.forest.bytes, self.bytes, self.tree.bytes());
        note(&self.forest.blocks, self.blocks, self.tree.blocks());
    }
}
