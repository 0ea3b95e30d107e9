//! The frontend's side of an engine's shared memory.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::error::SlotError;
use crate::leases::LeaseId;
use crate::shared::{ArenaUsage, Shared};
use crate::shm::SHM_DIR;
use crate::slot::{Slot, SlotWriter};

/// The bytes of an arena per lease. Most tensors are larger.
const BYTES_PER_LEASE: u64 = 64 << 10;
const MIN_LEASES: u64 = 1024;
const MAX_LEASES: u64 = 1 << 20;

/// The shared memory of one start of one engine. Clones share the arena; its memory is freed with
/// the last clone and the last slot.
#[derive(Clone, Debug)]
pub struct Arena {
    shared: Arc<Shared>,
}

impl Arena {
    /// Creates an arena with room for `bytes` bytes of slots. Memory is only reserved when it is
    /// needed.
    pub fn create(bytes: u64) -> io::Result<Self> {
        let leases = (bytes / BYTES_PER_LEASE).clamp(MIN_LEASES, MAX_LEASES) as u32;
        Self::create_in(Path::new(SHM_DIR), bytes, leases)
    }

    pub(crate) fn create_in(dir: &Path, bytes: u64, leases: u32) -> io::Result<Self> {
        Ok(Self { shared: Arc::new(Shared::create(dir, bytes, leases)?) })
    }

    /// Returns the name of the file in [`SHM_DIR`], by which the engine opens the arena.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Removes the arena's name. Call it once the engine has opened the arena or never will.
    pub fn unlink(&self) {
        self.shared.unlink();
    }

    /// Allocates a slot of `bytes` bytes. The slot contains old data, so all of it must be written.
    ///
    /// # Errors
    /// [`SlotError`] if there is no room at present.
    pub fn slot(&self, bytes: usize) -> Result<SlotWriter, SlotError> {
        let range = self.shared.take(bytes as u64)?;
        Ok(SlotWriter::new(self.shared.clone(), range.start..range.start + bytes as u64))
    }

    /// Returns `true` if a slot is a piece of this arena.
    pub fn owns(&self, slot: &Slot) -> bool {
        slot.is_in(&self.shared)
    }

    /// Records that the engine will soon return these leases, for instance when a message to it
    /// makes it drop their slots. They are checked first when room is needed. A slot is not free
    /// before the engine has returned its lease.
    pub fn expect_return(&self, leases: impl IntoIterator<Item = LeaseId>) {
        self.shared.expect_return(leases);
    }

    /// Ends the leases that the engine has returned, and returns the arena's usage.
    pub fn usage(&self) -> ArenaUsage {
        self.shared.usage()
    }
}

#[cfg(test)]
mod tests;
