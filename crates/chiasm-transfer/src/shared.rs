//! The memory that an arena and its slots share, and who holds which part of it.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::error::NoSlot;
use crate::layout::{self, Handle, Header, LINE, PAGE};
use crate::leases::{LeaseId, Leases};
use crate::mapping::Mapping;
use crate::owner::Owner;
use crate::ranges::Ranges;
use crate::segment;

/// Memory is reserved in steps of this size: about as much as one large image needs.
pub(crate) const GROWTH: u64 = 32 << 20;
/// Far beyond any machine, and well within what addresses and lengths of files can say.
const MAX_BYTES: u64 = (1 << 46) - PAGE;

/// What [`Arena`](crate::Arena)s and slots share.
#[derive(Debug)]
pub(crate) struct Shared {
    path: PathBuf,
    pub(crate) name: String,
    unlinked: AtomicBool,
    pub(crate) header: Header,
    pub(crate) mapping: Mapping,
    /// Open, because its lock says that the owner lives.
    file: File,
    state: Mutex<State>,
    /// Signalled when a reservation has ended.
    grown: Condvar,
}

/// What an arena's memory is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaUsage {
    /// Bytes that slots can have at most.
    pub capacity: u64,
    /// Bytes of the capacity that have been taken from the system.
    pub reserved: u64,
    /// Bytes of the capacity that slots have.
    pub used: u64,
    /// Number of slots.
    pub slots: usize,
    /// Number of leases that the engine has not returned.
    pub leases: usize,
}

#[derive(Debug)]
struct State {
    free: Ranges,
    /// Ranges that are not reserved yet.
    ungrown: Ranges,
    /// Number of reservations under way.
    growing: usize,
    /// Whether there was no memory for a reservation that nobody had asked for yet: then nothing is
    /// reserved ahead any more.
    exhausted: bool,
    reserved: u64,
    used: u64,
    /// Slots that somebody needs, by where they begin.
    slots: HashMap<u64, Holders>,
    /// Number of slots that were ever taken.
    serial: u64,
    leases: Leases,
}

/// Memory to reserve for a slot.
#[derive(Debug)]
struct Growth {
    range: Range<u64>,
    /// The end of the part that the slot needs; the rest is reserved ahead.
    needed_end: u64,
}

/// Who needs a slot's bytes.
#[derive(Debug)]
struct Holders {
    end: u64,
    /// Leases that have not ended, and one for the frontend itself as long as it has a
    /// [`SlotWriter`](crate::SlotWriter) or [`Slot`](crate::Slot), or one for each time that it
    /// came back to it.
    count: usize,
    /// The slot's number among all that ever began at this place.
    serial: u64,
}

impl Shared {
    /// Makes a file in `dir` for `bytes` of slots with so many leases.
    pub(crate) fn create(dir: &Path, bytes: u64, leases: u32) -> io::Result<Self> {
        let too_large = || {
            let reason = format!("{bytes} bytes are more than an arena can have, {MAX_BYTES}");
            io::Error::new(io::ErrorKind::InvalidInput, reason)
        };
        let paged =
            bytes.max(PAGE).checked_next_multiple_of(PAGE).filter(|&paged| paged <= MAX_BYTES);
        let bytes = paged.ok_or_else(too_large)?;
        let (owner, number) = (Owner::this(), rand::random());
        let header = Header::new(leases, bytes, owner.pid, owner.start, number);
        let name = segment::name(owner, number);
        let (file, mapping) = segment::create(dir, &name, &header)?;
        let state = State {
            free: Ranges::default(),
            ungrown: Ranges::new(header.slots..header.length),
            growing: 0,
            exhausted: false,
            reserved: 0,
            used: 0,
            slots: HashMap::new(),
            serial: 0,
            leases: Leases::new(header),
        };
        let (path, unlinked) = (dir.join(&name), AtomicBool::new(false));
        let (state, grown) = (Mutex::new(state), Condvar::new());
        Ok(Self { path, name, unlinked, header, mapping, file, state, grown })
    }

    /// Takes note that the engine has let go of these leases, or will.
    pub(crate) fn expect_return(&self, leases: impl IntoIterator<Item = LeaseId>) {
        self.state().leases.expect(leases);
    }

    /// Looks at what the engine has returned, and says what the arena is used for.
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

