//! The memory mapping of an arena in this process.
//!
//! The memory is shared with a process that follows `docs/shared-memory.md`. That process belongs
//! to the same user and is trusted: a process that may open the arena may also attach a debugger to
//! this one. It only writes the `returned` word of leases, which is read atomically. The bytes of a
//! slot are written by one thread of one process, before any other code knows the slot. After that,
//! they are not written until the slot is free.
//!
//! Words and slots never overlap: the table of leases ends before the first slot, and both bounds
//! are checked here. The header is read and written through the file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::layout::{Header, TABLE_OFFSET};

/// A shared mapping of a whole file, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
    /// The offset of the first slot, which is the end of the table of leases.
    slots: u64,
}

// SAFETY: the mapping is plain memory that belongs to no thread. The methods below define which
// bytes may be accessed, and when.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file with this header. The file must have the length in the header.
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

    /// Returns the address of a range.
    ///
    /// # Panics
    /// If the range is outside `bounds`. Callers have checked that, so it would be a bug of this
    /// crate.
    fn at(&self, range: &Range<u64>, bounds: Range<u64>) -> NonNull<u8> {
        let is_within =
            bounds.start <= range.start && range.start <= range.end && range.end <= bounds.end;
        assert!(
            is_within && bounds.end <= self.length as u64,
            "{range:?} is not within {bounds:?} of the arena"
        );
        // SAFETY: `start` is within the mapping, as was just checked.
        unsafe { self.start.add(range.start as usize) }
    }

    /// Returns the address of a range of slots.
    fn in_slots(&self, range: &Range<u64>) -> NonNull<u8> {
        self.at(range, self.slots..self.length as u64)
    }

    /// Returns a word of the table, which the other process may change at any time.
    pub(crate) fn u32_at(&self, offset: u64) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        let word = self.at(&(offset..offset + 4), TABLE_OFFSET..self.slots);
        // SAFETY: within the mapping, aligned (mappings begin at pages), and valid as long as
        // `self`. The table is only accessed here and in `u64_at`, so always atomically, and each
        // field always with the same width.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
    }

    /// Returns a double word of the table, which the other process may change at any time.
    pub(crate) fn u64_at(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        let word = self.at(&(offset..offset + 8), TABLE_OFFSET..self.slots);
        // SAFETY: as for `u32_at`.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    /// Returns the bytes of a published slot.
    ///
    /// # Safety
    /// The bytes must not be written while the slice lives: they must belong to a slot that was
    /// published or lent and is not free yet.
    pub(crate) unsafe fn slice(&self, range: Range<u64>) -> &[u8] {
        let length = (range.end - range.start) as usize;
        // SAFETY: within the mapping, initialised (files are), and not written, as the caller
        // guarantees.
        unsafe { std::slice::from_raw_parts(self.in_slots(&range).as_ptr(), length) }
    }

    /// Returns the bytes of a slot that is being written.
    ///
    /// # Safety
    /// No other code may read or write the bytes while the slice lives: they must have been
    /// allocated for this caller only.
    #[allow(clippy::mut_from_ref, reason = "the caller guarantees that access is exclusive")]
    pub(crate) unsafe fn slice_mut(&self, range: Range<u64>) -> &mut [u8] {
        let length = (range.end - range.start) as usize;
        // SAFETY: within the mapping, initialised, and exclusive, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.in_slots(&range).as_ptr(), length) }
    }

    /// Populates pages of slots in this process's page table, with one call instead of one fault
    /// per page. This is only a hint.
    pub(crate) fn populate(&self, range: Range<u64>) {
        let length = (range.end - range.start) as usize;
        #[cfg(target_os = "linux")]
        let advice = Advice::LinuxPopulateWrite;
        #[cfg(not(target_os = "linux"))]
        let advice = Advice::WillNeed;
        // SAFETY: populating pages does not change their contents.
        let populated =
            unsafe { rustix::mm::madvise(self.in_slots(&range).as_ptr().cast(), length, advice) };
        if let Err(error) = populated {
            tracing::debug!(%error, "the pages of an arena were not populated");
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly this mapping; all slices of it borrow `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) } {
            tracing::error!(%error, "unmapping an arena failed");
        }
    }
}
