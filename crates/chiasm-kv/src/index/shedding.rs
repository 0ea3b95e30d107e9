//! Staying below the cap.

use std::sync::TryLockError;

use super::PrefixIndex;

/// Ages looked at to find out what is old.
const SAMPLES: usize = 4096;

impl PrefixIndex {
    pub(super) fn bytes(&self) -> usize {
        self.shared.blocks.bytes() + self.workers.bytes()
    }

    /// Leaves first, so that no gaps come about, and the oldest of them by a sample of ages. One thread at a time: the
    /// others go on.
    pub(super) fn shed_if_needed(&self) {
        let Some(max) = self.max_bytes.filter(|max| self.bytes() > *max) else { return };
        let mut next = match self.shedding.try_lock() {
            Ok(next) => next,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        while self.bytes() > max {
            let entries = self.totals().entries;
            // Tables that are three quarters full after this grow by a quarter when they are four fifths full. Taking
            // off less would bring the next round with the next batches.
            let keep = entries as f64 * (max as f64 / self.bytes() as f64) * 11.0 / 12.0;
            let excess = entries.saturating_sub(keep as usize).max(1);
            if self.shed(&mut next, excess, entries) == 0 {
                return;
            }
        }
    }

    /// Sheds about so many of all entries; returns how many.
    fn shed(&self, next: &mut usize, excess: usize, entries: usize) -> usize {
        let mut workers = 0;
        self.workers.each(0, |_| {
            workers += 1;
            true
        });
        let mut ages = Vec::new();
        self.workers.each(0, |blocks| {
            ages.extend(blocks.leaf_ages(&self.shared, SAMPLES.div_ceil(workers)));
            true
        });
        ages.sort_unstable_by(|one, other| other.cmp(one));
        // The oldest leaf has older parents than the youngest leaf: what is taken among leaves goes for all.
        let Some(oldest) = ages.get((ages.len() * excess / entries.max(1)).min(ages.len().saturating_sub(1))) else {
            return 0;
        };
        let mut shed = 0;
        self.workers.each(*next, |blocks| {
            shed += blocks.shed(*oldest, excess - shed, &self.shared);
            *next = next.wrapping_add(1);
            shed < excess
        });
        self.shared.blocks.fit();
        shed
    }
}
