//! The radix trees, each with its own lock.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_utils::sync::{ShardedLock, ShardedLockReadGuard, ShardedLockWriteGuard};

use super::radix_tree::{NO_NODE, NODE_BITS, Node, NodeId, RadixTree};
use crate::BlockKey;

/// The number of trees. Prompts are divided among them by their first block. A tree's lock is held
/// for one event or one lookup.
const TREE_COUNT: u32 = (NO_NODE >> NODE_BITS) + 1;

/// The number of nodes visited with a tree locked: some 20 microseconds.
const NODES_PER_LOCK: usize = 1 << 10;

/// The trees of all prompts. Writers to different trees don't wait for each other.
pub(super) struct Trees {
    trees: Box<[Line]>,
}

/// A tree on its own cache lines, to avoid false sharing between neighbouring locks.
#[repr(align(128))]
struct Line {
    tree: ShardedLock<RadixTree>,
    /// A copy of the tree's byte count, readable without its lock.
    bytes: AtomicUsize,
    /// A copy of the tree's block count, readable without its lock.
    blocks: AtomicUsize,
}

/// A tree locked for writing. On drop, copies the tree's counts to the fields beside the lock.
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
        Self { trees: (0..TREE_COUNT).map(line).collect() }
    }

    /// Returns the number of the tree that holds all prompts beginning with this block. Prompts
    /// with other first blocks may share it.
    pub(super) fn tree_of(first: BlockKey) -> u32 {
        first.get() as u32 % TREE_COUNT
    }

    /// Returns the number of the tree that contains a node.
    pub(super) fn tree_with(node: NodeId) -> u32 {
        node >> NODE_BITS
    }

    pub(super) fn same_tree(one: NodeId, other: NodeId) -> bool {
        Self::tree_with(one) == Self::tree_with(other)
    }

    // Poisoning is ignored: a panic in a tree's methods would be a bug, and what others can read of
    // the tree is still consistent.

    pub(super) fn read(&self, tree: u32) -> ShardedLockReadGuard<'_, RadixTree> {
        self.trees[tree as usize].tree.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write(&self, tree: u32) -> Writer<'_> {
        let line = &self.trees[tree as usize];
        Writer { tree: line.tree.write().unwrap_or_else(PoisonError::into_inner), line }
    }

    pub(super) fn each(&self) -> impl Iterator<Item = ShardedLockReadGuard<'_, RadixTree>> {
        (0..TREE_COUNT).map(|tree| self.read(tree))
    }

    /// Visits every node. Locks a tree for [`NODES_PER_LOCK`] nodes at a time; it may change in
    /// between.
    pub(super) fn each_node(&self, mut visit: impl FnMut(&Node)) {
        for tree in 0..TREE_COUNT {
            let mut from = 0;
            while let Some(nodes) = self.read(tree).some_nodes(from, NODES_PER_LOCK) {
                nodes.for_each(&mut visit);
                from += NODES_PER_LOCK;
            }
        }
    }

    /// Returns the number of held blocks, including those that chores have not released yet.
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
