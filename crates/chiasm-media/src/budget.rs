//! A shared bound on the memory of media and request bodies in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use memmap2::MmapMut;

use crate::MediaError;

/// The minimum size in bytes of an item that gets pages of its own when it is cached.
const OWN_PAGES_MIN_BYTES: usize = 256 << 10;

/// The maximum number of items with pages of their own. Linux gives a process 65,530 memory areas
/// by default.
const MAX_OWN_PAGES_ITEMS: usize = 16_384;

/// A limit on the number of bytes in use at once. Clones share one count.
///
/// A charge that does not fit is refused with [`MediaError::Busy`]. It never waits: two callers
/// that each hold half of what they need would wait for each other forever.
#[derive(Clone, Debug)]
pub struct ByteBudget {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    limit: u64,
    held: AtomicU64,
    /// The number of items with pages of their own.
    own_pages_items: AtomicUsize,
}

impl ByteBudget {
    /// Creates a budget of `limit` bytes, none of which are in use.
    pub fn new(limit: u64) -> Self {
        let inner = Inner { limit, held: AtomicU64::new(0), own_pages_items: AtomicUsize::new(0) };
        Self { inner: Arc::new(inner) }
    }

    /// Returns the maximum number of bytes in use.
    pub fn limit(&self) -> u64 {
        self.inner.limit
    }

    /// Returns the number of bytes in use now.
    pub fn held(&self) -> u64 {
        self.inner.held.load(Ordering::Relaxed)
    }

    /// Charges `bytes` to the budget until the charge is dropped.
    ///
    /// # Errors
    /// [`MediaError::Busy`] when there is no room.
    pub fn charge(&self, bytes: u64) -> Result<Charge, MediaError> {
        let mut charge = self.empty_charge();
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// Returns a charge of zero bytes, which can grow later.
    pub fn empty_charge(&self) -> Charge {
        Charge { budget: self.clone(), bytes: 0 }
    }

    /// Returns an empty buffer, which is charged as it grows.
    pub fn buffer(&self) -> ChargedBuffer {
        self.buffer_with_capacity(0)
    }

    /// Returns an empty buffer with room for `bytes`, the announced length of its content.
    ///
    /// Only address space is reserved at once, so that growth copies nothing. Memory is committed,
    /// and charged, as data arrives. The caller must have checked `bytes` against a limit.
    pub fn buffer_with_capacity(&self, bytes: usize) -> ChargedBuffer {
        ChargedBuffer { bytes: Vec::with_capacity(bytes), charge: self.empty_charge() }
    }

    /// Moves large bytes that will be cached for long to pages of their own.
    ///
    /// Among the allocator's short-lived blocks, long-lived ones fragment the heap: the holes
    /// between them are returned to the system late, or never. The bytes stay where they are if the
    /// budget has no room for a second copy, or if there is no memory area left.
    pub(crate) fn move_to_own_pages(&self, bytes: Bytes) -> Bytes {
        let own_pages_items = &self.inner.own_pages_items;
        if bytes.len() < OWN_PAGES_MIN_BYTES
            || own_pages_items.load(Ordering::Relaxed) >= MAX_OWN_PAGES_ITEMS
        {
            return bytes;
        }
        let Ok(charge) = self.charge(bytes.len() as u64) else { return bytes };
        let Ok(mut pages) = MmapMut::map_anon(bytes.len()) else { return bytes };
        pages.copy_from_slice(&bytes);
        own_pages_items.fetch_add(1, Ordering::Relaxed);
        Bytes::from_owner(OwnPages { pages, charge })
    }
}

/// Bytes on pages of their own.
struct OwnPages {
    pages: MmapMut,
    charge: Charge,
}

impl AsRef<[u8]> for OwnPages {
    fn as_ref(&self) -> &[u8] {
        &self.pages
    }
}

impl Drop for OwnPages {
    fn drop(&mut self) {
        self.charge.budget.inner.own_pages_items.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes charged to a [`ByteBudget`] until this is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: ByteBudget,
    bytes: u64,
}

impl Charge {
    /// Returns the number of bytes charged.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Charges `more` bytes in addition.
    ///
    /// # Errors
    /// [`MediaError::Busy`] if they do not fit; then the charge is unchanged.
    pub fn grow(&mut self, more: u64) -> Result<(), MediaError> {
        let Inner { limit, held, .. } = &*self.budget.inner;
        held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
            now.checked_add(more).filter(|then| then <= limit)
        })
        .map_err(|_| MediaError::Busy)?;
        self.bytes += more;
        Ok(())
    }

