//! A node of the tree: blocks that follow each other, and how their first one is found.

use std::sync::atomic::AtomicU32;

use super::{NONE, NodeId, Position};
use crate::BlockKey;
use crate::index::holders::Holders;
use crate::index::table::Slot;

/// Consecutive blocks of prompts, and who holds them. One cache line.
#[repr(align(64))]
pub(in crate::index) struct Node {
    /// The blocks' keys. Those of blocks that nobody holds are kept while something comes after
    /// them.
    keys: Vec<BlockKey>,
    pub(in crate::index) holders: Holders,
    /// The block before the first; its node is [`NONE`] at the start of a prompt.
    parent: Position,
    /// The node that its blocks went on in before it was split.
    tail: First,
    /// Nodes that start after its last block, beside the tail.
    pub(super) children: u32,
    pub(in crate::index) used: AtomicU32,
}

impl Default for Node {
    /// A node of no blocks.
    fn default() -> Self {
        let (keys, holders, used) = (Vec::new(), Holders::default(), AtomicU32::new(0));
        Self {
            keys,
            holders,
            parent: Position { node: NONE, at: 0 },
            tail: First::FREE,
            children: 0,
            used,
        }
    }
}

impl Node {
    pub(super) fn new(keys: Vec<BlockKey>, holders: Holders, parent: Option<Position>) -> Self {
        Self {
            keys,
            holders,
            parent: parent.unwrap_or(Position { node: NONE, at: 0 }),
            ..Self::default()
        }
    }

    pub(super) fn parent(&self) -> Option<Position> {
        (self.parent.node != NONE).then_some(self.parent)
    }

    pub(super) fn tail(&self) -> Option<NodeId> {
        (!self.tail.is_free()).then_some(self.tail.node)
    }

    /// The tail if it may go on with a block. Most prompts part where a node was split.
    pub(super) fn tail_with(&self, key: BlockKey) -> Option<NodeId> {
        self.tail().filter(|_| self.tail.tag == First::tag(key))
    }

    pub(super) fn set_tail(&mut self, tail: Option<First>) {
        self.tail = tail.unwrap_or(First::FREE);
    }

    /// Takes the tail off, to be handed on to another node.
    pub(super) fn take_tail(&mut self) -> Option<First> {
        let tail = std::mem::replace(&mut self.tail, First::FREE);
        (!tail.is_free()).then_some(tail)
    }

    pub(in crate::index) fn len(&self) -> u32 {
        self.keys.len() as u32
    }

    pub(in crate::index) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    pub(super) fn bytes(&self) -> usize {
        self.keys.capacity() * size_of::<BlockKey>() + self.holders.bytes()
    }

    /// Adds blocks at the end. When memory is too small, takes one of few different sizes, which
    /// allocators have at hand; most of glibc's `realloc` is not even tried that way.
    pub(super) fn extend(&mut self, keys: &[BlockKey]) {
        let len = self.keys.len() + keys.len();
        if len > self.keys.capacity() {
            self.move_to(len.max(self.keys.len() * 9 / 8).next_multiple_of(4));
        }
        self.keys.extend_from_slice(keys);
    }

    /// Moves to memory for so many blocks, which are no less than there are.
    fn move_to(&mut self, room: usize) {
        let mut keys = Vec::with_capacity(room);
        keys.extend_from_slice(&self.keys);
        self.keys = keys;
    }

    /// Memory is given back when much of it is free.
    pub(super) fn truncate(&mut self, len: u32) {
        self.keys.truncate(len as usize);
        if self.keys.capacity() > 8 + self.keys.len() * 5 / 4 {
            self.move_to(self.keys.len());
        }
    }

    /// Keeps the first ones and returns the others, each with no more memory than it needs.
    pub(super) fn split_off(&mut self, at: u32) -> Vec<BlockKey> {
        let rest = self.keys[at as usize..].to_vec();
        self.keys.truncate(at as usize);
        self.move_to(self.keys.len());
        rest
    }

    /// How many of the keys are those of this node from `at` on. Keys are chained: if two agree,
    /// those before do.
    pub(in crate::index) fn agrees(&self, at: u32, others: &[BlockKey]) -> u32 {
        let keys = &self.keys[at as usize..];
        let most = keys.len().min(others.len());
        if most == 0 || keys[most - 1] == others[most - 1] {
            return most as u32;
        }
        if keys[0] != others[0] {
            return 0;
        }
        let (mut low, mut high) = (1, most - 1);
        while low < high {
            let middle = low.midpoint(high);
            match keys[middle] == others[middle] {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low as u32
    }
}

/// A node by a part of its first key; the rest of it is in the node.
#[derive(Clone, Copy)]
pub(super) struct First {
    tag: u32,
    pub(super) node: NodeId,
}

impl First {
    pub(super) fn new(key: BlockKey, node: NodeId) -> Self {
        Self { tag: Self::tag(key), node }
    }

    /// Keys are uniform below 2^127.
    fn tag(key: BlockKey) -> u32 {
        (key.get() >> 95) as u32
    }

    pub(super) fn hash_of(key: BlockKey) -> u64 {
        u64::from(Self::tag(key)) << 32
    }
}

impl Slot for First {
    const FREE: Self = Self { tag: 0, node: NONE };

    fn is_free(&self) -> bool {
        self.node == NONE
    }

    fn hash(&self) -> u64 {
        if self.is_free() { u64::MAX } else { u64::from(self.tag) << 32 }
    }
}
