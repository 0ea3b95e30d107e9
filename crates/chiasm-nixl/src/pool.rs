//! A pool of registered memory, which stays mapped until the process ends.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::BytesMut;
use memmap2::MmapMut;

/// The alignment of pieces: no two share a cache line.
const CACHE_LINE_BYTES: usize = 64;

/// A pool of fixed size, from which pieces are allocated. Clones are the same pool.
#[derive(Clone)]
pub(crate) struct Pool {
    address: usize,
    length: usize,
    free: Arc<Mutex<FreeList>>,
}

#[derive(Default)]
struct FreeList {
    /// The free pieces by address; no two are adjacent.
    pieces: BTreeMap<usize, BytesMut>,
    /// Pieces that may still be read. Each one is free from its time on; the times are in order.
    delayed: VecDeque<(Instant, BytesMut)>,
}

impl Pool {
    /// Creates a pool of at least `length` bytes.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub(crate) fn new(length: usize) -> io::Result<Self> {
        let length = length.max(1).checked_next_multiple_of(CACHE_LINE_BYTES);
        let length = length.ok_or(io::ErrorKind::OutOfMemory)?;
        // Fails if there is not enough memory, where the allocator would abort the process.
        drop(MmapMut::map_anon(length)?);
        let mut all = BytesMut::zeroed(length);
        // A handle that is never dropped keeps the memory allocated.
        std::mem::forget(all.split_off(all.len()));
        let address = all.as_ptr() as usize;
        let length = all.len();
        let mut free = FreeList::default();
        free.add(all);
        Ok(Self { address, length, free: Arc::new(Mutex::new(free)) })
    }

    /// Returns the address and the length.
    pub(crate) fn extent(&self) -> (usize, usize) {
        (self.address, self.length)
    }

    /// Allocates a piece of `length` bytes from the smallest free piece that fits.
    pub(crate) fn allocate(&self, length: usize) -> Option<Piece> {
        let mut free = self.free();
        free.add_delayed(Instant::now());
        let needed = length.max(1).checked_next_multiple_of(CACHE_LINE_BYTES)?;
        let fits = free.pieces.iter().filter(|(_, piece)| piece.len() >= needed);
        let (&address, _) = fits.min_by_key(|(_, piece)| piece.len())?;
        let mut piece = free.pieces.remove(&address)?;
        let allocated = piece.split_to(needed);
        if !piece.is_empty() {
            free.pieces.insert(piece.as_ptr() as usize, piece);
        }
        Some(Piece { memory: allocated, length, pool: self.clone() })
    }

    /// Returns the number of free bytes.
    #[cfg(test)]
    pub(crate) fn free_bytes(&self) -> usize {
        self.free().pieces.values().map(BytesMut::len).sum()
    }

    fn free(&self) -> MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FreeList {
    /// Adds a piece, joining it with adjacent ones.
    fn add(&mut self, mut piece: BytesMut) {
        let end = piece.as_ptr() as usize + piece.len();
        // Adjacent pieces are parts of one allocation, so that joining them copies nothing.
        if let Some(next) = self.pieces.remove(&end) {
            piece.unsplit(next);
        }
        let start = piece.as_ptr() as usize;
        if let Some((_, previous)) = self.pieces.range_mut(..start).next_back()
            && previous.as_ptr() as usize + previous.len() == start
        {
            previous.unsplit(piece);
        } else {
            self.pieces.insert(start, piece);
        }
    }

    /// Adds the delayed pieces whose times have passed.
    fn add_delayed(&mut self, now: Instant) {
        while self.delayed.front().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, piece)) = self.delayed.pop_front() {
                self.add(piece);
            }
        }
    }
}

/// A piece of a pool with exclusive access. Dropping it returns the memory to the pool.
pub(crate) struct Piece {
    memory: BytesMut,
    length: usize,
    pool: Pool,
}

impl Piece {
    /// Returns the memory to the pool, which does not allocate it again before `until`. Successive
    /// calls for one pool must not have decreasing times.
    pub(crate) fn release_at(mut self, until: Instant) {
        let memory = std::mem::take(&mut self.memory);
        self.pool.free().delayed.push_back((until, memory));
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.memory[..self.length]
    }
}

impl AsMut<[u8]> for Piece {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.length]
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        if !memory.is_empty() {
            self.pool.free().add(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn pieces_are_disjoint_then_joined_when_freed() {
        let pool = Pool::new(1000).unwrap();
        let (start, length) = pool.extent();
        assert_eq!(length, 1024);
        let mut pieces: Vec<Piece> =
            [1, 64, 65, 0, 300].map(|length| pool.allocate(length).unwrap()).into();
        for (number, piece) in pieces.iter_mut().enumerate() {
            piece.as_mut().fill(number as u8 + 1);
            let at = piece.as_ref().as_ptr() as usize;
            assert!(at >= start && at + piece.as_ref().len() <= start + length);
            assert!((at - start).is_multiple_of(CACHE_LINE_BYTES));
        }
        for (number, piece) in pieces.iter().enumerate() {
            assert!(piece.as_ref().iter().all(|&byte| byte == number as u8 + 1), "{number}");
        }
        assert_eq!(pool.free_bytes(), 1024 - 64 - 64 - 128 - 64 - 320);
        assert!(pool.allocate(385).is_none());
        // In an order that joins with the previous piece, the next one, both, and none.
        for at in [1, 2, 0, 1, 0] {
            drop(pieces.remove(at));
        }
        let all = pool.allocate(1024).unwrap();
        assert_eq!(all.as_ref().as_ptr() as usize, start);
        assert!(pool.allocate(1).is_none() && pool.allocate(usize::MAX).is_none());
    }

    #[test]
    fn smallest_fit_is_allocated() {
        let pool = Pool::new(64 * 10).unwrap();
        let [small, _separator, large] = [64, 64, 256].map(|length| pool.allocate(length).unwrap());
        let small_address = small.as_ref().as_ptr();
        drop((small, large));
        assert_eq!(pool.allocate(10).unwrap().as_ref().as_ptr(), small_address);
        assert_eq!(pool.allocate(65).map(|piece| piece.as_ref().len()), Some(65));
    }

    #[test]
    fn delayed_piece_is_not_allocated_before_its_time() {
        let pool = Pool::new(128).unwrap();
        let piece = pool.allocate(128).unwrap();
        piece.release_at(Instant::now() + Duration::from_secs(3600));
        assert!(pool.allocate(1).is_none());
        let pool = Pool::new(128).unwrap();
        let piece = pool.allocate(128).unwrap();
        piece.release_at(Instant::now());
        assert!(pool.allocate(128).is_some());
    }

    #[test]
    fn pool_larger_than_memory_is_an_error() {
        for length in [usize::MAX, usize::MAX / 2] {
            assert!(Pool::new(length).is_err(), "{length}");
        }
    }
}
