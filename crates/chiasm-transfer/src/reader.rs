//! The engine's side: handles to views.

use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{BadHandle, OpenError};
use crate::layout::{Handle, Header, LINE, lease, state};
use crate::mapping::Mapping;
use crate::segment::{self, Unsuitable};
use crate::shm::SHM_DIR;

/// An arena as an engine sees it. Clones are the same.
#[derive(Clone, Debug)]
pub struct ArenaReader {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    header: Header,
    mapping: Mapping,
}

/// The bytes of a lent slot. Dropping it returns the lease.
#[derive(Debug)]
pub struct SlotView {
    arena: Arc<Shared>,
    /// Where the lease's entry begins.
    entry: u64,
    generation: u32,
    range: Range<u64>,
}

impl ArenaReader {
    /// Opens an arena by its file name in [`SHM_DIR`].
    pub fn open(name: &str) -> Result<Self, OpenError> {
        Self::open_in(Path::new(SHM_DIR), name)
    }

    pub(crate) fn open_in(dir: &Path, name: &str) -> Result<Self, OpenError> {
        let (_, number) = segment::parse_name(name).ok_or_else(|| OpenError::Name(name.to_owned()))?;
        let (header, mapping) = segment::open(dir, name, number).map_err(|unsuitable| match unsuitable {
            Unsuitable::Io(source) => OpenError::Io { name: name.to_owned(), source },
            Unsuitable::Problem(problem) => OpenError::Unsuitable { name: name.to_owned(), problem },
        })?;
        Ok(Self { shared: Arc::new(Shared { header, mapping }) })
    }

    /// The slot that a handle stands for. To be called once for a handle.
    ///
    /// # Errors
    /// [`BadHandle`] says what does not fit. If it is the slot and not the lease, the lease is returned.
    pub fn resolve(&self, handle: &Handle) -> Result<SlotView, BadHandle> {
        let Shared { header, mapping } = &*self.shared;
        if handle.arena != header.number {
            return Err(BadHandle::Arena);
        }
        let entry = header.lease_at(handle.lease).ok_or(BadHandle::Lease)?;
        let lent = mapping.u32_at(entry + lease::STATE).load(Ordering::Acquire) == state::LENT
            && mapping.u32_at(entry + lease::GENERATION).load(Ordering::Relaxed) == handle.generation
            && mapping.u32_at(entry + lease::RETURNED).load(Ordering::Relaxed) != handle.generation;
        if !lent {
            return Err(BadHandle::Ended);
        }
        let end = handle.offset.checked_add(handle.length).ok_or(BadHandle::Range);
        let range = handle.offset..end.unwrap_or(handle.offset);
        // From here on the lease is returned, by dropping this if by nothing else.
        let view = SlotView { arena: self.shared.clone(), entry, generation: handle.generation, range };
        let range = &view.range;
        let as_lent = mapping.u64_at(entry + lease::OFFSET).load(Ordering::Relaxed) == handle.offset
            && mapping.u64_at(entry + lease::LENGTH).load(Ordering::Relaxed) == handle.length;
        end?;
        if !as_lent || range.start < header.slots || range.end > header.length || !range.start.is_multiple_of(LINE) {
            return Err(BadHandle::Range);
        }
        Ok(view)
    }
}

impl Deref for SlotView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot is lent, and its owner does not write to it before the lease is returned, which `Drop` does.
        unsafe { self.arena.mapping.slice(self.range.clone()) }
    }
}

impl Drop for SlotView {
    fn drop(&mut self) {
        // Release: this process has read the bytes before.
        self.arena.mapping.u32_at(self.entry + lease::RETURNED).store(self.generation, Ordering::Release);
    }
}
