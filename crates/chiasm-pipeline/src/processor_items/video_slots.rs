//! The bound on videos that are decoded at once, by the cost of decoding them.

use tokio::sync::{Semaphore, SemaphorePermit};

/// The cost of a video that takes one slot, in samples times pixels: a minute of 1280×720 pixels
/// at 30 frames per second. Decoding it takes some five seconds of a core.
const SLOT_COST: u64 = 60 * 30 * 1280 * 720;

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

    /// Waits for the slots of a video of this cost; one of unknown cost takes one slot. Dropping
    /// the permit frees the slots.
    ///
    /// Videos are admitted in the order of the calls, so an expensive one does not starve.
    pub(crate) async fn acquire(&self, cost: Option<u64>) -> Option<SemaphorePermit<'_>> {
        // Never closed.
        self.slots.acquire_many(Self::for_cost(cost, self.total)).await.ok()
    }

    /// Returns the number of all slots.
    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    /// Returns the number of slots for a video, of `total` slots: its cost divided by
    /// [`SLOT_COST`], rounded up, but at most half of all slots, rounded up.
    pub(crate) fn for_cost(cost: Option<u64>, total: u32) -> u32 {
        let slots = cost.unwrap_or(0).div_ceil(SLOT_COST);
        u32::try_from(slots).unwrap_or(u32::MAX).clamp(1, total.div_ceil(2).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expensive_video_takes_several_slots() {
        let four_seconds = 120 * 1280 * 720;
        assert_eq!(VideoSlots::for_cost(None, 8), 1);
        assert_eq!(VideoSlots::for_cost(Some(four_seconds), 8), 1);
        assert_eq!(VideoSlots::for_cost(Some(SLOT_COST), 8), 1);
        assert_eq!(VideoSlots::for_cost(Some(2 * SLOT_COST + 1), 8), 3);
        assert_eq!(VideoSlots::for_cost(Some(u64::MAX), 8), 4);
        assert_eq!(VideoSlots::for_cost(Some(u64::MAX), 1), 1);
    }
}