    /// The state is never left half-changed, so a panic elsewhere does not make it unusable.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes whole lines for one slot, with one holder.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Result<Range<u64>, NoSlot> {
        let capacity = self.capacity();
        if bytes > capacity {
            return Err(NoSlot::TooLarge { bytes: bytes as usize, capacity });
        }
        let (length, alignment) = (bytes.max(1).next_multiple_of(LINE), layout::alignment(bytes));
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
                // Memory that is being reserved for others may have room for this slot, too.
                None if state.growing > 0 => {
                    state = self.grown.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                None => return Err(NoSlot::Full),
            }
            // Fails if another slot has meanwhile taken the free memory beside the growth.
            if let Some(range) = state.take(length, alignment) {
                return Ok(range);
            }
        }
    }

    /// Reserves a growth and adds it to the free memory. The state is unlocked meanwhile, as a
    /// reservation takes milliseconds.
    fn grow<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        growth: Growth,
    ) -> Result<MutexGuard<'a, State>, NoSlot> {
        let Growth { mut range, needed_end } = growth;
        state.growing += 1;
        drop(state);
        let mut reserved = self.reserve(range.clone());
        if reserved.is_err() && needed_end < range.end {
            // A file system with less than a step left may still have room for what is needed.
            self.state().ungrown.insert(needed_end..range.end);
            range.end = needed_end;
            reserved = self.reserve(range.clone());
        }
        let mut state = self.state();
        self.end_growth(&mut state, range, reserved.is_ok());
        reserved.map_err(NoSlot::NoMemory)?;
        Ok(state)
    }

    /// Reserves the next step in the background once the last one is half used: zeroing pages takes
    /// longer than writing them, and should not be part of a request.
    fn grow_ahead(self: &Arc<Self>, state: &mut State) {
        let free = state.reserved - state.used;
        if free >= GROWTH / 2 || state.growing > 0 || state.exhausted {
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

    /// Takes memory from the system.
    fn reserve(&self, range: Range<u64>) -> io::Result<()> {
        segment::reserve(&self.file, range.start, range.end - range.start)?;
        self.mapping.populate(range);
        Ok(())
    }

    fn end_growth(&self, state: &mut State, range: Range<u64>, reserved: bool) {
        state.growing -= 1;
        self.grown.notify_all();
        if reserved {
            state.reserved += range.end - range.start;
            state.free.insert(range);
        } else {
            state.ungrown.insert(range);
        }
    }

    /// Lends a slot that has a holder.
    pub(crate) fn lend(&self, range: &Range<u64>) -> Result<(LeaseId, Handle), NoSlot> {
        let mut state = self.state();
        let length = range.end - range.start;
        let mut lent = state.leases.lend(&self.mapping, range.start, length);
        if lent.is_none() {
            state.end_leases(|leases| leases.end_all(&self.mapping));
            lent = state.leases.lend(&self.mapping, range.start, length);
        }
        let lent = lent.ok_or(NoSlot::NoLease)?;
        if let Some(holders) = state.slots.get_mut(&range.start) {
            holders.count += 1;
        }
        Ok(lent)
    }

    /// The number of the slot that begins there and has a holder: slots are numbered in the order
    /// in which they were taken.
    pub(crate) fn serial(&self, start: u64) -> u64 {
        self.state().slots.get(&start).map_or(0, |holders| holders.serial)
    }

    /// The frontend holds a slot once more, if it is still that slot.
    pub(crate) fn hold_again(&self, start: u64, serial: u64) -> bool {
        match self.state().slots.get_mut(&start) {
            Some(holders) if holders.serial == serial => {
                holders.count += 1;
                true
            }
            _ => false,
        }
    }

    /// The frontend does not need a slot any more.
    pub(crate) fn release(&self, start: u64) {
        self.state().release(start);
    }

    /// Removes the file's name.
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

    /// Takes the step that is reserved before a slot needs it.
    fn step(&mut self) -> Option<Range<u64>> {
        let step = GROWTH.min(self.ungrown.longest());
        if step == 0 {
            return None;
        }
        self.ungrown.take(step, PAGE)
    }

    /// Takes the memory to reserve next for a slot. Free memory on both sides counts as room for
    /// it. A room that spans several ungrown ranges takes several growths.
    fn growth(&mut self, length: u64, alignment: u64) -> Option<Growth> {
        let growth = self.ungrown.iter().find_map(|ungrown| {
            let room = self.unused_around(&ungrown);
            let slot = room.start.next_multiple_of(alignment);
            let end = slot + length;
            if end > room.end || end <= ungrown.start {
                return None;
            }
            let needed_end = end.next_multiple_of(PAGE).min(ungrown.end);
            let step_end = (ungrown.start + GROWTH).min(ungrown.end);
            Some(Growth { range: ungrown.start..needed_end.max(step_end), needed_end })
        })?;
        self.ungrown.remove(&growth.range);
        Some(growth)
    }

    /// Returns the longest range around `ungrown` that is neither in use nor being reserved.
    fn unused_around(&self, ungrown: &Range<u64>) -> Range<u64> {
        let mut room = ungrown.clone();
        let before = |at| self.free.ending_at(at).or_else(|| self.ungrown.ending_at(at));
        while let Some(range) = before(room.start) {
            room.start = range.start;
        }
        let after = |at| self.free.starting_at(at).or_else(|| self.ungrown.starting_at(at));
        while let Some(range) = after(room.end) {
            room.end = range.end;
        }
        room
    }

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
