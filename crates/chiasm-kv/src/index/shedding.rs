//! Shedding: removing the least recently used blocks to stay below the cap.

use std::sync::{Mutex, TryLockError};

use super::Core;
use super::cache::{Cache, ShedCandidate};
use super::worker::Worker;

/// The number of blocks removed with a worker and a tree locked: some microseconds.
const BLOCKS_PER_LOCK: usize = 256;

impl Core {
    /// Returns the number of bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.prompts.trees.bytes() + self.workers.bytes()
    }

    pub(super) fn is_above_cap(&self) -> bool {
        self.max_bytes.is_some_and(|max| self.bytes() > max)
    }

    /// Sheds blocks until the index is below the cap, least recently used nodes first. Returns at
    /// once if another thread is already shedding.
    pub(super) fn shed_if_needed(&self) {
        let Some(max) = self.max_bytes.filter(|max| self.bytes() > *max) else { return };
        let mut next = match self.shedding.try_lock() {
            Ok(next) => next,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        while self.bytes() > max {
            let mut entries = 0;
            for worker in self.workers.all(0) {
                entries +=
                    self.workers.with(&worker, |worker| worker.entries()).unwrap_or_default();
            }
            // Afterwards tables are three quarters full. They grow by an eighth when they are four
            // fifths full, so shedding less would require another round within a few batches.
            let keep = entries as f64 * (max as f64 / self.bytes() as f64) * 11.0 / 12.0;
            let excess = entries.saturating_sub(keep as usize).max(1);
            if self.shed(&mut next, excess) == 0 {
                return;
            }
        }
    }

    /// Sheds about `excess` entries, starting at worker number `next`. Returns the number shed.
    fn shed(&self, next: &mut usize, excess: usize) -> usize {
        let mut nodes = Vec::new();
        self.prompts.trees.each_node(|node| {
            let entries = node.holders.entries(node.len());
            nodes.extend((entries > 0).then(|| (self.prompts.uses.age(&node.used), entries)));
        });
        nodes.sort_unstable_by(|one, other| other.cmp(one));
        let mut sum = 0;
        let last = nodes.iter().find(|(_, entries)| {
            sum += entries;
            sum >= excess
        });
        // The nodes may hold fewer entries than needed, because entries without a key are in no
        // node.
        let min_age = last.map_or(0, |(age, _)| *age);
        let mut shed = 0;
        for worker in self.workers.all(*next) {
            shed += self.shed_from(&worker, min_age, excess - shed);
            *next = next.wrapping_add(1);
            if shed >= excess {
                break;
            }
        }
        shed
    }

    /// Sheds at most `max_entries` entries of a worker: those without a key, and those of nodes
    /// with an age of at least `min_age`. Returns the number shed.
    fn shed_from(&self, worker: &Mutex<Worker>, min_age: u32, max_entries: usize) -> usize {
        let mut shed = 0;
        for number in 0.. {
            let mut candidates = Vec::<ShedCandidate>::new();
            let mut from = Some(0);
            while let Some(hash) = from {
                let find = |cache: &mut Cache| {
                    cache.find_shed_candidates(hash, min_age, &self.prompts, &mut candidates)
                };
                let found = self.workers.with(worker, |worker| worker.cache(number).map(find));
                let Some(Some(next)) = found else { return shed };
                from = next;
            }
            // Entries without a key come first, then the last blocks of each node, which avoids
            // splits.
            candidates.sort_unstable_by(|one, other| {
                one.0.is_some().cmp(&other.0.is_some()).then(other.cmp(one))
            });
            candidates.truncate(max_entries - shed);
            for chunk in candidates.chunks(BLOCKS_PER_LOCK) {
                let shed_chunk = |cache: &mut Cache| cache.shed(chunk, &self.prompts);
                shed += self
                    .workers
                    .with(worker, |worker| worker.cache(number).map_or(0, shed_chunk))
                    .unwrap_or_default();
            }
            self.workers.with(worker, |worker| worker.cache(number).map(Cache::shrink));
        }
        shed
    }
}
