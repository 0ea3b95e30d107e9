//! Bytes of media and of request bodies in this process's memory, counted together and bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use memmap2::MmapMut;

use crate::MediaError;

/// An item of so many bytes or more gets pages of its own when it is kept.
const OWN_PAGES: usize = 256 << 10;

/// Kept items with pages of their own, at most. Linux gives a process 65,530 areas of memory,
/// unless it is told otherwise.
const MAX_SETTLED: usize = 16_384;

/// A bound for the bytes that are held at once. Clones count together.
///
/// Nothing waits for room: who has half of what it needs and waits for the rest would keep it from
/// others that do the same. What does not fit is refused with [`MediaError::Busy`].
#[derive(Clone, Debug)]
pub struct ByteBudget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    limit: u64,
    held: AtomicU64,
    settled: AtomicUsize,
}

impl ByteBudget {
    /// Makes a budget of `limit` bytes, none of which is held.
    pub fn new(limit: u64) -> Self {
        Self {
            inner: Arc::new(Inner { limit, held: AtomicU64::new(0), settled: AtomicUsize::new(0) }),
        }
    }

    /// Bytes that may be held.
    pub fn limit(&self) -> u64 {
        self.inner.limit
    }

    /// Bytes that are held now.
    pub fn held(&self) -> u64 {
        self.inner.held.load(Ordering::Relaxed)
    }

    /// Counts `bytes` until the charge is dropped.
    ///
    /// # Errors
    /// [`MediaError::Busy`] when there is no room.
    pub fn charge(&self, bytes: u64) -> Result<Charge, MediaError> {
        let mut charge = self.empty_charge();
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// A charge that counts nothing yet.
    pub fn empty_charge(&self) -> Charge {
        Charge { budget: self.clone(), bytes: 0 }
    }

    /// An empty buffer that is counted while it grows.
    pub fn buffer(&self) -> ChargedBuffer {
        self.buffer_expecting(0)
    }

    /// An empty buffer for what is said to have so many bytes. Addresses for them are taken at
    /// once, so that nothing has to be copied when it grows; memory is taken, and counted, as they
    /// come. Whoever asks has checked that there may be so many.
    pub fn buffer_expecting(&self, bytes: usize) -> ChargedBuffer {
        ChargedBuffer { bytes: Vec::with_capacity(bytes), charge: self.empty_charge() }
    }

    /// The same bytes, to be kept for long: large ones move to pages that nothing else is on. In
    /// the allocator's areas, what was held for a moment would leave holes between them, which are
    /// given back when their neighbours are, if ever. The bytes stay where they are when there is
    /// no room for two of them, or no area.
    pub(crate) fn settle(&self, bytes: Bytes) -> Bytes {
        if bytes.len() < OWN_PAGES || self.inner.settled.load(Ordering::Relaxed) >= MAX_SETTLED {
            return bytes;
        }
        let Ok(charge) = self.charge(bytes.len() as u64) else { return bytes };
        let Ok(mut pages) = MmapMut::map_anon(bytes.len()) else { return bytes };
        pages.copy_from_slice(&bytes);
        self.inner.settled.fetch_add(1, Ordering::Relaxed);
        Bytes::from_owner(Settled { pages, charge })
    }
}

/// Bytes on pages of their own.
struct Settled {
    pages: MmapMut,
    charge: Charge,
}

impl AsRef<[u8]> for Settled {
    fn as_ref(&self) -> &[u8] {
        &self.pages
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        self.charge.budget.inner.settled.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes that are counted until this is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: ByteBudget,
    bytes: u64,
}

impl Charge {
    /// The bytes that this counts.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts `more` bytes as well.
    ///
    /// # Errors
    /// [`MediaError::Busy`] when there is no room; then nothing has changed.
    pub fn grow(&mut self, more: u64) -> Result<(), MediaError> {
        let Inner { limit, held, .. } = &*self.budget.inner;
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
            now.checked_add(more).filter(|then| then <= limit)
        })
        .map_err(|_| MediaError::Busy)?;
        self.bytes += more;
        Ok(())
    }

