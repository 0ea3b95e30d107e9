//! The state that an arena and its slots share: the mapping, the free memory and the holders of
//! slots.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::error::SlotError;
use crate::layout::{self, Handle, Header, LINE_BYTES, PAGE_BYTES};
use crate::leases::{LeaseId, Leases};
use crate::mapping::Mapping;
use crate::owner::Owner;
use crate::ranges::Ranges;
use crate::segment;

/// The size of the steps in which memory is reserved, about the size of one large image.
pub(crate) const GROWTH_BYTES: u64 = 32 << 20;
/// The maximum size of an arena: far beyond the memory of any machine, and well within the range of
/// addresses and file lengths.
const MAX_BYTES: u64 = (1 << 46) - PAGE_BYTES;

/// The shared state of [`Arena`](crate::Arena)s and slots.
#[derive(Debug)]
pub(crate) struct Shared {
    path: PathBuf,
    pub(crate) name: String,
    unlinked: AtomicBool,
    pub(crate) header: Header,
    pub(crate) mapping: Mapping,
    /// The open file, whose lock shows that the owner is alive.
    file: File,
    state: Mutex<State>,
    /// Notified at the end of each reservation.
    grown: Condvar,
}

/// The usage of an arena's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaUsage {
    /// The maximum total size of slots in bytes.
    pub capacity: u64,
    /// The bytes of the capacity that are reserved in the system's memory.
    pub reserved: u64,
    /// The bytes of the capacity that slots use.
    pub used: u64,
    /// The number of slots.
    pub slots: usize,
    /// The number of leases that the engine has not returned.
    pub leases: usize,
}

#[derive(Debug)]
struct State {
    free: Ranges,
    /// The ranges that are not reserved yet.
    unreserved: Ranges,
    /// The number of reservations in progress.
    growing: usize,
    /// `true` once a reservation ahead of need has failed. Then memory is only reserved when it is
    /// needed.
    exhausted: bool,
    reserved: u64,
    used: u64,
    /// The slots in use, by their starts.
    slots: HashMap<u64, Holders>,
    /// The number of slots that were ever allocated.
    serial: u64,
    leases: Leases,
}

/// A range of memory to reserve for a slot.
#[derive(Debug)]
struct Growth {
    range: Range<u64>,
    /// The end of the part that the slot needs; the rest is reserved ahead.
    needed_end: u64,
}

/// The holders of a slot.
#[derive(Debug)]
struct Holders {
    end: u64,
    /// The number of holders: leases that have not ended, a [`SlotWriter`](crate::SlotWriter) or a
    /// [`Slot`](crate::Slot) with its clones, and each upgrade of a [`WeakSlot`](crate::WeakSlot).
    count: usize,
    /// The slot's number among all slots that were ever allocated.
    serial: u64,
}

impl Shared {
    /// Creates an arena in `dir` with `bytes` bytes of slots and `leases` leases.
    pub(crate) fn create(dir: &Path, bytes: u64, leases: u32) -> io::Result<Self> {
        let too_large = || {
            let reason = format!("{bytes} bytes exceed the maximum size of an arena, {MAX_BYTES}");
            io::Error::new(io::ErrorKind::InvalidInput, reason)
        };
        let whole_pages = bytes.max(PAGE_BYTES).checked_next_multiple_of(PAGE_BYTES);
        let bytes = whole_pages.filter(|&bytes| bytes <= MAX_BYTES).ok_or_else(too_large)?;
        let owner = Owner::this();
        let number = rand::random();
        let header = Header::new(leases, bytes, owner.pid, owner.start, number);
        let name = segment::name(owner, number);
        let (file, mapping) = segment::create(dir, &name, &header)?;
        let state = State {
            free: Ranges::default(),
            unreserved: Ranges::new(header.slots..header.length),
            growing: 0,
            exhausted: false,
            reserved: 0,
            used: 0,
            slots: HashMap::new(),
            serial: 0,
            leases: Leases::new(header),
        };
        Ok(Self {
            path: dir.join(&name),
            name,
            unlinked: AtomicBool::new(false),
            header,
            mapping,
            file,
            state: Mutex::new(state),
            grown: Condvar::new(),
        })
    }

    /// Records that the engine will soon return these leases.
    pub(crate) fn expect_return(&self, leases: impl IntoIterator<Item = LeaseId>) {
        self.state().leases.expect(leases);
    }

