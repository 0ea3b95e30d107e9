//! Memory that NIXL knows. It stays mapped for as long as the process.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::BytesMut;
use memmap2::MmapMut;

/// Pieces begin at multiples of this many bytes from each other, so that no two share a line of a
/// cache.
const LINE: usize = 64;

/// Memory of a fixed size, taken in pieces. Clones are of the same pool.
#[derive(Clone)]
pub(crate) struct Pool {
    address: usize,
    length: usize,
    free: Arc<Mutex<Free>>,
}

#[derive(Default)]
struct Free {
    /// By their addresses; no two are neighbours.
    pieces: BTreeMap<usize, BytesMut>,
    /// What may be read until then, in the order of these times.
    resting: VecDeque<(Instant, BytesMut)>,
}

impl Pool {
    /// A pool of so many bytes.
    ///
    /// # Errors
    /// There are not so many.
    pub(crate) fn new(length: usize) -> io::Result<Self> {
        let length =
            length.max(1).checked_next_multiple_of(LINE).ok_or(io::ErrorKind::OutOfMemory)?;
        // Memory that can't be had is told here, where asking the allocator would end the process.
        drop(MmapMut::map_anon(length)?);
        let mut all = BytesMut::zeroed(length);
        // One handle that is never dropped keeps the memory, whatever becomes of the others.
        std::mem::forget(all.split_off(all.len()));
        let (address, length) = (all.as_ptr() as usize, all.len());
        let mut free = Free::default();
        free.add(all);
        Ok(Self { address, length, free: Arc::new(Mutex::new(free)) })
    }

    /// Where it is and how many bytes it has.
    pub(crate) fn extent(&self) -> (usize, usize) {
        (self.address, self.length)
    }

    /// The smallest free piece that has room for so many bytes, cut to that length.
    pub(crate) fn take(&self, length: usize) -> Option<Piece> {
        let mut free = self.free();
        free.wake(Instant::now());
        let needed = length.max(1).checked_next_multiple_of(LINE)?;
        let fits = free.pieces.iter().filter(|(_, piece)| piece.len() >= needed);
        let (&address, _) = fits.min_by_key(|(_, piece)| piece.len())?;
        let mut piece = free.pieces.remove(&address)?;
        let taken = piece.split_to(needed);
        if !piece.is_empty() {
            free.pieces.insert(piece.as_ptr() as usize, piece);
        }
        Some(Piece { memory: taken, length, pool: self.clone() })
    }

    /// Bytes that nobody has.
    #[cfg(test)]
    pub(crate) fn free_bytes(&self) -> usize {
        self.free().pieces.values().map(BytesMut::len).sum()
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Free {
    /// Adds a piece, joined with its neighbours.
    fn add(&mut self, mut piece: BytesMut) {
        let end = piece.as_ptr() as usize + piece.len();
        // Both halves are of one allocation and side by side, so that nothing is copied.
        if let Some(after) = self.pieces.remove(&end) {
            piece.unsplit(after);
        }
        let start = piece.as_ptr() as usize;
        if let Some((_, before)) = self.pieces.range_mut(..start).next_back()
            && before.as_ptr() as usize + before.len() == start
        {
            before.unsplit(piece);
        } else {
            self.pieces.insert(start, piece);
        }
    }

    fn wake(&mut self, now: Instant) {
        while self.resting.front().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, piece)) = self.resting.pop_front() {
                self.add(piece);
            }
        }
    }
}

/// A piece of a pool, which nobody else has until it is dropped.
pub(crate) struct Piece {
    memory: BytesMut,
    length: usize,
    pool: Pool,
}

impl Piece {
    /// Gives it back to its pool, which gives it to nobody until then. Times of one pool have to
    /// come in their order.
    pub(crate) fn rest(mut self, until: Instant) {
        let memory = std::mem::take(&mut self.memory);
        self.pool.free().resting.push_back((until, memory));
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
    fn pieces_are_disjoint_within_the_pool_and_one_again_when_they_are_back() {
        let pool = Pool::new(1000).unwrap();
        let (start, length) = pool.extent();
        assert_eq!(length, 1024);
        let mut pieces: Vec<Piece> =
            [1, 64, 65, 0, 300].map(|length| pool.take(length).unwrap()).into();
        for (number, piece) in pieces.iter_mut().enumerate() {
            piece.as_mut().fill(number as u8 + 1);
            let at = piece.as_ref().as_ptr() as usize;
            assert!(
                at >= start
                    && at + piece.as_ref().len() <= start + length
                    && (at - start).is_multiple_of(LINE)
            );
        }
        for (number, piece) in pieces.iter().enumerate() {
            assert!(piece.as_ref().iter().all(|&byte| byte == number as u8 + 1), "{number}");
        }
        assert_eq!(pool.free_bytes(), 1024 - 64 - 64 - 128 - 64 - 320);
        assert!(pool.take(385).is_none());
        // In an order that joins on either side, on both, and on none.
        for at in [1, 2, 0, 1, 0] {
            drop(pieces.remove(at));
        }
        let all = pool.take(1024).unwrap();
        assert_eq!(all.as_ref().as_ptr() as usize, start);
        assert!(pool.take(1).is_none() && pool.take(usize::MAX).is_none());
    }

    #[test]
    fn the_smallest_fit_is_taken() {
        let pool = Pool::new(64 * 10).unwrap();
        let [small, wall, large] = [64, 64, 256].map(|length| pool.take(length).unwrap());
        let (at_small, _wall) = (small.as_ref().as_ptr(), wall);
        drop((small, large));
        assert_eq!(pool.take(10).unwrap().as_ref().as_ptr(), at_small);
        assert_eq!(pool.take(65).map(|piece| piece.as_ref().len()), Some(65));
    }

    #[test]
    fn what_rests_is_given_to_nobody_before_its_time() {
        let pool = Pool::new(128).unwrap();
        let piece = pool.take(128).unwrap();
        piece.rest(Instant::now() + Duration::from_secs(3600));
        assert!(pool.take(1).is_none());
        let pool = Pool::new(128).unwrap();
        let piece = pool.take(128).unwrap();
        piece.rest(Instant::now());
        assert!(pool.take(128).is_some());
    }

    #[test]
    fn a_pool_that_is_larger_than_memory_is_told() {
        for length in [usize::MAX, usize::MAX / 2] {
            assert!(Pool::new(length).is_err(), "{length}");
        }
    }
}
