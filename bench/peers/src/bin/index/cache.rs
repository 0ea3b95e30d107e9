//! A simulated worker's prefix cache: which blocks it holds, and which it evicts.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

/// What a worker holds: of each run its first blocks. Evicts the least recently used first, and of
/// what was used at the same time the deepest, as vLLM does. A request uses all blocks of its
/// prompt, so no block goes before those after it.
#[derive(Debug)]
pub(crate) struct Cache {
    capacity: usize,
    blocks: usize,
    runs: HashMap<u32, Held>,
    /// Time, depth and number of each run that has blocks here.
    order: BTreeSet<(u32, Reverse<u32>, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    blocks: u32,
    used: u32,
    depth: u32,
}

/// Blocks that were evicted: the last ones of those held of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Evicted {
    pub(crate) run: u32,
    pub(crate) start: u32,
    pub(crate) blocks: u32,
}

impl Cache {
    /// An empty cache of so many blocks.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, blocks: 0, runs: HashMap::new(), order: BTreeSet::new() }
    }

    /// Blocks held, of all runs.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// How many of a run's leading blocks are held.
    pub(crate) fn held(&self, run: u32) -> u32 {
        self.runs.get(&run).map_or(0, |held| held.blocks)
    }

    /// When a run was used last, if any of it is held.
    pub(crate) fn used(&self, run: u32) -> Option<u32> {
        self.runs.get(&run).map(|held| held.used)
    }

    /// Says that what is held of a run is used now.
    pub(crate) fn touch(&mut self, run: u32, now: u32) {
        if let Some(held) = self.runs.get_mut(&run) {
            self.order.remove(&(held.used, Reverse(held.depth), run));
            held.used = now;
            self.order.insert((now, Reverse(held.depth), run));
        }
    }

    /// Stores the next blocks of a run. There has to be room.
    pub(crate) fn store(&mut self, run: u32, depth: u32, blocks: u32, now: u32) {
        self.runs.entry(run).or_insert(Held { blocks: 0, used: now, depth }).blocks += blocks;
        self.blocks += blocks as usize;
        self.touch(run, now);
    }

    /// Evicts until there is room for so many blocks more.
    pub(crate) fn make_room(&mut self, blocks: usize) -> Vec<Evicted> {
        let mut evicted = Vec::new();
        while self.blocks + blocks > self.capacity {
            let Some(&(used, depth, run)) = self.order.first() else { break };
            let Some(held) = self.runs.get_mut(&run) else { break };
            let missing = (self.blocks + blocks - self.capacity).min(held.blocks as usize) as u32;
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
    fn the_oldest_goes_first_and_its_leaves_before_its_root() {
        let mut cache = Cache::new(10);
        cache.store(0, 0, 4, 1);
        cache.store(1, 4, 3, 1);
        cache.store(2, 4, 2, 2);
        cache.touch(0, 2);
        assert_eq!(cache.make_room(1), []);
        assert_eq!(cache.make_room(3), [Evicted { run: 1, start: 1, blocks: 2 }]);
        assert_eq!((cache.blocks(), cache.held(1), cache.held(0)), (7, 1, 4));
        let rest = [(1, 0, 1), (2, 0, 2), (0, 3, 1)].map(|(run, start, blocks)| Evicted { run, start, blocks });
        assert_eq!(cache.make_room(7), rest);
        assert_eq!((cache.used(1), cache.used(0)), (None, Some(2)));
    }
}