    /// Ends the leases that the engine has returned, and returns the arena's usage.
    pub(crate) fn usage(&self) -> ArenaUsage {
        let mut state = self.state();
        state.end_leases(|leases| leases.end_all(&self.mapping));
        ArenaUsage {
            capacity: self.capacity(),
            reserved: state.reserved,
            used: state.used,
            slots: state.slots.len(),
            leases: state.leases.lent(),
        }
    }

    fn capacity(&self) -> u64 {
        self.header.length - self.header.slots
    }

    /// Locks the state. A panic never leaves it half-changed, so poisoning is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates whole cache lines for a slot, with one holder.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Result<Range<u64>, SlotError> {
        let capacity = self.capacity();
        if bytes > capacity {
            return Err(SlotError::TooLarge { bytes: bytes as usize, capacity });
        }
        let length = bytes.max(1).next_multiple_of(LINE_BYTES);
        let alignment = layout::alignment(bytes);
        let mut state = self.state();
        state.end_leases(|leases| leases.end_expected(&self.mapping));
        loop {
            if let Some(range) = state.take(length, alignment) {
                self.grow_ahead(&mut state);
                return Ok(range);
            }
            state.end_leases(|leases| leases.end_all(&self.mapping));
            if let Some(range) = state.take(length, alignment) {
                self.grow_ahead(&mut state);
                return Ok(range);
            }
            match state.growth(length, alignment) {
                Some(growth) => state = self.grow(state, growth)?,
                // Memory that is being reserved for other slots may have room for this one, too.
                None if state.growing > 0 => {
                    state = self.grown.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                None => return Err(SlotError::Full),
            }
            // Fails if another slot has taken the adjacent free memory in the meantime.
            if let Some(range) = state.take(length, alignment) {
                return Ok(range);
            }
        }
    }

    /// Reserves the range of a growth and adds it to the free memory. A reservation takes
    /// milliseconds, so the state is unlocked in the meantime.
    fn grow<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        growth: Growth,
    ) -> Result<MutexGuard<'a, State>, SlotError> {
        let Growth { mut range, needed_end } = growth;
        state.growing += 1;
        drop(state);
        let mut reserved = self.reserve(range.clone());
        if reserved.is_err() && needed_end < range.end {
            // A file system with less room than a step may still have room for the needed part.
            self.state().unreserved.insert(needed_end..range.end);
            range.end = needed_end;
            reserved = self.reserve(range.clone());
        }
        let mut state = self.state();
        self.end_growth(&mut state, range, reserved.is_ok());
        reserved.map_err(SlotError::NoMemory)?;
        Ok(state)
    }

    /// Reserves the next step in the background once the last one is half used. Zeroing pages takes
    /// longer than writing them, so requests should not wait for it.
    fn grow_ahead(self: &Arc<Self>, state: &mut State) {
        let free = state.reserved - state.used;
        if free >= GROWTH_BYTES / 2 || state.growing > 0 || state.exhausted {
            return;
        }
        let Some(growth) = state.step() else { return };
        state.growing += 1;
        let shared = self.clone();
        let range = growth.clone();
        let work = move || {
            let reserved = shared.reserve(range.clone());
            let mut state = shared.state();
            shared.end_growth(&mut state, range, reserved.is_ok());
            state.exhausted |= reserved.is_err();
        };
        if thread::Builder::new().name("arena-growth".to_owned()).spawn(work).is_err() {
            self.end_growth(state, growth, false);
        }
    }

    /// Reserves memory of the system.
    fn reserve(&self, range: Range<u64>) -> io::Result<()> {
        segment::reserve(&self.file, range.start, range.end - range.start)?;
        self.mapping.populate(range);
        Ok(())
    }

    /// Adds a range to the free memory, or back to the unreserved ranges if its reservation failed.
    fn end_growth(&self, state: &mut State, range: Range<u64>, reserved: bool) {
        state.growing -= 1;
        self.grown.notify_all();
        if reserved {
            state.reserved += range.end - range.start;
            state.free.insert(range);
        } else {
            state.unreserved.insert(range);
        }
    }

    /// Lends a slot, which must have a holder.
    pub(crate) fn lend(&self, range: &Range<u64>) -> Result<(LeaseId, Handle), SlotError> {
        let mut state = self.state();
        let length = range.end - range.start;
        let mut lent = state.leases.lend(&self.mapping, range.start, length);
        if lent.is_none() {
            state.end_leases(|leases| leases.end_all(&self.mapping));
            lent = state.leases.lend(&self.mapping, range.start, length);
        }
        let lent = lent.ok_or(SlotError::NoLease)?;
        if let Some(holders) = state.slots.get_mut(&range.start) {
            holders.count += 1;
        }
        Ok(lent)
    }

    /// Returns the serial number of the slot that begins at `start`, which must have a holder.
    /// Slots are numbered in the order of their allocation.
    pub(crate) fn serial(&self, start: u64) -> u64 {
        self.state().slots.get(&start).map_or(0, |holders| holders.serial)
    }

    /// Adds a holder to a slot if the slot still has this serial number. Returns `true` on success.
    pub(crate) fn hold_again(&self, start: u64, serial: u64) -> bool {
        match self.state().slots.get_mut(&start) {
            Some(holders) if holders.serial == serial => {
                holders.count += 1;
                true
            }
            _ => false,
        }
    }

    /// Removes a holder of a slot, which frees it if it was the last one.
    pub(crate) fn release(&self, start: u64) {
        self.state().release(start);
    }

    /// Removes the file's name, once.
    pub(crate) fn unlink(&self) {
        if self.unlinked.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(name = self.name, %error, "the arena's name was gone already");
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.unlink();
    }
}

