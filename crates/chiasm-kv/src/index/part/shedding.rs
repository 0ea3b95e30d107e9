//! Blocks that are forgotten to stay below the cap.

use super::{Forest, Name, Part, Prompts, Spot};

/// Blocks that are looked at, or let go, with a tree locked: lookups wait for some microseconds.
const BLOCKS: usize = 256;

impl Part {
    /// Forgets blocks of runs that are at least so old, and those without a key, up to a number of hashes. What the engine says of
    /// them later is as of blocks that we never heard of. Returns how many.
    pub(in crate::index) fn shed(&mut self, oldest: u32, most: usize, prompts: &Prompts) -> usize {
        let unkeyed = self.entries.iter().filter(|entry| entry.spot().is_none()).map(|entry| entry.name);
        let unkeyed: Vec<Name> = unkeyed.take(most).collect();
        self.counts.unkeyed -= unkeyed.len();
        let old = self.old(oldest, most - unkeyed.len(), prompts);
        for name in unkeyed.iter().chain(old.iter().map(|(_, name)| name)) {
            self.entries.remove(*name, |_| true);
            self.copies.remove(name);
        }
        for some in old.chunks(BLOCKS) {
            let spots: Vec<Spot> = some.iter().map(|(spot, _)| *spot).collect();
            self.release(&spots, prompts);
        }
        self.entries.fit();
        let shed = unkeyed.len() + old.len();
        self.counts.shed += shed as u64;
        shed
    }

    /// Keyed blocks of runs that are at least so old, up to a number. The last ones of a run come first, lest it be split.
    fn old(&self, oldest: u32, most: usize, prompts: &Prompts) -> Vec<(Spot, Name)> {
        let keyed = self.entries.iter().filter_map(|entry| Some((entry.spot()?, entry.name)));
        let mut keyed: Vec<(Spot, Name)> = keyed.collect();
        keyed.sort_unstable_by(|one, other| other.cmp(one));
        let mut old = Vec::new();
        let trees = keyed.chunk_by(|(one, _), (other, _)| Forest::same_tree(one.run, other.run));
        for some in trees.flat_map(|tree| tree.chunks(BLOCKS)) {
            if old.len() == most {
                break;
            }
            let tree = prompts.forest.read(Forest::tree_with(some[0].0.run));
            let is_old = |(spot, _): &&(Spot, Name)| {
                tree.find(*spot).is_some_and(|spot| prompts.uses.age(&tree.run(spot.run).used) >= oldest)
            };
            old.extend(some.iter().filter(is_old).take(most - old.len()));
        }
        old
    }
}
