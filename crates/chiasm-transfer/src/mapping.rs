//! An arena's bytes in this process.
//!
//! The memory is shared with a process that follows `docs/shared-memory.md`. It is the same user's and is trusted as such: a
//! process that may open the arena may also attach a debugger to this one. What it writes is the `returned` word of leases,
//! which is read as an atomic; bytes of slots are written by one thread of one process before anybody else knows of them, and
//! by nobody afterwards until they are free.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// A whole file, mapped and shared. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory that belongs to no thread; what may be done to which bytes at what time is the
// business of the methods below.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `length` bytes, which the file must have.
    pub(crate) fn new(file: &File, length: u64) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length })
    }

    /// Panics outside the mapping: callers have checked, so that would be a fault of this crate.
    fn at(&self, range: Range<u64>) -> NonNull<u8> {
        let within = range.start <= range.end && range.end <= self.length as u64;
        assert!(within, "{range:?} is outside the arena of {} bytes", self.length);
        // SAFETY: `start` is within the mapping, as was just checked.
        unsafe { self.start.add(range.start as usize) }
    }

    /// A word that the other process may change at any time.
    pub(crate) fn u32_at(&self, offset: u64) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4));
        // SAFETY: within the mapping, aligned (mappings begin at pages), and as long-lived as `self`. All accesses to words of
        // the table are atomic.
        unsafe { AtomicU32::from_ptr(self.at(offset..offset + 4).as_ptr().cast()) }
    }

    /// A double word that the other process may change at any time.
    pub(crate) fn u64_at(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8));
        // SAFETY: as for `u32_at`.
        unsafe { AtomicU64::from_ptr(self.at(offset..offset + 8).as_ptr().cast()) }
    }

    /// Copies bytes in. Only for the header, before the arena has a name.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset..offset + bytes.len() as u64);
        // SAFETY: within the mapping; `bytes` is other memory; nobody else knows of the arena yet.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) }
    }

    /// Copies bytes out. Only for the header, which nobody changes once the arena has a name.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        let from = self.at(offset..offset + bytes.len() as u64);
        // SAFETY: within the mapping; `bytes` is other memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) }
    }

    /// The bytes of a published slot.
    ///
    /// # Safety
    /// Nobody writes to them as long as the slice lives: they are a slot that was published, or lent, and is not free yet.
    pub(crate) unsafe fn slice(&self, range: Range<u64>) -> &[u8] {
        let length = (range.end - range.start) as usize;
        // SAFETY: within the mapping, initialised (files are), and not written to, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.at(range).as_ptr(), length) }
    }

    /// The bytes of a slot that is being written.
    ///
    /// # Safety
    /// Nobody else reads or writes them as long as the slice lives: they were taken from the free ones for this caller alone.
    #[allow(clippy::mut_from_ref, reason = "the caller promises what the signature can't")]
    pub(crate) unsafe fn slice_mut(&self, range: Range<u64>) -> &mut [u8] {
        let length = (range.end - range.start) as usize;
        // SAFETY: within the mapping, initialised, and the caller's alone, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.at(range).as_ptr(), length) }
    }

    /// Enters pages into this process's page table, all at once instead of one fault each. Only a hint.
    pub(crate) fn populate(&self, range: Range<u64>) {
        let length = (range.end - range.start) as usize;
        #[cfg(target_os = "linux")]
        let advice = Advice::LinuxPopulateWrite;
        #[cfg(not(target_os = "linux"))]
        let advice = Advice::WillNeed;
        // SAFETY: populating pages changes no contents.
        let populated = unsafe { rustix::mm::madvise(self.at(range).as_ptr().cast(), length, advice) };
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