impl State {
    /// Allocates a slot from the free memory, with one holder.
    fn take(&mut self, length: u64, alignment: u64) -> Option<Range<u64>> {
        let range = self.free.take(length, alignment)?;
        self.hold(range.clone());
        Some(range)
    }

    fn hold(&mut self, range: Range<u64>) {
        self.used += range.end - range.start;
        self.serial += 1;
        self.slots.insert(range.start, Holders { end: range.end, count: 1, serial: self.serial });
    }

    /// Takes the next range to reserve ahead of need.
    fn step(&mut self) -> Option<Range<u64>> {
        let step = GROWTH_BYTES.min(self.unreserved.longest());
        if step == 0 {
            return None;
        }
        self.unreserved.take(step, PAGE_BYTES)
    }

    /// Takes the range to reserve next for a slot. Adjacent free memory on both sides counts as
    /// room for the slot. If the room spans several unreserved ranges, the slot needs several
    /// growths.
    fn growth(&mut self, length: u64, alignment: u64) -> Option<Growth> {
        let growth = self.unreserved.iter().find_map(|unreserved| {
            let room = self.unused_around(&unreserved);
            let slot = room.start.next_multiple_of(alignment);
            let end = slot + length;
            if end > room.end || end <= unreserved.start {
                return None;
            }
            let needed_end = end.next_multiple_of(PAGE_BYTES).min(unreserved.end);
            let step_end = (unreserved.start + GROWTH_BYTES).min(unreserved.end);
            Some(Growth { range: unreserved.start..needed_end.max(step_end), needed_end })
        })?;
        self.unreserved.remove(&growth.range);
        Some(growth)
    }

    /// Returns the longest range around `unreserved` that is neither in use nor being reserved.
    fn unused_around(&self, unreserved: &Range<u64>) -> Range<u64> {
        let mut room = unreserved.clone();
        let before = |at| self.free.ending_at(at).or_else(|| self.unreserved.ending_at(at));
        while let Some(range) = before(room.start) {
            room.start = range.start;
        }
        let after = |at| self.free.starting_at(at).or_else(|| self.unreserved.starting_at(at));
        while let Some(range) = after(room.end) {
            room.end = range.end;
        }
        room
    }

    /// Calls `end`, which ends leases, and releases their slots.
    fn end_leases(&mut self, end: impl FnOnce(&mut Leases) -> Vec<u64>) {
        for slot in end(&mut self.leases) {
            self.release(slot);
        }
    }

    fn release(&mut self, start: u64) {
        let Some(holders) = self.slots.get_mut(&start) else { return };
        holders.count -= 1;
        if holders.count == 0 {
            let range = start..holders.end;
            self.slots.remove(&start);
            self.used -= range.end - range.start;
            self.free.insert(range);
        }
    }
}

#[cfg(test)]
mod growth_tests;
