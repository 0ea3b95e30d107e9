//! A radix tree of prompts over block keys: nodes of consecutive blocks, with their holders.
//!
//! A key determines all blocks before its own. So a node is found by the key of its first block,
//! and two chains of keys are equal up to the last block in which they are equal. Prompts diverge
//! only at the ends of nodes: if a new prompt diverges within a node, the node is split. Each
//! holder has one contiguous piece of a node: if it would have two, the node is split too.
//!
//! A [`Position`] remains valid when nodes are split: blocks beyond the end of a node are in its
//! tail.

mod node;

use std::sync::atomic::AtomicU32;

use super::holders::{HolderId, Holders};
use super::table::Table;
use super::use_counter::UseCounter;
use crate::BlockKey;
pub(super) use node::Node;
use node::NodeRef;

/// The id of a node in 31 bits: the number of its tree in the highest four, then its number in the
/// tree.
pub(super) type NodeId = u32;

/// The id that stands for no node.
pub(super) const NO_NODE: NodeId = (1 << 31) - 1;

/// The number of bits of a node's number in its tree.
pub(super) const NODE_BITS: u32 = 27;

/// The maximum number of blocks per node, so that an index fits into a byte. Longer prompts have
/// several nodes. The limit is lower in tests, so that short prompts also have several.
const MAX_NODE_BLOCKS: usize = if cfg!(test) { 16 } else { 256 };

/// The position of a block: the node that contained it when the position was taken, and its index
/// in that node. It remains valid when the node is split; [`RadixTree::find`] follows splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Position {
    pub(super) node: NodeId,
    pub(super) at: u32,
}

/// A tree of prompts that may begin with the same block, behind one lock of
/// [`Trees`](super::trees::Trees).
///
/// Invariant: a node exists while one of its blocks has a holder or another node follows it. So
/// every node is reachable from a first block. Unneeded nodes are pruned when their last holder
/// releases them.
pub(super) struct RadixTree {
    /// The tree's number, shifted to its place in a [`NodeId`].
    tag: u32,
    nodes: Vec<Node>,
    /// The numbers of pruned nodes, for reuse.
    free: Vec<u32>,
    /// The nodes that are no tails, by their first keys.
    heads: Table<NodeRef>,
    /// The number of bytes on the heap that nodes own beyond their slots.
    heap: usize,
    /// The number of blocks that have a holder.
    blocks: usize,
}

/// Consecutive blocks of a prompt in one node, which a holder has acquired.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) position: Position,
    pub(super) len: u32,
    /// The piece of them that the holder had before, `from..to` relative to the first block.
    pub(super) before: (u32, u32),
}

/// A block that a holder has acquired.
pub(super) struct HeldBlock {
    pub(super) position: Position,
    pub(super) key: BlockKey,
    /// `true` if the holder did not have the block before.
    pub(super) is_new: bool,
}

impl RadixTree {
    pub(super) fn new(number: u32) -> Self {
        Self {
            tag: number << NODE_BITS,
            nodes: Vec::new(),
            free: Vec::new(),
            heads: Table::new(),
            heap: 0,
            blocks: 0,
        }
    }

    /// Returns the number of blocks that have a holder.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of nodes.
    pub(super) fn nodes(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// Returns the nodes in at most `max_slots` slots, starting at slot `from`. Returns `None`
    /// after the last slot.
    pub(super) fn some_nodes(
        &self,
        from: usize,
        max_slots: usize,
    ) -> Option<impl Iterator<Item = &Node>> {
        let nodes = self.nodes.get(from..).filter(|nodes| !nodes.is_empty())?;
        Some(nodes[..nodes.len().min(max_slots)].iter().filter(|node| node.len() > 0))
    }

    /// Returns the number of bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.heap
            + self.nodes.capacity() * size_of::<Node>()
            + self.free.capacity() * 4
            + self.heads.bytes()
    }

