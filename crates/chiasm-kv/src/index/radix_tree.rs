//! Prompts as a radix tree over block keys: nodes of blocks that follow each other, and who holds
//! which of them.
//!
//! A key tells everything before its block, so a node is found by the key of its first block, and
//! two chains of keys agree up to the last block in which they agree. Prompts part at the ends of
//! nodes only: where a new one parts within a node, the node is split. Each holder of a node holds
//! one piece of it: where that would be two, the node is split too.
//!
//! A [`Position`] stays good when nodes are split: what lies beyond a node's end goes on in its
//! tail.

mod node;

use std::sync::atomic::AtomicU32;

use super::holders::{HolderId, Holders};
use super::table::Table;
use super::use_counter::UseCounter;
use crate::BlockKey;
use node::First;
pub(super) use node::Node;

/// Tells a node from all others in 31 bits: the number of its tree in the highest four, then its
/// number there.
pub(super) type NodeId = u32;

/// Stands for no node.
pub(super) const NONE: NodeId = (1 << 31) - 1;

/// Bits of a node's number.
pub(super) const NODE_BITS: u32 = 27;

/// Number of blocks that a node may have: so many as a byte has numbers. Longer prompts are several
/// nodes. In tests short prompts are that too.
const MOST_BLOCKS: usize = if cfg!(test) { 16 } else { 256 };

/// Where a block is: the node that it was in when somebody wrote this down, and its number there
/// from 0 on. It stays good when the node is split; [`RadixTree::find`] follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Position {
    pub(super) node: NodeId,
    pub(super) at: u32,
}

/// Prompts that may begin with the same block, behind one lock of [`Trees`](super::trees::Trees).
///
/// Invariant: a node stays while somebody holds a block of it or something comes after it, so
/// whatever is there is reached from a first block; nodes that nobody needs are pruned when their
/// last holder lets go.
pub(super) struct RadixTree {
    /// The tree's number, where [`NodeId`]s have it.
    tag: u32,
    nodes: Vec<Node>,
    /// Numbers of nodes that are no more.
    free: Vec<u32>,
    /// Nodes that are no tails, by their first blocks.
    first: Table<First>,
    /// Bytes on the heap that nodes have beyond their slots.
    heap: usize,
    /// Number of blocks that somebody holds.
    blocks: usize,
}

/// Consecutive blocks of a prompt in one node, that a worker holds now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) position: Position,
    pub(super) len: u32,
    /// The piece of them that the worker held before, counted from the first: `from..to`.
    pub(super) before: (u32, u32),
}

impl RadixTree {
    pub(super) fn new(number: u32) -> Self {
        let (nodes, free, first) = (Vec::new(), Vec::new(), Table::new());
        Self { tag: number << NODE_BITS, nodes, free, first, heap: 0, blocks: 0 }
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Number of nodes.
    pub(super) fn nodes(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    /// The nodes in `most` slots from the slot `from` on; `None` beyond the last one.
    pub(super) fn some_nodes(
        &self,
        from: usize,
        most: usize,
    ) -> Option<impl Iterator<Item = &Node>> {
        let nodes = self.nodes.get(from..).filter(|nodes| !nodes.is_empty())?;
        Some(nodes[..nodes.len().min(most)].iter().filter(|node| node.len() > 0))
    }

    /// Bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.heap
            + self.nodes.capacity() * size_of::<Node>()
            + self.free.capacity() * 4
            + self.first.bytes()
    }

    pub(super) fn node(&self, node: NodeId) -> &Node {
        &self.nodes[(node - self.tag) as usize]
    }

    fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.nodes[(node - self.tag) as usize]
    }

    /// Follows splits to where a block is now; `None` if it is no more.
    pub(super) fn find(&self, mut position: Position) -> Option<Position> {
        loop {
            let node = self.nodes.get((position.node - self.tag) as usize)?;
            if position.at < node.len() {
                return Some(position);
            }
            position = Position { node: node.tail()?, at: position.at - node.len() };
        }
    }

    /// Looks at what is needed of a node to change it.
    pub(super) fn touch(&self, position: Position) -> u64 {
        let node = self.nodes.get((position.node - self.tag) as usize);
        node.and_then(|node| node.keys().last()).map_or(0, |key| key.get() as u64)
    }

    /// The key of a block; `None` if it is no more.
    pub(super) fn key(&self, position: Position) -> Option<BlockKey> {
        self.find(position).map(|position| self.node(position.node).keys()[position.at as usize])
    }

    /// The block that a node comes after; `None` at the start of a prompt.
    pub(super) fn parent(&self, node: NodeId) -> Option<Position> {
        self.node(node).parent().and_then(|parent| self.find(parent))
    }

