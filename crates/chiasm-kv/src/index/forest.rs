//! The trees, each behind a lock.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::tree::{NONE, RUN_BITS, Run, RunId, Tree};
use crate::BlockKey;

/// Number of trees, among which prompts are divided by their first block. A tree's lock is held for one event or one lookup.
const TREES: u32 = (NONE >> RUN_BITS) + 1;

/// Runs that are looked at with a tree locked: some 20 microseconds.
const RUNS: usize = 1 << 10;

pub(super) struct Forest {
    trees: Box<[Line]>,
}

/// A tree on cache lines of its own, lest locks of neighbours disturb each other.
#[repr(align(128))]
struct Line {
    tree: RwLock<Tree>,
    /// The tree's count, for those who don't want to wait for its lock.
    bytes: AtomicUsize,
    blocks: AtomicUsize,
}

/// A tree that is being changed. Writes its counts down beside the lock when it is dropped.
pub(super) struct Writer<'a> {
    tree: RwLockWriteGuard<'a, Tree>,
    line: &'a Line,
}

impl Forest {
    pub(super) fn new() -> Self {
        let line = |number| Line {
            tree: RwLock::new(Tree::new(number)),
            bytes: AtomicUsize::new(size_of::<Line>()),
            blocks: AtomicUsize::new(0),
        };
        Self { trees: (0..TREES).map(line).collect() }
    }

    /// The tree that holds all prompts beginning with this block. Prompts with other first blocks may share it.
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
        self.trees[tree as usize].tree.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, tree: u32) -> Writer<'_> {
        let line = &self.trees[tree as usize];
        Writer { tree: line.tree.write().unwrap_or_else(PoisonError::into_inner), line }
    }

    pub(super) fn each(&self) -> impl Iterator<Item = RwLockReadGuard<'_, Tree>> {
        (0..TREES).map(|tree| self.read(tree))
    }

    /// Every run, with each tree locked for some at a time; others may change it in between.
    pub(super) fn each_run(&self, mut visit: impl FnMut(&Run)) {
        for tree in 0..TREES {
            let mut from = 0;
            while let Some(runs) = self.read(tree).some_runs(from, RUNS) {
                runs.for_each(&mut visit);
                from += RUNS;
            }
        }
    }

    /// Number of blocks that somebody holds, with those that chores have still to give back.
    pub(super) fn blocks(&self) -> usize {
        self.trees.iter().map(|line| line.blocks.load(Ordering::Relaxed)).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        self.trees.iter().map(|line| line.bytes.load(Ordering::Relaxed)).sum()
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
        self.line.bytes.store(size_of::<Line>() + self.tree.bytes(), Ordering::Relaxed);
        self.line.blocks.store(self.tree.blocks(), Ordering::Relaxed);
    }
}
