//! Staying below the cap.

use std::sync::TryLockError;

use super::Core;

impl Core {
    pub(super) fn bytes(&self) -> usize {
        self.prompts.trees.bytes() + self.workers.bytes()
    }

    pub(super) fn is_above_cap(&self) -> bool {
        self.max_bytes.is_some_and(|max| self.bytes() > max)
    }

    /// Runs of least recent use first. One thread at a time: the others go on.
    pub(super) fn shed_if_needed(&self) {
        let Some(max) = self.max_bytes.filter(|max| self.bytes() > *max) else { return };
        let mut next = match self.shedding.try_lock() {
            Ok(next) => next,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        while self.bytes() > max {
            let mut entries = 0;
            self.workers.each(0, |worker| {
                entries += worker.entries();
                true
            });
            // Tables that are three quarters full after this grow by an eighth when they are four fifths full. Taking
            // off less would bring the next round with the next batches.
            let keep = entries as f64 * (max as f64 / self.bytes() as f64) * 11.0 / 12.0;
            let excess = entries.saturating_sub(keep as usize).max(1);
            if self.shed(&mut next, excess) == 0 {
                return;
            }
        }
    }

    /// Sheds about so many entries; returns how many.
    fn shed(&self, next: &mut usize, excess: usize) -> usize {
        let mut nodes = Vec::new();
        self.prompts.trees.each_node(|node| {
            let entries = node.holders.entries(node.len());
            nodes.extend((entries > 0).then(|| (self.prompts.uses.age(&node.used), entries)));
        });
        nodes.sort_unstable_by(|one, other| other.cmp(one));
        let mut sum = 0;
        let oldest = nodes.iter().find(|(_, entries)| {
            sum += entries;
            sum >= excess
        });
        // Entries without a key are in no node.
        let oldest = oldest.map_or(0, |(age, _)| *age);
        let mut shed = 0;
        self.workers.each(*next, |worker| {
            shed += worker.shed(oldest, excess - shed, &self.prompts);
            *next = next.wrapping_add(1);
            shed < excess
        });
        shed
    }
}
