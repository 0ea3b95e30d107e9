//! The frontend's side of an engine's shared memory.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::error::NoSlot;
use crate::leases::LeaseId;
use crate::shared::{ArenaUsage, Shared};
use crate::shm::SHM_DIR;
use crate::slot::{Slot, SlotWriter};

/// Arenas have one lease for so many bytes: most tensors are larger.
const BYTES_PER_LEASE: u64 = 64 << 10;
const MIN_LEASES: u64 = 1024;
const MAX_LEASES: u64 = 1 << 20;

/// The shared memory of one start of one engine. Clones are the same arena; its memory is given
/// back with the last of them and of its slots.
#[derive(Clone, Debug)]
pub struct Arena {
    shared: Arc<Shared>,
}

impl Arena {
    /// Makes an arena that can hold `bytes` of slots. They are not taken from the system before
    /// they are needed.
    pub fn create(bytes: u64) -> io::Result<Self> {
        let leases = (bytes / BYTES_PER_LEASE).clamp(MIN_LEASES, MAX_LEASES) as u32;
        Self::create_in(Path::new(SHM_DIR), bytes, leases)
    }

    pub(crate) fn create_in(dir: &Path, bytes: u64, leases: u32) -> io::Result<Self> {
        Ok(Self { shared: Arc::new(Shared::create(dir, bytes, leases)?) })
    }

    /// Its file name in [`SHM_DIR`], which the engine is told.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Removes the arena's name, once the engine has opened it or never will.
    pub fn unlink(&self) {
        self.shared.unlink();
    }

    /// Takes room for a tensor of so many bytes. It still has what was in it before: write all of
    /// it.
    ///
    /// # Errors
    /// [`NoSlot`] says why there is none now.
    pub fn slot(&self, bytes: usize) -> Result<SlotWriter, NoSlot> {
        let range = self.shared.take(bytes as u64)?;
        Ok(SlotWriter::new(self.shared.clone(), range.start..range.start + bytes as u64))
    }

    /// Whether a slot is a piece of this arena.
    pub fn owns(&self, slot: &Slot) -> bool {
        slot.is_in(&self.shared)
    }

    /// Takes note that the engine has let go of these leases, or will with what it was just sent.
    /// They are looked at first when room is needed; the slots are free once the engine has
    /// returned them, not before.
    pub fn expect_return(&self, leases: impl IntoIterator<Item = LeaseId>) {
        self.shared.expect_return(leases);
    }

    /// Looks at what the engine has returned, and says what the arena is used for.
    pub fn usage(&self) -> ArenaUsage {
        self.shared.usage()
    }
}

#[cfg(test)]
mod tests;