    /// The node that goes on with a block after the last of another, or at the start.
    pub(super) fn next(&self, after: Option<NodeId>, key: BlockKey) -> Option<NodeId> {
        let tail = after.and_then(|node| self.node(node).tail_with(key));
        tail.filter(|tail| self.node(*tail).keys()[0] == key).or_else(|| {
            let is = |first: &First| self.node(first.node).keys()[0] == key;
            self.first.get(First::hash_of(key), is).map(|first| first.node)
        })
    }

    /// The node that [`RadixTree::next`] finds, with how many of the keys it has. Looks at its last
    /// key first: the others are seldom needed.
    pub(super) fn follow(&self, after: Option<NodeId>, keys: &[BlockKey]) -> Option<(NodeId, u32)> {
        let agrees = |node: NodeId| {
            let agree = self.node(node).agrees(0, keys);
            (agree > 0).then_some((node, agree))
        };
        let key = *keys.first()?;
        let tail = after.and_then(|node| self.node(node).tail_with(key));
        tail.and_then(agrees)
            .or_else(|| self.first.find_map(First::hash_of(key), |first| agrees(first.node)))
    }

    /// Whether a worker holds a block.
    pub(super) fn holds(&self, position: Position, holder: HolderId) -> bool {
        self.find(position).is_some_and(|position| {
            let node = self.node(position.node);
            node.holders
                .get(holder, node.len())
                .is_some_and(|(from, to)| (from..to).contains(&position.at))
        })
    }

    /// A worker holds these blocks now, which follow a block or start a prompt. Tells where they
    /// are; fewer than asked for when there is no room for more nodes.
    pub(super) fn hold(
        &mut self,
        parent: Option<Position>,
        keys: &[BlockKey],
        holder: HolderId,
        uses: &UseCounter,
        segments: &mut Vec<Segment>,
    ) {
        let mut keys = keys;
        // The next block is that at this position of this node, or comes after it.
        let mut here = match parent.map(|parent| self.find(parent)) {
            None => None,
            Some(Some(position)) => Some(Position { at: position.at + 1, ..position }),
            Some(None) => return,
        };
        while let Some(key) = keys.first() {
            let len = here.map_or(0, |here| self.node(here.node).len());
            if let Some(position) = here.filter(|here| here.at < len) {
                let agree = self.node(position.node).agrees(position.at, keys);
                if agree > 0 {
                    let Some(segment) = self.hold_piece(position, agree, holder, uses) else {
                        return;
                    };
                    keys = &keys[segment.len as usize..];
                    here = Some(Position {
                        node: segment.position.node,
                        at: segment.position.at + segment.len,
                    });
                    segments.push(segment);
                    continue;
                }
                // It parts within the node.
                if self.split(position).is_none() {
                    return;
                }
            } else if let Some(next) = self.next(here.map(|here| here.node), *key) {
                here = Some(Position { node: next, at: 0 });
                continue;
            }
            let Some(segment) = self.add(here, keys, holder, uses) else { return };
            keys = &keys[segment.len as usize..];
            here = Some(Position {
                node: segment.position.node,
                at: segment.position.at + segment.len,
            });
            segments.push(segment);
        }
    }

    /// A worker holds this block now. Where it is, its key, and whether it did not before.
    pub(super) fn hold_at(
        &mut self,
        position: Position,
        holder: HolderId,
        uses: &UseCounter,
    ) -> Option<(Position, BlockKey, bool)> {
        let position = self.find(position)?;
        let key = self.node(position.node).keys()[position.at as usize];
        let segment = self.hold_piece(position, 1, holder, uses)?;
        Some((segment.position, key, segment.before.0 >= segment.before.1))
    }

