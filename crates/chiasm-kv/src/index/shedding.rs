//! Staying below the cap.

use std::sync::{Mutex, TryLockError};

use super::Core;
use super::cache::{Cache, Old};
use super::worker::Worker;

/// Blocks that are let go with a worker and a tree locked: some microseconds.
const BLOCKS: usize = 256;

impl Core {
    pub(super) fn bytes(&self) -> usize {
        self.prompts.trees.bytes() + self.workers.bytes()
    }

    pub(super) fn is_above_cap(&self) -> bool {
        self.max_bytes.is_some_and(|max| self.bytes() > max)
    }

    /// Nodes of least recent use first. One thread at a time: the others go on.
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
            // Tables that are three quarters full after this grow by an eighth when they are four
            // fifths full. Taking off less would bring the next round with the next batches.
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
        for worker in self.workers.all(*next) {
            shed += self.shed_of(&worker, oldest, excess - shed);
            *next = next.wrapping_add(1);
            if shed >= excess {
                break;
            }
        }
        shed
    }

    /// Sheds so many entries of a worker at most; returns how many.
    fn shed_of(&self, worker: &Mutex<Worker>, oldest: u32, most: usize) -> usize {
        let mut shed = 0;
        for number in 0.. {
            let (mut old, mut from) = (Vec::<Old>::new(), Some(0));
            while let Some(hash) = from {
                let find =
                    |cache: &mut Cache| cache.find_old(hash, oldest, &self.prompts, &mut old);
                let found = self.workers.with(worker, |worker| worker.cache(number).map(find));
                let Some(Some(next)) = found else { return shed };
                from = next;
            }
            // Those without a key first; then the last blocks of each node, lest it be split.
            old.sort_unstable_by(|one, other| {
                one.0.is_some().cmp(&other.0.is_some()).then(other.cmp(one))
            });
            old.truncate(most - shed);
            for some in old.chunks(BLOCKS) {
                let forget = |cache: &mut Cache| cache.shed(some, &self.prompts);
                shed += self
                    .workers
                    .with(worker, |worker| worker.cache(number).map_or(0, forget))
                    .unwrap_or_default();
            }
            self.workers.with(worker, |worker| worker.cache(number).map(Cache::fit));
        }
        shed
    }
}
