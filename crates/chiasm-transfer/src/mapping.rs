//! An arena's bytes in this process.
//!
//! The memory is shared with a process that follows `docs/shared-memory.md`. It is the same user's
//! and is trusted as such: a process that may open the arena may also attach a debugger to this
//! one. What it writes is the `returned` word of leases, which is read as an atomic; bytes of slots
//! are written by one thread of one process before anybody else knows of them, and by nobody
//! afterwards until they are free.
//!
//! Words and slots never overlap: words lie in the table, before where the slots begin, and both
//! are checked here. The header is read and written through the file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::layout::{Header, TABLE};

/// A whole file, mapped and shared. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
    /// Where the slots begin. The table of leases lies before it.
    slots: u64,
}

// SAFETY: the mapping is plain memory that belongs to no thread; what may be done to which bytes at
// what time is the business of the methods below.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the file that has this header, and is as long as it says.
    pub(crate) fn new(file: &File, header: &Header) -> io::Result<Self> {
        let length = usize::try_from(header.length)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in
        // use.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, file, 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length, slots: header.slots })
    }

    /// Panics outside `bounds`: callers have checked, so that would be a fault of this crate.
    fn at(&self, range: &Range<u64>, bounds: Range<u64>) -> NonNull<u8> {
        let within =
            bounds.start <= range.start && range.start <= range.end && range.end <= bounds.end;
        assert!(
            within && bounds.end <= self.length as u64,
            "{range:?} is not within {bounds:?} of the arena"
        );
        // SAFETY: `start` is within the mapping, as was just checked.
        unsafe { self.start.add(range.start as usize) }
    }

    fn in_slots(&self, range: &Range<u64>) -> NonNull<u8> {
        self.at(range, self.slots..self.length as u64)
    }

    /// A word of the table, which the other process may change at any time.
    pub(crate) fn u32_at(&self, offset: u64) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        let word = self.at(&(offset..offset + 4), TABLE..self.slots);
        // SAFETY: within the mapping, aligned (mappings begin at pages), and as long-lived as
        // `self`. The table is accessed only here and in `u64_at`, so always atomically, and each
        // field always with the same width.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
    }

    /// A double word of the table, which the other process may change at any time.
    pub(crate) fn u64_at(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        let word = self.at(&(offset..offset + 8), TABLE..self.slots);
        // SAFETY: as for `u32_at`.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    /// The bytes of a published slot.
    ///
    /// # Safety
    /// Nobody writes to them as long as the slice lives: they are a slot that was published, or
    /// lent, and is not free yet.
    pub(crate) unsafe fn slice(&self, range: Range<u64>) -> &[u8] {
        let length = (range.end - range.start) as usize;
        // SAFETY: within the mapping, initialised (files are), and not written to, as the caller
        // promises.
        unsafe { std::slice::from_raw_parts(self.in_slots(&range).as_ptr(), length) }
    }

    /// The bytes of a slot that is being written.
    ///
    /// # Safety
    /// Nobody else reads or writes them as long as the slice lives: they were taken from the free
    /// ones for this caller alone.
    #[allow(clippy::mut_from_ref, reason = "the caller promises what the signature can't")]
    pub(crate) unsafe fn slice_mut(&self, range: Range<u64>) -> &mut [u8] {
        let length = (range.end - range.start) as usize;
        // SAFETY: within the mapping, initialised, and the caller's alone, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.in_slots(&range).as_ptr(), length) }
    }

    /// Enters pages of slots into this process's page table, all at once instead of one fault each.
    /// Only a hint.
    pub(crate) fn populate(&self, range: Range<u64>) {
        let length = (range.end - range.start) as usize;
        #[cfg(target_os = "linux")]
        let advice = Advice::LinuxPopulateWrite;
        #[cfg(not(target_os = "linux"))]
        let advice = Advice::WillNeed;
        // SAFETY: populating pages changes no contents.
        let populated =
            unsafe { rustix::mm::madvise(self.in_slots(&range).as_ptr().cast(), length, advice) };
        if let Err(error) = populated {
            tracing::debug!(%error, "pages of an arena are entered one by one");
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping and nothing else; slices of it borrow `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) } {
            tracing::error!(%error, "unmapping an arena failed");
        }
    }
}
