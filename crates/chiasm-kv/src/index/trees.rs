//! The trees, each behind a lock.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_utils::sync::{ShardedLock, ShardedLockReadGuard, ShardedLockWriteGuard};

use super::radix_tree::{NODE_BITS, NONE, Node, NodeId, RadixTree};
use crate::BlockKey;

/// Number of trees, among which prompts are divided by their first block. A tree's lock is held for
/// one event or one lookup.
const TREES: u32 = (NONE >> NODE_BITS) + 1;

/// Nodes that are looked at with a tree locked: some 20 microseconds.
const NODES: usize = 1 << 10;

/// All prompts, divided among trees so that who changes one does not keep others waiting.
pub(super) struct Trees {
    trees: Box<[Line]>,
}

/// A tree on cache lines of its own, lest locks of neighbours disturb each other.
#[repr(align(128))]
struct Line {
    tree: ShardedLock<RadixTree>,
    /// The tree's count, for those who don't want to wait for its lock.
    bytes: AtomicUsize,
    blocks: AtomicUsize,
}

/// A tree that is being changed. Writes its counts down beside the lock when it is dropped.
pub(super) struct Writer<'a> {
    tree: ShardedLockWriteGuard<'a, RadixTree>,
    line: &'a Line,
}

impl Trees {
    pub(super) fn new() -> Self {
        let line = |number| Line {
            tree: ShardedLock::new(RadixTree::new(number)),
            bytes: AtomicUsize::new(size_of::<Line>()),
            blocks: AtomicUsize::new(0),
        };
        Self { trees: (0..TREES).map(line).collect() }
    }

    /// The tree that holds all prompts beginning with this block. Prompts with other first blocks
    /// may share it.
    pub(super) fn tree_of(first: BlockKey) -> u32 {
        first.get() as u32 % TREES
    }

    pub(super) fn tree_with(node: NodeId) -> u32 {
        node >> NODE_BITS
    }

    pub(super) fn same_tree(one: NodeId, other: NodeId) -> bool {
        Self::tree_with(one) == Self::tree_with(other)
    }

    // A panic inside a tree's methods would be a fault of ours; what others can read is still in
    // order.

    pub(super) fn read(&self, tree: u32) -> ShardedLockReadGuard<'_, RadixTree> {
        self.trees[tree as usize].tree.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, tree: u32) -> Writer<'_> {
        let line = &self.trees[tree as usize];
        Writer { tree: line.tree.write().unwrap_or_else(PoisonError::into_inner), line }
    }

    pub(super) fn each(&self) -> impl Iterator<Item = ShardedLockReadGuard<'_, RadixTree>> {
        (0..TREES).map(|tree| self.read(tree))
    }

    /// Every node, with each tree locked for some at a time; others may change it in between.
    pub(super) fn each_node(&self, mut visit: impl FnMut(&Node)) {
        for tree in 0..TREES {
            let mut from = 0;
            while let Some(nodes) = self.read(tree).some_nodes(from, NODES) {
                nodes.for_each(&mut visit);
                from += NODES;
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
    type Target = RadixTree;

    fn deref(&self) -> &RadixTree {
        &self.tree
    }
}

impl DerefMut for Writer<'_> {
    fn deref_mut(&mut self) -> &mut RadixTree {
        &mut self.tree
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        self.line.bytes.store(size_of::<Line>() + self.tree.bytes(), Ordering::Relaxed);
        self.line.blocks.store(self.tree.blocks(), Ordering::Relaxed);
    }
}
