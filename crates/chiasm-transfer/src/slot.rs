//! A piece of an arena that one tensor is written into once and read from in place.

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Weak};

use crate::error::NoSlot;
use crate::layout::Handle;
use crate::leases::LeaseId;
use crate::shared::Shared;

/// A slot that is being written. Dropping it gives the room back.
#[derive(Debug)]
pub struct SlotWriter {
    held: Held,
}

/// A slot that has been written. Clones are the same slot. Its room is given back once no clone is
/// left and the engine has returned all its leases.
#[derive(Clone)]
pub struct Slot {
    held: Arc<Held>,
}

/// A way back to a [`Slot`] as long as somebody else, mostly the engine, has use for it. It keeps
/// no room.
#[derive(Clone, Debug)]
pub struct WeakSlot {
    arena: Weak<Shared>,
    range: Range<u64>,
    serial: u64,
}

/// A slot that was lent to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The lease as [`Arena::expect_return`](crate::Arena::expect_return) takes it.
    pub id: LeaseId,
    /// The handle that the engine is sent.
    pub handle: Handle,
}

/// The frontend's own hold on a slot.
#[derive(Debug)]
struct Held {
    arena: Arc<Shared>,
    range: Range<u64>,
}

impl Held {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the range is this slot's until it is released, which `Drop` does. It is written
        // to only through a `SlotWriter`, which can't be borrowed for that while this borrow lasts.
        unsafe { self.arena.mapping.slice(self.range.clone()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut`: the arena gave the range to one `SlotWriter`, and nobody
        // has been told of it before it is published.
        unsafe { self.arena.mapping.slice_mut(self.range.clone()) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.arena.release(self.range.start);
    }
}

impl SlotWriter {
    pub(crate) fn new(arena: Arc<Shared>, range: Range<u64>) -> Self {
        Self { held: Held { arena, range } }
    }

    /// Ends the writing.
    pub fn publish(self) -> Slot {
        Slot { held: Arc::new(self.held) }
    }
}

impl Deref for SlotWriter {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.held.bytes()
    }
}

impl DerefMut for SlotWriter {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.held.bytes_mut()
    }
}

impl Slot {
    /// Lends the slot to the engine for one sending.
    ///
    /// # Errors
    /// [`NoSlot::NoLease`] when the table of leases is full.
    pub fn lend(&self) -> Result<Lease, NoSlot> {
        let (id, handle) = self.held.arena.lend(&self.held.range)?;
        Ok(Lease { id, handle })
    }

    /// Makes a way back to this slot that does not keep it.
    pub fn downgrade(&self) -> WeakSlot {
        let Held { arena, range } = &*self.held;
        WeakSlot {
            arena: Arc::downgrade(arena),
            range: range.clone(),
            serial: arena.serial(range.start),
        }
    }

    pub(crate) fn is_in(&self, arena: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.held.arena, arena)
    }
}

impl WeakSlot {
    /// The slot, if nobody else has its room by now.
    pub fn upgrade(&self) -> Option<Slot> {
        let arena = self.arena.upgrade()?;
        // Nobody writes to it any more: it was published before there was a way back to it.
        arena.hold_again(self.range.start, self.serial).then(|| {
            let held = Held { arena, range: self.range.clone() };
            Slot { held: Arc::new(held) }
        })
    }
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.held.bytes()
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("range", &self.held.range).finish_non_exhaustive()
    }
}

/// Slots are equal when their bytes are.
impl PartialEq for Slot {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
