//! The engine's side: handles to views.
//!
//! Two views of one lease must never be: the first to go would return the lease, and the frontend
//! would write a new tensor under the other. So a handle is resolved once. The last generation that
//! was resolved of each lease is noted, in one place for all readers of an arena in this process,
//! however often it is opened.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::{BadHandle, OpenError};
use crate::layout::{Handle, Header, LINE, lease, state};
use crate::mapping::Mapping;
use crate::segment::{self, FileId, Unsuitable};
use crate::shm::SHM_DIR;

/// The arenas that readers or views in this process refer to.
static OPEN: Mutex<BTreeMap<FileId, Weak<Shared>>> = Mutex::new(BTreeMap::new());

/// An arena as an engine sees it. Clones are the same reader, and so is what opening the arena
/// again in this process gives.
#[derive(Clone, Debug)]
pub struct ArenaReader {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    header: Header,
    mapping: Mapping,
    /// The generation of each lease that was last resolved. It has never more entries than the
    /// table of leases.
    resolved: Mutex<HashMap<u32, u32>>,
}

/// The bytes of a lent slot. There is only one view of a lease; dropping it returns the lease.
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
    /// [`OpenError`] says whether it is not there, not this user's, or no arena.
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
        // If nobody refers to it any more there is no view left either, and every lease that was
        // resolved is returned.
        let known = open.get(&file).and_then(Weak::upgrade);
        let shared = known
            .unwrap_or_else(|| Arc::new(Shared { header, mapping, resolved: Mutex::default() }));
        open.insert(file, Arc::downgrade(&shared));
        Ok(Self { shared })
    }

    /// The slot that a handle stands for. A handle is good for one call: the frontend lends the
    /// slot again for each sending.
    ///
    /// # Errors
    /// [`BadHandle`] says what does not fit. If it is the slot and not the lease, the lease is
    /// returned.
    pub fn resolve(&self, handle: &Handle) -> Result<SlotView, BadHandle> {
        let header = &self.shared.header;
        if handle.arena != header.number {
            return Err(BadHandle::Arena);
        }
        let entry = header.lease_at(handle.lease).ok_or(BadHandle::Lease)?;
        self.shared.take(handle, entry)?;
        let end = handle.offset.checked_add(handle.length).ok_or(BadHandle::Range);
        let range = handle.offset..end.unwrap_or(handle.offset);
        // From here on the lease is returned, by dropping this if by nothing else.
        let view =
            SlotView { arena: self.shared.clone(), entry, generation: handle.generation, range };
        let (range, mapping) = (&view.range, &self.shared.mapping);
        let as_lent = mapping.u64_at(entry + lease::OFFSET).load(Ordering::Relaxed)
            == handle.offset
            && mapping.u64_at(entry + lease::LENGTH).load(Ordering::Relaxed) == handle.length;
        end?;
        if !as_lent
            || range.start < header.slots
            || range.end > header.length
            || !range.start.is_multiple_of(LINE)
        {
            return Err(BadHandle::Range);
        }
        Ok(view)
    }
}

impl Shared {
    /// Takes the lease that begins at `entry` for one view, if it is lent and nobody has taken it
    /// before.
    fn take(&self, handle: &Handle, entry: u64) -> Result<(), BadHandle> {
        let mut resolved = self.resolved.lock().unwrap_or_else(PoisonError::into_inner);
        let lent = self.mapping.u32_at(entry + lease::STATE).load(Ordering::Acquire) == state::LENT
            && self.mapping.u32_at(entry + lease::GENERATION).load(Ordering::Relaxed)
                == handle.generation;
        if !lent {
            return Err(BadHandle::Ended);
        }
        let returned = self.mapping.u32_at(entry + lease::RETURNED).load(Ordering::Relaxed);
        if returned == handle.generation || resolved.get(&handle.lease) == Some(&handle.generation)
        {
            return Err(BadHandle::Used);
        }
        resolved.insert(handle.lease, handle.generation);
        Ok(())
    }
}

impl Deref for SlotView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot is lent, and its owner does not write to it before the lease is
        // returned. Only the one view of the lease returns it, which is this one, in `Drop`.
        unsafe { self.arena.mapping.slice(self.range.clone()) }
    }
}

impl Drop for SlotView {
    fn drop(&mut self) {
        // Release: this process has read the bytes before.
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
    fn a_handle_is_good_for_one_view() {
        let arena = Arena::create(4096).unwrap();
        let reader = ArenaReader::open(arena.name()).unwrap();
        let handle = lend(&arena, 7);
        let view = reader.resolve(&handle).unwrap();
        assert_eq!(reader.clone().resolve(&handle).unwrap_err(), BadHandle::Used);
        assert_eq!(
            (arena.usage().leases, &view[..]),
            (1, &[7; 4096][..]),
            "the second try returns nothing"
        );
        drop(view);
        assert_eq!(
            reader.resolve(&handle).unwrap_err(),
            BadHandle::Used,
            "returned, not yet taken back"
        );
        assert_eq!(arena.usage().leases, 0);
        assert_eq!(reader.resolve(&handle).unwrap_err(), BadHandle::Ended);
        // The entry's next lease is another one.
        let again = lend(&arena, 8);
        assert_eq!((again.lease, again.generation), (handle.lease, handle.generation + 1));
        assert_eq!(reader.resolve(&again).unwrap()[..], [8; 4096]);
    }

    #[test]
    fn opening_an_arena_again_makes_no_second_view_possible() {
        let arena = Arena::create(4096).unwrap();
        let handle = lend(&arena, 7);
        let view = ArenaReader::open(arena.name()).unwrap().resolve(&handle).unwrap();
        // The first reader is gone, its view is not.
        let reader = ArenaReader::open(arena.name()).unwrap();
        assert_eq!(reader.resolve(&handle).unwrap_err(), BadHandle::Used);
        drop((view, reader));
        assert_eq!(
            ArenaReader::open(arena.name()).unwrap().resolve(&handle).unwrap_err(),
            BadHandle::Used
        );
    }

    #[test]
    fn of_many_threads_with_one_handle_one_gets_the_view() {
        let arena = Arena::create(4096).unwrap();
        let reader = ArenaReader::open(arena.name()).unwrap();
        for round in 0..200 {
            let handle = lend(&arena, round as u8);
            // All results are kept until the last thread is done, or the second could come after
            // the first view's end.
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
    fn a_forgotten_view_keeps_its_lease() {
        let arena = Arena::create(4096).unwrap();
        let handle = lend(&arena, 7);
        std::mem::forget(ArenaReader::open(arena.name()).unwrap().resolve(&handle).unwrap());
        let again = ArenaReader::open(arena.name()).unwrap().resolve(&handle);
        assert_eq!((again.unwrap_err(), arena.usage().leases), (BadHandle::Used, 1));
    }
}