    pub(super) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[(node - self.tag) as usize]
    }

    fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[(node - self.tag) as usize]
    }

    /// Follows splits to the current position of a block. Returns `None` if it no longer exists.
    pub(super) fn find(&self, mut position: Position) -> Option<Position> {
        loop {
            let node = self.nodes.get((position.node - self.tag) as usize)?;
            if position.at < node.len() {
                return Some(position);
            }
            position = Position { node: node.tail()?, at: position.at - node.len() };
        }
    }

    /// Reads the memory that a change of this block needs, so that it is loaded into the cache.
    pub(super) fn touch(&self, position: Position) -> u64 {
        let node = self.nodes.get((position.node - self.tag) as usize);
        node.and_then(|node| node.keys().last()).map_or(0, |key| key.get() as u64)
    }

    /// Returns the key of a block, or `None` if it no longer exists.
    pub(super) fn key(&self, position: Position) -> Option<BlockKey> {
        self.find(position).map(|position| self.node(position.node).keys()[position.at as usize])
    }

    /// Returns the block that precedes a node, or `None` at the start of a prompt.
    pub(super) fn parent(&self, node: NodeId) -> Option<Position> {
        self.node(node).parent().and_then(|parent| self.find(parent))
    }

    /// Returns the node that begins with the block `key`, after the last block of `after` or at the
    /// start of a prompt.
    pub(super) fn next(&self, after: Option<NodeId>, key: BlockKey) -> Option<NodeId> {
        let tail = after.and_then(|node| self.node(node).tail_with(key));
        tail.filter(|tail| self.node(*tail).keys()[0] == key).or_else(|| {
            let matches = |head: &NodeRef| self.node(head.node).keys()[0] == key;
            self.heads.get(NodeRef::hash_of(key), matches).map(|head| head.node)
        })
    }

    /// Returns the node that [`RadixTree::next`] finds, and how many of the keys it matches.
    /// Compares the node's last key first, because the others are seldom needed.
    pub(super) fn follow(&self, after: Option<NodeId>, keys: &[BlockKey]) -> Option<(NodeId, u32)> {
        let matching = |node: NodeId| {
            let matching = self.node(node).matching_keys(0, keys);
            (matching > 0).then_some((node, matching))
        };
        let key = *keys.first()?;
        let tail = after.and_then(|node| self.node(node).tail_with(key));
        tail.and_then(matching)
            .or_else(|| self.heads.find_map(NodeRef::hash_of(key), |head| matching(head.node)))
    }

    /// Returns `true` if a holder has a block.
    pub(super) fn holds(&self, position: Position, holder: HolderId) -> bool {
        self.find(position).is_some_and(|position| {
            let node = self.node(position.node);
            node.holders
                .get(holder, node.len())
                .is_some_and(|(from, to)| (from..to).contains(&position.at))
        })
    }

    /// Gives a holder the blocks `keys`, which follow the block `parent` or start a prompt.
    ///
    /// Appends the acquired blocks to `segments`. They are fewer than `keys` if the tree has no
    /// room for more nodes.
    pub(super) fn hold(
        &mut self,
        parent: Option<Position>,
        keys: &[BlockKey],
        holder: HolderId,
        uses: &UseCounter,
        segments: &mut Vec<Segment>,
    ) {
        let mut keys = keys;
        // The position of the next block, if that is in the current node. Otherwise the end of the
        // node that was searched last.
        let mut cursor = match parent.map(|parent| self.find(parent)) {
            None => None,
            Some(Some(position)) => Some(Position { at: position.at + 1, ..position }),
            Some(None) => return,
        };
        while let Some(key) = keys.first() {
            let len = cursor.map_or(0, |cursor| self.node(cursor.node).len());
            if let Some(position) = cursor.filter(|cursor| cursor.at < len) {
                let matching = self.node(position.node).matching_keys(position.at, keys);
                if matching > 0 {
                    let Some(segment) = self.hold_piece(position, matching, holder, uses) else {
                        return;
                    };
                    keys = &keys[segment.len as usize..];
                    cursor = Some(Position {
                        node: segment.position.node,
                        at: segment.position.at + segment.len,
                    });
                    segments.push(segment);
                    continue;
                }
                // The prompt diverges within the node.
                if self.split(position).is_none() {
                    return;
                }
            } else if let Some(next) = self.next(cursor.map(|cursor| cursor.node), *key) {
                cursor = Some(Position { node: next, at: 0 });
                continue;
            }
            let Some(segment) = self.add(cursor, keys, holder, uses) else { return };
            keys = &keys[segment.len as usize..];
            cursor = Some(Position {
                node: segment.position.node,
                at: segment.position.at + segment.len,
            });
            segments.push(segment);
        }
    }

    /// Gives a holder one block. Returns `None` if the block no longer exists or the tree has no
    /// room.
    pub(super) fn hold_at(
        &mut self,
        position: Position,
        holder: HolderId,
        uses: &UseCounter,
    ) -> Option<HeldBlock> {
        let position = self.find(position)?;
        let key = self.node(position.node).keys()[position.at as usize];
        let segment = self.hold_piece(position, 1, holder, uses)?;
        let is_new = segment.before.0 >= segment.before.1;
        Some(HeldBlock { position: segment.position, key, is_new })
    }

    /// Gives a holder `len` blocks of one node, at least one.
    fn hold_piece(
        &mut self,
        position: Position,
        len: u32,
        holder: HolderId,
        uses: &UseCounter,
    ) -> Option<Segment> {
        let node = self.node(position.node);
        uses.record(&node.used);
        let from = position.at;
        let to = from + len;
        match node.holders.get(holder, node.len()) {
            // The holder would have two pieces: a split moves the later one to the tail.
            Some((_, old_to)) if old_to < from => {
                self.split(position)?;
                let position = Position { node: self.node(position.node).tail()?, at: 0 };
                self.set(position.node, holder, 0, len);
                Some(Segment { position, len, before: (0, 0) })
            }
            Some((old_from, _)) if old_from > to => {
                self.split(Position { at: old_from, ..position })?;
                self.set(position.node, holder, from, to);
                Some(Segment { position, len, before: (0, 0) })
            }
            Some((old_from, old_to)) => {
                self.set(position.node, holder, from.min(old_from), to.max(old_to));
                let before = (old_from.clamp(from, to) - from, old_to.clamp(from, to) - from);
                Some(Segment { position, len, before })
            }
            None => {
                self.set(position.node, holder, from, to);
                Some(Segment { position, len, before: (0, 0) })
            }
        }
    }

    /// Adds new blocks after the end of a node or at the start of a prompt: as many as fit into one
    /// node. Extends the node if only `holder` has its end and nothing follows it.
    fn add(
        &mut self,
        after: Option<Position>,
        keys: &[BlockKey],
        holder: HolderId,
        uses: &UseCounter,
    ) -> Option<Segment> {
        if let Some(position) = after {
            let node = self.node_mut(position.node);
            let len = node.len();
            let keys = &keys[..keys.len().min(MAX_NODE_BLOCKS - len as usize)];
            if !keys.is_empty()
                && node.tail().is_none()
                && node.children == 0
                && node.holders.ends_with_only(holder, len)
            {
                let before = node.bytes();
                node.extend(keys);
                let from = node.holders.get(holder, len).map_or(0, |(from, _)| from);
                let to = node.len();
                node.holders = Holders::default();
                node.holders.set(holder, from, to, to);
                uses.record(&node.used);
                self.heap += self.node(position.node).bytes() - before;
                self.blocks += keys.len();
                return Some(Segment { position, len: keys.len() as u32, before: (0, 0) });
            }
        }
        let keys = &keys[..keys.len().min(MAX_NODE_BLOCKS)];
        let parent = after.map(|position| Position { at: position.at - 1, ..position });
        let node = Node::new(keys.to_vec(), Holders::single(holder, keys.len() as u32), parent);
        uses.record(&node.used);
        let id = self.new_node(node)?;
        let first = keys[0];
        self.heads.entry(
            NodeRef::hash_of(first),
            |head| head.node == id,
            || NodeRef::new(first, id),
        );
        if let Some(position) = after {
            self.node_mut(position.node).children += 1;
        }
        self.blocks += keys.len();
        Some(Segment {
            position: Position { node: id, at: 0 },
            len: keys.len() as u32,
            before: (0, 0),
        })
    }

    /// Takes `blocks` consecutive blocks away from a holder. Positions are relative to the original
    /// node, even if it was split since.
    pub(super) fn release(&mut self, position: Position, blocks: u32, holder: HolderId) {
        let mut left = blocks;
        // From the last block backwards, so that tails are pruned before the nodes they follow.
        while let Some(last) = left.checked_sub(1) {
            let Some(last) = self.find(Position { at: position.at + last, ..position }) else {
                left -= 1;
                continue;
            };
            let len = left.min(last.at + 1);
            self.release_piece(Position { at: last.at + 1 - len, ..last }, len, holder);
            left -= len;
        }
    }

    /// Takes blocks of one node away from a holder.
    fn release_piece(&mut self, position: Position, len: u32, holder: HolderId) {
        let node = self.node(position.node);
        let first = position.at;
        let end = first + len;
        let Some((from, to)) =
            node.holders.get(holder, node.len()).filter(|(from, to)| *from < end && first < *to)
        else {
            return;
        };
        if first <= from && end < to {
            self.set(position.node, holder, end, to);
        } else {
            // If there is no room for a tail, the blocks after the released ones are released too.
            if end < to {
                self.split(Position { at: end, ..position });
            }
            self.set(position.node, holder, from, first.max(from));
        }
        self.prune(position.node);
    }

    /// Takes the whole node that contains a block away from a holder.
    pub(super) fn release_node(&mut self, position: Position, holder: HolderId) {
        let Some(Position { node, .. }) = self.find(position) else { return };
        if self.node(node).holders.get(holder, self.node(node).len()).is_some() {
            self.set(node, holder, 0, 0);
            self.prune(node);
        }
    }

    /// Returns `true` if there is no room for more nodes.
    fn is_full(&self) -> bool {
        // Two in reserve, for a split followed by an addition.
        self.free.is_empty() && self.nodes.len() >= (1 << NODE_BITS) - 2
    }

    fn new_node(&mut self, node: Node) -> Option<NodeId> {
        if self.is_full() {
            return None;
        }
        self.heap += node.bytes();
        let number = match self.free.pop() {
            Some(number) => {
                self.nodes[number as usize] = node;
                number
            }
            None => {
                if self.nodes.len() == self.nodes.capacity() {
                    self.nodes.reserve_exact(16.max(self.nodes.len() / 8));
                }
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        };
        Some(self.tag | number)
    }

    /// Sets the piece `from..to` of a node that a holder has.
    fn set(&mut self, node: NodeId, holder: HolderId, from: u32, to: u32) {
        let node = &mut self.nodes[(node - self.tag) as usize];
        let len = node.len();
        let bytes = node.bytes();
        let covered = node.holders.covered(len);
        node.holders.set(holder, from, to, len);
        self.heap = self.heap + node.bytes() - bytes;
        self.blocks = self.blocks + node.holders.covered(len) as usize - covered as usize;
    }

    /// Splits a node: its blocks from `position` on become its tail. Returns `None` if there is no
    /// room.
    fn split(&mut self, position: Position) -> Option<()> {
        if self.is_full() {
            return None;
        }
        let node = self.node_mut(position.node);
        let bytes = node.bytes();
        let len = node.len();
        let keys = node.split_off(position.at);
        let holders = node.holders.split(position.at, len);
        let mut rest =
            Node::new(keys, holders, Some(Position { node: position.node, at: position.at - 1 }));
        rest.set_tail(node.take_tail());
        rest.children = std::mem::take(&mut node.children);
        rest.used = AtomicU32::new(*node.used.get_mut());
        let after = node.bytes();
        self.heap = self.heap + after - bytes;
        let first = rest.keys()[0];
        let tail = self.new_node(rest)?;
        self.node_mut(position.node).set_tail(Some(NodeRef::new(first, tail)));
        Some(())
    }

    /// Removes the blocks at the end of a node that have no holder and no successor, then its empty
    /// predecessors.
    fn prune(&mut self, node: NodeId) {
        let mut next = Some(node);
        while let Some(id) = next.take() {
            let node = self.node_mut(id);
            if node.tail().is_some() || node.children > 0 || node.len() == 0 {
                return;
            }
            let len = node.len();
            let bytes = node.bytes();
            let end = node.holders.end(len);
            if end == len {
                return;
            }
            if end > 0 {
                node.truncate(end);
                let after = node.bytes();
                self.heap = self.heap + after - bytes;
                return;
            }
            let first = node.keys()[0];
            let parent = node.parent();
            *node = Node::default();
            self.heap -= bytes;
            self.free.push(id - self.tag);
            let parent = parent.and_then(|parent| self.find_node(parent));
            if parent.is_some_and(|parent| self.node(parent).tail() == Some(id)) {
                parent.into_iter().for_each(|parent| self.node_mut(parent).set_tail(None));
            } else {
                self.heads.remove(NodeRef::hash_of(first), |head| head.node == id);
                if let Some(parent) = parent {
                    self.node_mut(parent).children -= 1;
                }
            }
            next = parent;
        }
        // Once the tree is empty, its slots are freed too.
        if self.free.len() == self.nodes.len() {
            self.nodes = Vec::new();
            self.free = Vec::new();
        }
    }

    /// Returns the node that currently contains a block.
    fn find_node(&self, position: Position) -> Option<NodeId> {
        self.find(position).map(|position| position.node)
    }
}
