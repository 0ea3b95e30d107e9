//! An entry of a cache: one hash of its engine.

use super::EngineHash;
use crate::index::radix_tree::{NO_NODE, NodeId, Position};
use crate::index::table::Slot;

/// A hash with the position of its block. Entries take 13 bytes and are most of the index's memory,
/// so they are packed: fields must be copied and never borrowed.
#[derive(Clone, Copy)]
#[repr(Rust, packed)]
pub(super) struct Entry {
    pub(super) hash: EngineHash,
    /// The node of the block or [`UNKEYED`], with the bit [`SEVERAL`].
    node: NodeId,
    at: u8,
}

/// The node of an entry without a key.
pub(super) const UNKEYED: NodeId = NO_NODE - 1;

/// The bit of entries with several copies.
const SEVERAL: NodeId = 1 << 31;

impl Slot for Entry {
    const FREE: Self = Self { hash: EngineHash::MAX, node: NO_NODE, at: 0 };

    fn is_free(&self) -> bool {
        self.node == NO_NODE
    }

    /// Returns the engine's hash, which is mixed and therefore uniform.
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
        self.node = node | (self.node & SEVERAL);
        // Nodes have at most 256 blocks.
        self.at = at as u8;
    }

    pub(super) fn has_several(&self) -> bool {
        self.node & SEVERAL != 0
    }

    pub(super) fn set_several(&mut self, several: bool) {
        self.node = (self.node & !SEVERAL) | if several { SEVERAL } else { 0 };
    }
}