    /// Counts no more than `bytes` from now on.
    pub fn shrink_to(&mut self, bytes: u64) {
        if let Some(less) = self.bytes.checked_sub(bytes) {
            self.budget.inner.held.fetch_sub(less, Ordering::Relaxed);
            self.bytes = bytes;
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// Bytes whose memory is counted, for as long as anybody holds a part of them.
#[derive(Debug)]
pub struct ChargedBuffer {
    bytes: Vec<u8>,
    charge: Charge,
}

impl ChargedBuffer {
    /// What is there so far.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    /// Makes room for exactly `more` bytes, which are then zero, and returns them.
    ///
    /// # Errors
    /// [`MediaError::Busy`] when the budget has no room for them.
    pub fn extend_zeroed(&mut self, more: usize) -> Result<&mut [u8], MediaError> {
        let start = self.bytes.len();
        self.reserve(start + more)?;
        self.bytes.resize(start + more, 0);
        Ok(&mut self.bytes[start..])
    }

    /// Appends a part whose followers are not known yet: beyond what was expected, memory grows by
    /// doubling.
    ///
    /// # Errors
    /// [`MediaError::Busy`] when the budget has no room for it.
    pub fn extend(&mut self, part: &[u8]) -> Result<(), MediaError> {
        let needed = self.bytes.len() + part.len();
        if needed > self.bytes.capacity() {
            self.reserve(needed.max(2 * self.bytes.capacity()))
                .or_else(|_| self.reserve(needed))?;
        } else {
            self.count(needed)?;
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    /// Gives back spare memory and the right to change.
    pub fn freeze(mut self) -> Bytes {
        self.bytes.shrink_to_fit();
        self.charge.shrink_to(self.bytes.capacity() as u64);
        Bytes::from_owner(self)
    }

    /// Room for `capacity` bytes in all.
    fn reserve(&mut self, capacity: usize) -> Result<(), MediaError> {
        self.count(capacity)?;
        self.bytes.reserve_exact(capacity.saturating_sub(self.bytes.len()));
        Ok(())
    }

    /// Counts `bytes` in all.
    fn count(&mut self, bytes: usize) -> Result<(), MediaError> {
        let more = (bytes as u64).saturating_sub(self.charge.bytes);
        if more > 0 { self.charge.grow(more) } else { Ok(()) }
    }
}

impl AsRef<[u8]> for ChargedBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_and_changes_nothing() {
        let budget = ByteBudget::new(10);
        let mut charge = budget.charge(6).unwrap();
        assert_eq!(budget.charge(5).unwrap_err(), MediaError::Busy);
        assert_eq!(charge.grow(u64::MAX).unwrap_err(), MediaError::Busy);
        assert_eq!(budget.held(), 6);
        charge.grow(4).unwrap();
        assert_eq!(budget.held(), 10);
        charge.shrink_to(3);
        assert_eq!(budget.held(), 3);
        drop(charge);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_buffer_counts_until_its_last_part_is_gone() {
        let budget = ByteBudget::new(100);
        let mut buffer = budget.buffer();
        for _ in 0..9 {
            buffer.extend(&[1; 10]).unwrap();
            assert!(budget.held() >= buffer.as_slice().len() as u64);
        }
        assert_eq!(buffer.extend(&[1; 11]).unwrap_err(), MediaError::Busy);
        buffer.extend(&[1; 10]).unwrap();
        let bytes = buffer.freeze();
        assert_eq!((bytes.len(), budget.held()), (100, 100));
        let part = bytes.slice(3..4);
        drop(bytes);
        assert_eq!(budget.held(), 100);
        drop(part);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn what_is_kept_is_counted_once_wherever_it_is() {
        let budget = ByteBudget::new(5 * OWN_PAGES as u64 / 2);
        let settle = |len: usize| {
            let mut buffer = budget.buffer();
            buffer.extend_zeroed(len).unwrap().fill(7);
            let bytes = buffer.freeze();
            let (before, settled) = (bytes.as_ptr(), budget.settle(bytes));
            assert_eq!(settled, vec![7; len]);
            (before == settled.as_ptr(), settled)
        };
        let (stays, small) = settle(OWN_PAGES - 1);
        assert!(stays);
        drop(small);
        let (stays, large) = settle(OWN_PAGES);
        assert!(!stays);
        assert_eq!(
            (budget.held(), budget.inner.settled.load(Ordering::Relaxed)),
            (OWN_PAGES as u64, 1)
        );
        // There is no room for two of it.
        let (stays, second) = settle(OWN_PAGES);
        assert!(stays);
        drop((large, second));
        assert_eq!((budget.held(), budget.inner.settled.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn what_is_expected_is_counted_as_it_comes() {
        let budget = ByteBudget::new(1000);
        let held_while_filling = |expected| {
            let mut buffer = budget.buffer_expecting(expected);
            [(); 5].map(|()| {
                buffer.extend(&[1; 10]).unwrap();
                budget.held()
            })
        };
        assert_eq!(held_while_filling(0), [10, 20, 40, 40, 80]);
        assert_eq!(held_while_filling(50), [10, 20, 30, 40, 50]);
        // More comes than was said.
        assert_eq!(held_while_filling(30), [10, 20, 30, 60, 60]);
        // Less comes.
        let mut buffer = budget.buffer_expecting(100);
        buffer.extend(&[1; 10]).unwrap();
        let bytes = buffer.freeze();
        assert_eq!((bytes.len(), budget.held()), (10, 10));
    }

    #[test]
    fn zeroed_bytes_are_counted_exactly() {
        let budget = ByteBudget::new(8);
        let mut buffer = budget.buffer();
        buffer.extend_zeroed(5).unwrap().fill(7);
        assert_eq!((buffer.as_slice(), budget.held()), (&[7; 5][..], 5));
        assert_eq!(buffer.extend_zeroed(4).unwrap_err(), MediaError::Busy);
        drop(buffer);
        assert_eq!(budget.held(), 0);
    }
}
