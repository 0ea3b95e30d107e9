//! The engine's side: resolves handles to views.
//!
//! A lease must never have two views: dropping the first one would return the lease, and the
//! frontend would overwrite the bytes of the second. A handle can therefore only be resolved once.
//! The last resolved generation of each lease is stored once per arena and process, even if the
//! arena is opened several times.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::{HandleError, OpenError};
use crate::layout::{Handle, Header, LINE_BYTES, lease, state};
use crate::mapping::Mapping;
use crate::segment::{self, FileId, Unsuitable};
use crate::shm::SHM_DIR;

/// The arenas that readers or views in this process use.
static OPEN: Mutex<BTreeMap<FileId, Weak<Shared>>> = Mutex::new(BTreeMap::new());

/// The engine's side of an arena. Clones share the reader, and so do readers that open the same
/// arena again in this process.
#[derive(Clone, Debug)]
pub struct ArenaReader {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    header: Header,
    mapping: Mapping,
    /// The last resolved generation of each lease. It never has more entries than the table of
    /// leases.
    resolved: Mutex<HashMap<u32, u32>>,
}

/// The bytes of a lent slot. A lease has only one view; dropping it returns the lease.
#[derive(Debug)]
pub struct SlotView {
    arena: Arc<Shared>,
    /// The offset of the lease's entry.
    entry: u64,
    generation: u32,
    range: Range<u64>,
}

impl ArenaReader {
    /// Opens an arena by its file name in [`SHM_DIR`].
    ///
    /// # Errors
    /// [`OpenError`] if the file does not exist, belongs to another user, or is not an arena.
    pub fn open(name: &str) -> Result<Self, OpenError> {
        Self::open_in(Path::new(SHM_DIR), name)
    }

    pub(crate) fn open_in(dir: &Path, name: &str) -> Result<Self, OpenError> {
        let (_, number) =
            segment::parse_name(name).ok_or_else(|| OpenError::Name(name.to_owned()))?;
        let (file, header, mapping) =
            segment::open(dir, name, number).map_err(|unsuitable| match unsuitable {
                Unsuitable::Io(source) => OpenError::Io { name: name.to_owned(), source },
                Unsuitable::Problem(problem) => {
                    OpenError::Unsuitable { name: name.to_owned(), problem }
                }
            })?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, shared| shared.strong_count() > 0);
        // If no reader or view uses the arena any more, all resolved leases have been returned.
        let known = open.get(&file).and_then(Weak::upgrade);
        let shared = known
            .unwrap_or_else(|| Arc::new(Shared { header, mapping, resolved: Mutex::default() }));
        open.insert(file, Arc::downgrade(&shared));
        Ok(Self { shared })
    }

    /// Resolves a handle to a view of its slot. A handle can only be resolved once; the frontend
    /// lends the slot again for each message.
    ///
    /// # Errors
    /// [`HandleError`] if the handle is invalid. If its lease is valid but its byte range is not,
    /// the lease is returned.
    pub fn resolve(&self, handle: &Handle) -> Result<SlotView, HandleError> {
        let header = &self.shared.header;
        if handle.arena != header.number {
            return Err(HandleError::Arena);
        }
        let entry = header.entry_offset(handle.lease).ok_or(HandleError::Lease)?;
        self.shared.take(handle, entry)?;
        let end = handle.offset.checked_add(handle.length).ok_or(HandleError::Range);
        let range = handle.offset..end.unwrap_or(handle.offset);
        // From here on, dropping the view returns the lease on every path.
        let view =
            SlotView { arena: self.shared.clone(), entry, generation: handle.generation, range };
        let range = &view.range;
        let mapping = &self.shared.mapping;
        let is_as_lent = mapping.u64_at(entry + lease::OFFSET).load(Ordering::Relaxed)
            == handle.offset
            && mapping.u64_at(entry + lease::LENGTH).load(Ordering::Relaxed) == handle.length;
        end?;
        if !is_as_lent
            || range.start < header.slots
            || range.end > header.length
            || !range.start.is_multiple_of(LINE_BYTES)
        {
            return Err(HandleError::Range);
        }
        Ok(view)
    }
}

