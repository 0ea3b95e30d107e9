//! What a worker's table has of one hash of its engine.

use super::Name;
use crate::index::table::Slot;
use crate::index::tree::{NONE, RunId, Spot};

/// 13 bytes, one after the other: most of what the index takes. Fields are copied, never borrowed.
#[derive(Clone, Copy)]
#[repr(Rust, packed)]
pub(super) struct Entry {
    pub(super) name: Name,
    /// [`UNKEYED`], or where the block is, and [`SEVERAL`].
    run: RunId,
    at: u8,
}

/// Stands for a run where a block's key is unknown.
pub(super) const UNKEYED: RunId = NONE - 1;

/// There are several copies.
const SEVERAL: RunId = 1 << 31;

impl Slot for Entry {
    const FREE: Self = Self { name: Name::MAX, run: NONE, at: 0 };

    fn is_free(&self) -> bool {
        self.run == NONE
    }

    /// Names are uniform.
    fn hash(&self) -> u64 {
        self.name
    }
}

impl Entry {
    pub(super) fn new(name: Name, spot: Option<Spot>) -> Self {
        let mut entry = Self { name, run: UNKEYED, at: 0 };
        entry.set_spot(spot);
        entry
    }

    pub(super) fn spot(&self) -> Option<Spot> {
        let run = self.run & !SEVERAL;
        (run != UNKEYED).then_some(Spot { run, at: self.at.into() })
    }

    pub(super) fn set_spot(&mut self, spot: Option<Spot>) {
        let Spot { run, at } = spot.unwrap_or(Spot { run: UNKEYED, at: 0 });
        // Runs have no more blocks than this has numbers.
        (self.run, self.at) = (run | (self.run & SEVERAL), at as u8);
    }

    pub(super) fn has_several(&self) -> bool {
        self.run & SEVERAL != 0
    }

    pub(super) fn set_several(&mut self, several: bool) {
        self.run = (self.run & !SEVERAL) | if several { SEVERAL } else { 0 };
    }
}
