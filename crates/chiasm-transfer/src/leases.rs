//! The owner's side of the table of leases: lending slots, and ending leases that were returned.

use std::sync::atomic::Ordering;

use crate::layout::{Handle, Header, lease, state};
use crate::mapping::Mapping;

/// The identity of a lease: one loan of a slot to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseId {
    index: u32,
    generation: u32,
}

/// The leases of an arena.
#[derive(Debug)]
pub(crate) struct Leases {
    header: Header,
    /// The entries of the table that were ever used.
    entries: Vec<Entry>,
    free: Vec<u32>,
    lent: usize,
    /// The leases that the engine should return soon.
    expected: Vec<LeaseId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    generation: u32,
    /// The start of the lent slot.
    slot: Option<u64>,
}

impl Leases {
    pub(crate) fn new(header: Header) -> Self {
        Self { header, entries: Vec::new(), free: Vec::new(), lent: 0, expected: Vec::new() }
    }

    /// Returns the number of leases that have not ended.
    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    /// Lends a slot. Returns `None` if the table is full.
    pub(crate) fn lend(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        length: u64,
    ) -> Option<(LeaseId, Handle)> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let next = u32::try_from(self.entries.len())
                    .ok()
                    .filter(|&next| next < self.header.leases)?;
                self.entries.push(Entry::default());
                next
            }
        };
        let at = self.header.entry_offset(index)?;
        let entry = &mut self.entries[index as usize];
        // Never 0, which is the initial value of the field `RETURNED`.
        let generation = entry.generation.checked_add(1).unwrap_or(1);
        *entry = Entry { generation, slot: Some(offset) };
        mapping.u32_at(at + lease::GENERATION).store(generation, Ordering::Relaxed);
        mapping.u64_at(at + lease::OFFSET).store(offset, Ordering::Relaxed);
        mapping.u64_at(at + lease::LENGTH).store(length, Ordering::Relaxed);
        // The message that contains the handle is sent after this store.
        mapping.u32_at(at + lease::STATE).store(state::LENT, Ordering::Release);
        self.lent += 1;
        let handle = Handle { arena: self.header.number, lease: index, generation, offset, length };
        Some((LeaseId { index, generation }, handle))
    }

    /// Records that the engine will return these leases soon, so that they are checked first.
    pub(crate) fn expect(&mut self, leases: impl IntoIterator<Item = LeaseId>) {
        self.expected.extend(leases);
    }

    /// Ends the expected leases that were returned. Returns the starts of their slots, one per
    /// lease.
    pub(crate) fn end_expected(&mut self, mapping: &Mapping) -> Vec<u64> {
        let expected = std::mem::take(&mut self.expected);
        let mut slots = Vec::new();
        for id in expected {
            match self.end_if_returned(mapping, id.index, Some(id.generation)) {
                LeaseState::Ended(slot) => slots.push(slot),
                LeaseState::Lent => self.expected.push(id),
                LeaseState::AlreadyEnded => {}
            }
        }
        slots
    }

    /// Ends all leases that were returned, expected or not. Returns the starts of their slots, one
    /// per lease.
    pub(crate) fn end_all(&mut self, mapping: &Mapping) -> Vec<u64> {
        let mut slots = Vec::new();
        for index in 0..self.entries.len() as u32 {
            if let LeaseState::Ended(slot) = self.end_if_returned(mapping, index, None) {
                slots.push(slot);
            }
        }
        slots
    }

    /// Ends a lease if it was returned. With a `generation`, only a lease of that generation.
    fn end_if_returned(
        &mut self,
        mapping: &Mapping,
        index: u32,
        generation: Option<u32>,
    ) -> LeaseState {
        let entry = &mut self.entries[index as usize];
        let Some(slot) = entry.slot else { return LeaseState::AlreadyEnded };
        if generation.is_some_and(|generation| generation != entry.generation) {
            return LeaseState::AlreadyEnded;
        }
        let Some(at) = self.header.entry_offset(index) else { return LeaseState::AlreadyEnded };
        // Acquire ordering: the engine's last read of the slot comes before its store.
        if mapping.u32_at(at + lease::RETURNED).load(Ordering::Acquire) != entry.generation {
            return LeaseState::Lent;
        }
        mapping.u32_at(at + lease::STATE).store(state::ENDED, Ordering::Relaxed);
        entry.slot = None;
        self.free.push(index);
        self.lent -= 1;
        LeaseState::Ended(slot)
    }
}

enum LeaseState {
    /// The lease has ended now. Contains the start of its slot.
    Ended(u64),
    /// The engine has not returned the lease.
    Lent,
    /// The lease had already ended.
    AlreadyEnded,
}
