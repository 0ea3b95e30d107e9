//! What a cache knows of one hash of its engine.

use super::EngineHash;
use crate::index::radix_tree::{NONE, NodeId, Position};
use crate::index::table::Slot;

/// 13 bytes, one after the other: most of what the index takes. Fields are copied, never borrowed.
#[derive(Clone, Copy)]
#[repr(Rust, packed)]
pub(super) struct Entry {
    pub(super) hash: EngineHash,
    /// [`UNKEYED`], or where the block is, and [`SEVERAL`].
    node: NodeId,
    at: u8,
}

/// Stands for a node where a block's key is unknown.
pub(super) const UNKEYED: NodeId = NONE - 1;

/// There are several copies.
const SEVERAL: NodeId = 1 << 31;

impl Slot for Entry {
    const FREE: Self = Self { hash: EngineHash::MAX, node: NONE, at: 0 };

    fn is_free(&self) -> bool {
        self.node == NONE
    }

    /// They are uniform.
    fn hash(&self) -> u64 {
        self.hash
    }
}

impl Entry {
    pub(super) fn new(hash: EngineHash, position: Option<Position>) -> Self {
        let mut entry = Self { hash, node: UNKEYED, at: 0 };
        entry.set_position(position);
        entry
    }

    pub(super) fn position(&self) -> Option<Position> {
        let node = self.node & !SEVERAL;
        (node != UNKEYED).then_some(Position { node, at: self.at.into() })
    }

    pub(super) fn set_position(&mut self, position: Option<Position>) {
        let Position { node, at } = position.unwrap_or(Position { node: UNKEYED, at: 0 });
        // Nodes have no more blocks than this has numbers.
        (self.node, self.at) = (node | (self.node & SEVERAL), at as u8);
    }

    pub(super) fn has_several(&self) -> bool {
        self.node & SEVERAL != 0
    }

    pub(super) fn set_several(&mut self, several: bool) {
        self.node = (self.node & !SEVERAL) | if several { SEVERAL } else { 0 };
    }
}
