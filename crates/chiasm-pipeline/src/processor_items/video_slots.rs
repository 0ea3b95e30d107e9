//! The bound on videos that are decoded at once, by their prices.

use tokio::sync::{Semaphore, SemaphorePermit};

/// The price of a video that takes one slot, in samples times pixels: a minute of 1280×720 pixels
/// at 30 frames per second. Decoding it takes some five seconds of a core.
const SLOT_PRICE: u64 = 60 * 30 * 1280 * 720;

/// The slots in which videos are decoded. An expensive video takes several.
pub(crate) struct VideoSlots {
    slots: Semaphore,
    total: u32,
}

impl VideoSlots {
    /// Creates `total` slots, but at least one.
    pub(crate) fn new(total: usize) -> Self {
        let total = u32::try_from(total).unwrap_or(u32::MAX).max(1);
        Self { slots: Semaphore::new(total as usize), total }
    }

    /// Waits for the slots of a video at this price; an unknown price takes one slot. The slots are
    /// free again when the permit is dropped.
    ///
    /// Videos are admitted in the order of the calls, so an expensive one does not starve.
    pub(crate) async fn acquire(&self, price: Option<u64>) -> Option<SemaphorePermit<'_>> {
        // Never closed.
        self.slots.acquire_many(slots(price, self.total)).await.ok()
    }
}

/// Returns the number of slots for a video: one per started [`SLOT_PRICE`], but at most half of all
/// slots, so that one video never blocks all others.
fn slots(price: Option<u64>, total: u32) -> u32 {
    let slots = price.unwrap_or(0).div_ceil(SLOT_PRICE);
    u32::try_from(slots).unwrap_or(u32::MAX).clamp(1, total.div_ceil(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expensive_video_takes_several_slots() {
        let four_seconds = 120 * 1280 * 720;
        assert_eq!(slots(None, 8), 1);
        assert_eq!(slots(Some(four_seconds), 8), 1);
        assert_eq!(slots(Some(SLOT_PRICE), 8), 1);
        assert_eq!(slots(Some(2 * SLOT_PRICE + 1), 8), 3);
        assert_eq!(slots(Some(u64::MAX), 8), 4);
        assert_eq!(slots(Some(u64::MAX), 1), 1);
    }
}