    /// Blocks of a node, one at least.
    fn hold_piece(
        &mut self,
        position: Position,
        len: u32,
        holder: HolderId,
        uses: &UseCounter,
    ) -> Option<Segment> {
        let node = self.node(position.node);
        uses.note(&node.used);
        let (from, to) = (position.at, position.at + len);
        match node.holders.get(holder, node.len()) {
            // Two pieces: what comes later goes to the tail.
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

    /// New blocks after a node's last, or at the start: as many as fit into one node.
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
            let keys = &keys[..keys.len().min(MOST_BLOCKS - len as usize)];
            if !keys.is_empty()
                && node.tail().is_none()
                && node.children == 0
                && node.holders.ends_with_only(holder, len)
            {
                let before = node.bytes();
                node.extend(keys);
                let (from, to) =
                    (node.holders.get(holder, len).map_or(0, |(from, _)| from), node.len());
                node.holders = Holders::default();
                node.holders.set(holder, from, to, to);
                uses.note(&node.used);
                self.heap += self.node(position.node).bytes() - before;
                self.blocks += keys.len();
                return Some(Segment { position, len: keys.len() as u32, before: (0, 0) });
            }
        }
        let keys = &keys[..keys.len().min(MOST_BLOCKS)];
        let parent = after.map(|position| Position { at: position.at - 1, ..position });
        let node = Node::new(keys.to_vec(), Holders::one(holder, keys.len() as u32), parent);
        uses.note(&node.used);
        let id = self.new_node(node)?;
        let first = keys[0];
        self.first.entry(First::hash_of(first), |first| first.node == id, || First::new(first, id));
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

    /// A worker holds so many blocks from this one on no more. All are told by the same node,
    /// whatever it has become.
    pub(super) fn release(&mut self, position: Position, blocks: u32, holder: HolderId) {
        let mut left = blocks;
        // From the last one on, so that tails go before what they follow.
        while let Some(last) = left.checked_sub(1) {
            let Some(last) = self.find(Position { at: position.at + last, ..position }) else {
                left -= 1;
                continue;
            };
            let here = left.min(last.at + 1);
            self.release_piece(Position { at: last.at + 1 - here, ..last }, here, holder);
            left -= here;
        }
    }

    /// Releases blocks of one node.
    fn release_piece(&mut self, position: Position, len: u32, holder: HolderId) {
        let node = self.node(position.node);
        let (first, end) = (position.at, position.at + len);
        let Some((from, to)) =
            node.holders.get(holder, node.len()).filter(|(from, to)| *from < end && first < *to)
        else {
            return;
        };
        if first <= from && end < to {
            self.set(position.node, holder, end, to);
        } else {
            // Without room for a tail, what comes after the blocks is forgotten with them.
            if end < to {
                self.split(Position { at: end, ..position });
            }
            self.set(position.node, holder, from, first.max(from));
        }
        self.prune(position.node);
    }

    /// A worker holds nothing any more of the node that a block is in.
    pub(super) fn leave(&mut self, position: Position, holder: HolderId) {
        let Some(Position { node, .. }) = self.find(position) else { return };
        if self.node(node).holders.get(holder, self.node(node).len()).is_some() {
            self.set(node, holder, 0, 0);
            self.prune(node);
        }
    }

    /// Whether there is no room for more nodes.
    fn is_full(&self) -> bool {
        // Two less: a split and an addition.
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

    /// What a worker holds of a node.
    fn set(&mut self, node: NodeId, holder: HolderId, from: u32, to: u32) {
        let node = &mut self.nodes[(node - self.tag) as usize];
        let len = node.len();
        let (bytes, covered) = (node.bytes(), node.holders.covered(len));
        node.holders.set(holder, from, to, len);
        self.heap = self.heap + node.bytes() - bytes;
        self.blocks = self.blocks + node.holders.covered(len) as usize - covered as usize;
    }

    /// What comes from here on, within a node, becomes its tail; `None` if there is no room.
    fn split(&mut self, position: Position) -> Option<()> {
        if self.is_full() {
            return None;
        }
        let node = self.node_mut(position.node);
        let (bytes, len) = (node.bytes(), node.len());
        let (keys, holders) = (node.split_off(position.at), node.holders.split(position.at, len));
        let mut rest =
            Node::new(keys, holders, Some(Position { node: position.node, at: position.at - 1 }));
        rest.set_tail(node.take_tail());
        rest.children = std::mem::take(&mut node.children);
        rest.used = AtomicU32::new(*node.used.get_mut());
        let after = node.bytes();
        self.heap = self.heap + after - bytes;
        let first = rest.keys()[0];
        let tail = self.new_node(rest)?;
        self.node_mut(position.node).set_tail(Some(First::new(first, tail)));
        Some(())
    }

    /// Gives back what nobody holds and nothing comes after.
    fn prune(&mut self, node: NodeId) {
        let mut next = Some(node);
        while let Some(id) = next.take() {
            let node = self.node_mut(id);
            if node.tail().is_some() || node.children > 0 || node.len() == 0 {
                return;
            }
            let (len, bytes) = (node.len(), node.bytes());
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
            let (first, parent) = (node.keys()[0], node.parent());
            *node = Node::default();
            self.heap -= bytes;
            self.free.push(id - self.tag);
            let parent = parent.and_then(|parent| self.find_end(parent));
            if parent.is_some_and(|parent| self.node(parent).tail() == Some(id)) {
                parent.into_iter().for_each(|parent| self.node_mut(parent).set_tail(None));
            } else {
                self.first.remove(First::hash_of(first), |first| first.node == id);
                if let Some(parent) = parent {
                    self.node_mut(parent).children -= 1;
                }
            }
            next = parent;
        }
        // Nothing left at all: no slots either.
        if self.free.len() == self.nodes.len() {
            (self.nodes, self.free) = (Vec::new(), Vec::new());
        }
    }

    fn find_end(&self, position: Position) -> Option<NodeId> {
        self.find(position).map(|position| position.node)
    }
}