    /// Reduces the charge to `bytes`, if it is larger.
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

/// A growing buffer whose memory is charged to a [`ByteBudget`].
///
/// After [`freeze`](Self::freeze) the charge lasts until the last slice of the bytes is dropped.
#[derive(Debug)]
pub struct ChargedBuffer {
    bytes: Vec<u8>,
    charge: Charge,
}

impl ChargedBuffer {
    /// Returns the content so far.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the content so far, which may be changed.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Appends `more` zero bytes without spare capacity, and returns them.
    ///
    /// # Errors
    /// [`MediaError::Busy`] if they do not fit into the budget.
    pub fn extend_zeroed(&mut self, more: usize) -> Result<&mut [u8], MediaError> {
        let start = self.bytes.len();
        self.reserve(start + more)?;
        self.bytes.resize(start + more, 0);
        Ok(&mut self.bytes[start..])
    }

    /// Appends a part. Beyond the initial capacity the buffer grows by doubling.
    ///
    /// # Errors
    /// [`MediaError::Busy`] if the part does not fit into the budget.
    pub fn extend(&mut self, part: &[u8]) -> Result<(), MediaError> {
        let needed = self.bytes.len() + part.len();
        if needed > self.bytes.capacity() {
            self.reserve(needed.max(2 * self.bytes.capacity()))
                .or_else(|_| self.reserve(needed))?;
        } else {
            self.charge_total(needed)?;
        }
        self.bytes.extend_from_slice(part);
        Ok(())
    }

    /// Releases spare memory and makes the content immutable.
    pub fn freeze(mut self) -> Bytes {
        self.bytes.shrink_to_fit();
        self.charge.shrink_to(self.bytes.capacity() as u64);
        Bytes::from_owner(self)
    }

    /// Grows the capacity to `capacity` bytes in total.
    fn reserve(&mut self, capacity: usize) -> Result<(), MediaError> {
        self.charge_total(capacity)?;
        self.bytes.reserve_exact(capacity.saturating_sub(self.bytes.len()));
        Ok(())
    }

    /// Grows the charge to `bytes` in total.
    fn charge_total(&mut self, bytes: usize) -> Result<(), MediaError> {
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
    fn charge_over_the_limit_is_refused() {
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
    fn buffer_is_charged_until_its_last_slice_drops() {
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
    fn bytes_on_own_pages_are_charged_once() {
        let budget = ByteBudget::new(5 * OWN_PAGES_MIN_BYTES as u64 / 2);
        let own_pages_items = || budget.inner.own_pages_items.load(Ordering::Relaxed);
        let move_filled = |len: usize| {
            let mut buffer = budget.buffer();
            buffer.extend_zeroed(len).unwrap().fill(7);
            let bytes = buffer.freeze();
            let before = bytes.as_ptr();
            let moved = budget.move_to_own_pages(bytes);
            assert_eq!(moved, vec![7; len]);
            (before == moved.as_ptr(), moved)
        };
        let (stays, small) = move_filled(OWN_PAGES_MIN_BYTES - 1);
        assert!(stays);
        drop(small);
        let (stays, large) = move_filled(OWN_PAGES_MIN_BYTES);
        assert!(!stays);
        assert_eq!((budget.held(), own_pages_items()), (OWN_PAGES_MIN_BYTES as u64, 1));
        // The budget has no room for a second copy.
        let (stays, second) = move_filled(OWN_PAGES_MIN_BYTES);
        assert!(stays);
        drop((large, second));
        assert_eq!((budget.held(), own_pages_items()), (0, 0));
    }

    #[test]
    fn announced_bytes_are_charged_as_they_arrive() {
        let budget = ByteBudget::new(1000);
        let held_while_filling = |announced| {
            let mut buffer = budget.buffer_with_capacity(announced);
            [(); 5].map(|()| {
                buffer.extend(&[1; 10]).unwrap();
                budget.held()
            })
        };
        assert_eq!(held_while_filling(0), [10, 20, 40, 40, 80]);
        assert_eq!(held_while_filling(50), [10, 20, 30, 40, 50]);
        // More bytes arrive than were announced.
        assert_eq!(held_while_filling(30), [10, 20, 30, 60, 60]);
        // Fewer bytes arrive.
        let mut buffer = budget.buffer_with_capacity(100);
        buffer.extend(&[1; 10]).unwrap();
        let bytes = buffer.freeze();
        assert_eq!((bytes.len(), budget.held()), (10, 10));
    }

    #[test]
    fn zeroed_bytes_are_charged_exactly() {
        let budget = ByteBudget::new(8);
        let mut buffer = budget.buffer();
        buffer.extend_zeroed(5).unwrap().fill(7);
        assert_eq!((buffer.as_slice(), budget.held()), (&[7; 5][..], 5));
        assert_eq!(buffer.extend_zeroed(4).unwrap_err(), MediaError::Busy);
        drop(buffer);
        assert_eq!(budget.held(), 0);
    }
}
