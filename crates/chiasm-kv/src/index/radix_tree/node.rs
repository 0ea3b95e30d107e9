//! A node of the radix tree, and references to nodes.

use std::sync::atomic::AtomicU32;

use super::{NO_NODE, NodeId, Position};
use crate::BlockKey;
use crate::index::holders::Holders;
use crate::index::table::Slot;

/// Consecutive blocks of prompts, with their holders. Takes one cache line.
#[repr(align(64))]
pub(in crate::index) struct Node {
    /// The keys of the blocks. A block without a holder stays while another block follows it.
    keys: Vec<BlockKey>,
    pub(in crate::index) holders: Holders,
    /// The block before the first; its node is [`NO_NODE`] at the start of a prompt.
    parent: Position,
    /// The node with the blocks that followed before this node was split.
    tail: NodeRef,
    /// The number of nodes that follow the last block, without the tail.
    pub(super) children: u32,
    pub(in crate::index) used: AtomicU32,
}

impl Default for Node {
    /// Creates a node without blocks.
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            holders: Holders::default(),
            parent: Position { node: NO_NODE, at: 0 },
            tail: NodeRef::FREE,
            children: 0,
            used: AtomicU32::new(0),
        }
    }
}

impl Node {
    pub(super) fn new(keys: Vec<BlockKey>, holders: Holders, parent: Option<Position>) -> Self {
        Self {
            keys,
            holders,
            parent: parent.unwrap_or(Position { node: NO_NODE, at: 0 }),
            ..Self::default()
        }
    }

    pub(super) fn parent(&self) -> Option<Position> {
        (self.parent.node != NO_NODE).then_some(self.parent)
    }

    pub(super) fn tail(&self) -> Option<NodeId> {
        (!self.tail.is_free()).then_some(self.tail.node)
    }

    /// Returns the tail if it may begin with the block `key`. Filters out most mismatches without
    /// access to the tail: most prompts diverge where a node was split.
    pub(super) fn tail_with(&self, key: BlockKey) -> Option<NodeId> {
        self.tail().filter(|_| self.tail.tag == NodeRef::tag(key))
    }

    pub(super) fn set_tail(&mut self, tail: Option<NodeRef>) {
        self.tail = tail.unwrap_or(NodeRef::FREE);
    }

    /// Removes the tail and returns it.
    pub(super) fn take_tail(&mut self) -> Option<NodeRef> {
        let tail = std::mem::replace(&mut self.tail, NodeRef::FREE);
        (!tail.is_free()).then_some(tail)
    }

    pub(in crate::index) fn len(&self) -> u32 {
        self.keys.len() as u32
    }

    pub(in crate::index) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Returns the number of bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.keys.capacity() * size_of::<BlockKey>() + self.holders.bytes()
    }

    /// Adds blocks at the end.
    ///
    /// A reallocation uses one of few distinct sizes, which allocators have at hand. It copies
    /// instead of calling `realloc`, most of whose work in glibc is thereby avoided.
    pub(super) fn extend(&mut self, keys: &[BlockKey]) {
        let len = self.keys.len() + keys.len();
        if len > self.keys.capacity() {
            self.reallocate(len.max(self.keys.len() * 9 / 8).next_multiple_of(4));
        }
        self.keys.extend_from_slice(keys);
    }

    /// Moves the keys to memory for `capacity` blocks, which is at least their number.
    fn reallocate(&mut self, capacity: usize) {
        let mut keys = Vec::with_capacity(capacity);
        keys.extend_from_slice(&self.keys);
        self.keys = keys;
    }

    /// Keeps the first `len` blocks. Frees memory if much of it is unused.
    pub(super) fn truncate(&mut self, len: u32) {
        self.keys.truncate(len as usize);
        if self.keys.capacity() > 8 + self.keys.len() * 5 / 4 {
            self.reallocate(self.keys.len());
        }
    }

    /// Keeps the first `at` keys and returns the others, both without spare memory.
    pub(super) fn split_off(&mut self, at: u32) -> Vec<BlockKey> {
        let rest = self.keys[at as usize..].to_vec();
        self.keys.truncate(at as usize);
        self.reallocate(self.keys.len());
        rest
    }

    /// Returns the number of leading `others` that equal the keys of this node from `at` on.
    ///
    /// Keys are chained: if two keys are equal, so are all keys before them.
    pub(in crate::index) fn matching_keys(&self, at: u32, others: &[BlockKey]) -> u32 {
        let keys = &self.keys[at as usize..];
        let max = keys.len().min(others.len());
        if max == 0 || keys[max - 1] == others[max - 1] {
            return max as u32;
        }
        if keys[0] != others[0] {
            return 0;
        }
        let mut low = 1;
        let mut high = max - 1;
        while low < high {
            let middle = low.midpoint(high);
            if keys[middle] == others[middle] {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low as u32
    }
}

/// A reference to a node, with a part of its first key.
#[derive(Clone, Copy)]
pub(super) struct NodeRef {
    tag: u32,
    pub(super) node: NodeId,
}

impl NodeRef {
    pub(super) fn new(key: BlockKey, node: NodeId) -> Self {
        Self { tag: Self::tag(key), node }
    }

    /// Returns the highest 32 of a key's 127 bits, which are uniform.
    fn tag(key: BlockKey) -> u32 {
        (key.get() >> 95) as u32
    }

    /// Returns the hash under which tables store a node with this first key.
    pub(super) fn hash_of(key: BlockKey) -> u64 {
        u64::from(Self::tag(key)) << 32
    }
}

impl Slot for NodeRef {
    const FREE: Self = Self { tag: 0, node: NO_NODE };

    fn is_free(&self) -> bool {
        self.node == NO_NODE
    }

    fn hash(&self) -> u64 {
        if self.is_free() { u64::MAX } else { u64::from(self.tag) << 32 }
    }
}
