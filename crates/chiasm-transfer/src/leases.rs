//! The owner's side of the table of leases: which entries are lent, and which of them the engine
//! has returned.

use std::sync::atomic::Ordering;

use crate::layout::{Handle, Header, lease, state};
use crate::mapping::Mapping;

/// One sending of a slot to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseId {
    index: u32,
    generation: u32,
}

/// All leases of an arena.
#[derive(Debug)]
pub(crate) struct Leases {
    header: Header,
    /// One entry for each lease that was ever used.
    entries: Vec<Entry>,
    free: Vec<u32>,
    lent: usize,
    /// Leases that the engine is known to return soon.
    expected: Vec<LeaseId>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    generation: u32,
    /// Start of the slot that is lent.
    slot: Option<u64>,
}

impl Leases {
    pub(crate) fn new(header: Header) -> Self {
        Self { header, entries: Vec::new(), free: Vec::new(), lent: 0, expected: Vec::new() }
    }

    /// Number of leases that the engine has not returned, as far as was looked.
    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    /// Lends a slot. `None` when the table is full.
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
        let at = self.header.lease_at(index)?;
        let entry = &mut self.entries[index as usize];
        // Never 0: an engine that has returned nothing says 0.
        let generation = entry.generation.checked_add(1).unwrap_or(1);
        *entry = Entry { generation, slot: Some(offset) };
        mapping.u32_at(at + lease::GENERATION).store(generation, Ordering::Relaxed);
        mapping.u64_at(at + lease::OFFSET).store(offset, Ordering::Relaxed);
        mapping.u64_at(at + lease::LENGTH).store(length, Ordering::Relaxed);
        // The engine learns of the lease by a message that is sent after this.
        mapping.u32_at(at + lease::STATE).store(state::LENT, Ordering::Release);
        self.lent += 1;
        let handle = Handle { arena: self.header.number, lease: index, generation, offset, length };
        Some((LeaseId { index, generation }, handle))
    }

    /// Takes note that the engine will return these leases soon, so that they are looked at first.
    pub(crate) fn expect(&mut self, leases: impl IntoIterator<Item = LeaseId>) {
        self.expected.extend(leases);
    }

    /// Ends those of the expected leases that were returned; the starts of their slots, once for
    /// each lease.
    pub(crate) fn end_expected(&mut self, mapping: &Mapping) -> Vec<u64> {
        let expected = std::mem::take(&mut self.expected);
        let mut slots = Vec::new();
        for id in expected {
            match self.end_if_returned(mapping, id.index, Some(id.generation)) {
                Returned::Yes(slot) => slots.push(slot),
                Returned::NotYet => self.expected.push(id),
                Returned::Before => {}
            }
        }
        slots
    }

    /// Ends all leases that were returned, expected or not.
    pub(crate) fn end_all(&mut self, mapping: &Mapping) -> Vec<u64> {
        let mut slots = Vec::new();
        for index in 0..self.entries.len() as u32 {
            if let Returned::Yes(slot) = self.end_if_returned(mapping, index, None) {
                slots.push(slot);
            }
        }
        slots
    }

    fn end_if_returned(
        &mut self,
        mapping: &Mapping,
        index: u32,
        generation: Option<u32>,
    ) -> Returned {
        let entry = &mut self.entries[index as usize];
        let Some(slot) = entry.slot else { return Returned::Before };
        if generation.is_some_and(|generation| generation != entry.generation) {
            return Returned::Before;
        }
        let Some(at) = self.header.lease_at(index) else { return Returned::Before };
        // The engine's last read of the slot comes before its store.
        if mapping.u32_at(at + lease::RETURNED).load(Ordering::Acquire) != entry.generation {
            return Returned::NotYet;
        }
        mapping.u32_at(at + lease::STATE).store(state::TAKEN_BACK, Ordering::Relaxed);
        entry.slot = None;
        self.free.push(index);
        self.lent -= 1;
        Returned::Yes(slot)
    }
}

enum Returned {
    /// Now: the start of its slot.
    Yes(u64),
    NotYet,
    /// It has ended before.
    Before,
}
