//! Slots: pieces of an arena, each written once with one tensor and read in place.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Weak};

use crate::error::SlotError;
use crate::layout::Handle;
use crate::leases::LeaseId;
use crate::shared::Shared;

/// A slot that is being written. Dropping it frees its memory.
#[derive(Debug)]
pub struct SlotWriter {
    hold: Hold,
}

/// A slot that has been written. Clones share it. Its memory is freed once no clone is left and the
/// engine has returned all leases.
#[derive(Clone)]
pub struct Slot {
    hold: Arc<Hold>,
}

/// A weak reference to a [`Slot`], which does not keep its memory. It can be upgraded while
/// something else, usually a lease of the engine, keeps the slot.
#[derive(Clone, Debug)]
pub struct WeakSlot {
    arena: Weak<Shared>,
    range: Range<u64>,
    serial: u64,
}

/// A lease: one loan of a slot to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The lease as [`Arena::expect_return`](crate::Arena::expect_return) takes it.
    pub id: LeaseId,
    /// The handle that the engine is sent.
    pub handle: Handle,
}

/// The frontend's own hold on a slot, released on drop.
#[derive(Debug)]
struct Hold {
    arena: Arc<Shared>,
    range: Range<u64>,
}

impl Hold {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the range belongs to this slot until `Drop` releases it. It is only written
        // through a `SlotWriter`, which can't be borrowed mutably while this borrow lasts.
        unsafe { self.arena.mapping.slice(self.range.clone()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive: the arena gave the range to one `SlotWriter`, and no
        // other code knows the range before the slot is published.
        unsafe { self.arena.mapping.slice_mut(self.range.clone()) }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.arena.release(self.range.start);
    }
}

impl SlotWriter {
    pub(crate) fn new(arena: Arc<Shared>, range: Range<u64>) -> Self {
        Self { hold: Hold { arena, range } }
    }

    /// Finishes writing and makes the slot readable.
    pub fn publish(self) -> Slot {
        Slot { hold: Arc::new(self.hold) }
    }
}

impl Deref for SlotWriter {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.hold.bytes()
    }
}

impl DerefMut for SlotWriter {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.hold.bytes_mut()
    }
}

impl Slot {
    /// Lends the slot to the engine, for one message.
    ///
    /// # Errors
    /// [`SlotError::NoLease`] if the table of leases is full.
    pub fn lend(&self) -> Result<Lease, SlotError> {
        let (id, handle) = self.hold.arena.lend(&self.hold.range)?;
        Ok(Lease { id, handle })
    }

    /// Creates a weak reference, which does not keep the slot.
    pub fn downgrade(&self) -> WeakSlot {
        let Hold { arena, range } = &*self.hold;
        WeakSlot {
            arena: Arc::downgrade(arena),
            range: range.clone(),
            serial: arena.serial(range.start),
        }
    }

    /// Returns `true` if the slot is a piece of `arena`.
    pub(crate) fn is_in(&self, arena: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.hold.arena, arena)
    }
}

impl WeakSlot {
    /// Returns the slot; `None` if its memory has been freed.
    pub fn upgrade(&self) -> Option<Slot> {
        let arena = self.arena.upgrade()?;
        // The slot is no longer written: only published slots have weak references.
        arena.hold_again(self.range.start, self.serial).then(|| {
            let hold = Hold { arena, range: self.range.clone() };
            Slot { hold: Arc::new(hold) }
        })
    }
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.hold.bytes()
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("range", &self.hold.range).finish_non_exhaustive()
    }
}

/// Slots are equal if their bytes are equal.
impl PartialEq for Slot {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