impl Shared {
    /// Marks the lease at the offset `entry` as resolved. Fails if it is not lent or already
    /// resolved.
    fn take(&self, handle: &Handle, entry: u64) -> Result<(), HandleError> {
        let mut resolved = self.resolved.lock().unwrap_or_else(PoisonError::into_inner);
        let is_lent = self.mapping.u32_at(entry + lease::STATE).load(Ordering::Acquire)
            == state::LENT
            && self.mapping.u32_at(entry + lease::GENERATION).load(Ordering::Relaxed)
                == handle.generation;
        if !is_lent {
            return Err(HandleError::Ended);
        }
        let returned = self.mapping.u32_at(entry + lease::RETURNED).load(Ordering::Relaxed);
        if returned == handle.generation || resolved.get(&handle.lease) == Some(&handle.generation)
        {
            return Err(HandleError::Used);
        }
        resolved.insert(handle.lease, handle.generation);
        Ok(())
    }
}

impl Deref for SlotView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot is lent, and its owner does not write to it before the lease is
        // returned. Only the lease's single view, which is this one, returns it, in `Drop`.
        unsafe { self.arena.mapping.slice(self.range.clone()) }
    }
}

impl Drop for SlotView {
    fn drop(&mut self) {
        // Release ordering: this process's reads of the bytes come before the store.
        self.arena
            .mapping
            .u32_at(self.entry + lease::RETURNED)
            .store(self.generation, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::arena::Arena;

    fn lend(arena: &Arena, value: u8) -> Handle {
        let mut writer = arena.slot(4096).unwrap();
        writer.fill(value);
        writer.publish().lend().unwrap().handle
    }

    #[test]
    fn handle_resolves_to_one_view_only() {
        let arena = Arena::create(4096).unwrap();
        let reader = ArenaReader::open(arena.name()).unwrap();
        let handle = lend(&arena, 7);
        let view = reader.resolve(&handle).unwrap();
        assert_eq!(reader.clone().resolve(&handle).unwrap_err(), HandleError::Used);
        assert_eq!(
            (arena.usage().leases, &view[..]),
            (1, &[7; 4096][..]),
            "a refused handle does not return the lease"
        );
        drop(view);
        assert_eq!(
            reader.resolve(&handle).unwrap_err(),
            HandleError::Used,
            "returned, but not ended yet"
        );
        assert_eq!(arena.usage().leases, 0);
        assert_eq!(reader.resolve(&handle).unwrap_err(), HandleError::Ended);
        // The next lease of the entry has a new generation.
        let again = lend(&arena, 8);
        assert_eq!((again.lease, again.generation), (handle.lease, handle.generation + 1));
        assert_eq!(reader.resolve(&again).unwrap()[..], [8; 4096]);
    }

    #[test]
    fn reopened_arena_allows_no_second_view() {
        let arena = Arena::create(4096).unwrap();
        let handle = lend(&arena, 7);
        let view = ArenaReader::open(arena.name()).unwrap().resolve(&handle).unwrap();
        // The first reader is dropped, but its view is not.
        let reader = ArenaReader::open(arena.name()).unwrap();
        assert_eq!(reader.resolve(&handle).unwrap_err(), HandleError::Used);
        drop((view, reader));
        assert_eq!(
            ArenaReader::open(arena.name()).unwrap().resolve(&handle).unwrap_err(),
            HandleError::Used
        );
    }

    #[test]
    fn concurrent_resolves_yield_one_view() {
        let arena = Arena::create(4096).unwrap();
        let reader = ArenaReader::open(arena.name()).unwrap();
        for round in 0..200 {
            let handle = lend(&arena, round as u8);
            // All results are kept until the last thread has finished. Otherwise, a second resolve
            // could come after the end of the first view.
            let results: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> =
                    (0..4).map(|_| scope.spawn(|| reader.resolve(&handle))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "round {round}");
            drop(results);
            assert_eq!(arena.usage().leases, 0);
        }
    }

    #[test]
    fn forgotten_view_keeps_its_lease() {
        let arena = Arena::create(4096).unwrap();
        let handle = lend(&arena, 7);
        std::mem::forget(ArenaReader::open(arena.name()).unwrap().resolve(&handle).unwrap());
        let again = ArenaReader::open(arena.name()).unwrap().resolve(&handle);
        assert_eq!((again.unwrap_err(), arena.usage().leases), (HandleError::Used, 1));
    }
}
