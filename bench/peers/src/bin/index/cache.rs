//! The prefix cache of a simulated worker.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

/// The leading blocks of runs that a worker holds.
///
/// The least recently used blocks are evicted first, and among those of the same time the deepest,
/// as in vLLM. A request uses all blocks of its prompt, so no block is evicted before the blocks
/// after it.
#[derive(Debug)]
pub(crate) struct Cache {
    capacity: usize,
    blocks: usize,
    runs: HashMap<u32, HeldRun>,
    /// The time, depth and number of each run with blocks.
    order: BTreeSet<(u32, Reverse<u32>, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct HeldRun {
    blocks: u32,
    used: u32,
    depth: u32,
}

/// Evicted blocks, the last ones that were held of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Evicted {
    pub(crate) run: u32,
    pub(crate) start: u32,
    pub(crate) blocks: u32,
}

impl Cache {
    /// Creates an empty cache with a capacity in blocks.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, blocks: 0, runs: HashMap::new(), order: BTreeSet::new() }
    }

    /// Returns the number of held blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of held blocks of a run.
    pub(crate) fn held(&self, run: u32) -> u32 {
        self.runs.get(&run).map_or(0, |held| held.blocks)
    }

    /// Returns the time of a run's last use, if any of it is held.
    pub(crate) fn used(&self, run: u32) -> Option<u32> {
        self.runs.get(&run).map(|held| held.used)
    }

    /// Marks the held blocks of a run as used now.
    pub(crate) fn touch(&mut self, run: u32, now: u32) {
        if let Some(held) = self.runs.get_mut(&run) {
            self.order.remove(&(held.used, Reverse(held.depth), run));
            held.used = now;
            self.order.insert((now, Reverse(held.depth), run));
        }
    }

    /// Stores the next blocks of a run. There has to be room.
    pub(crate) fn store(&mut self, run: u32, depth: u32, blocks: u32, now: u32) {
        let held = self.runs.entry(run).or_insert(HeldRun { blocks: 0, used: now, depth });
        held.blocks += blocks;
        self.blocks += blocks as usize;
        self.touch(run, now);
    }

    /// Evicts until there is room for `blocks`.
    pub(crate) fn make_room(&mut self, blocks: usize) -> Vec<Evicted> {
        let mut evicted = Vec::new();
        while self.blocks + blocks > self.capacity {
            let Some(&(used, depth, run)) = self.order.first() else { break };
            let Some(held) = self.runs.get_mut(&run) else { break };
            let missing = self.blocks + blocks - self.capacity;
            let missing = missing.min(held.blocks as usize) as u32;
            held.blocks -= missing;
            self.blocks -= missing as usize;
            evicted.push(Evicted { run, start: held.blocks, blocks: missing });
            if held.blocks == 0 {
                self.runs.remove(&run);
                self.order.remove(&(used, depth, run));
            }
        }
        evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_is_evicted_with_leaves_before_root() {
        let mut cache = Cache::new(10);
        cache.store(0, 0, 4, 1);
        cache.store(1, 4, 3, 1);
        cache.store(2, 4, 2, 2);
        cache.touch(0, 2);
        assert_eq!(cache.make_room(1), []);
        assert_eq!(cache.make_room(3), [Evicted { run: 1, start: 1, blocks: 2 }]);
        assert_eq!((cache.blocks(), cache.held(1), cache.held(0)), (7, 1, 4));
        let rest = [(1, 0, 1), (2, 0, 2), (0, 3, 1)].map(|(run, start, blocks)| Evicted {
            run,
            start,
            blocks,
        });
        assert_eq!(cache.make_room(7), rest);
        assert_eq!((cache.used(1), cache.used(0)), (None, Some(2)));
    }
}
