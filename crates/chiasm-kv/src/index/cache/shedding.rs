//! Blocks that are forgotten to stay below the cap.

use super::{Cache, EngineHash, Position, Prompts, Trees};

/// Blocks that are looked at, or let go, with a tree locked: lookups wait for some microseconds.
const BLOCKS: usize = 256;

impl Cache {
    /// Forgets blocks of nodes that are at least so old, and those without a key, up to a number of hashes. What the engine says of
    /// them later is as of blocks that we never heard of. Returns how many.
    pub(in crate::index) fn shed(&mut self, oldest: u32, most: usize, prompts: &Prompts) -> usize {
        let unkeyed = self.entries.iter().filter(|entry| entry.position().is_none()).map(|entry| entry.hash);
        let unkeyed: Vec<EngineHash> = unkeyed.take(most).collect();
        self.counts.unkeyed -= unkeyed.len();
        let old = self.old(oldest, most - unkeyed.len(), prompts);
        for hash in unkeyed.iter().chain(old.iter().map(|(_, hash)| hash)) {
            self.entries.remove(*hash, |_| true);
            self.copies.remove(hash);
        }
        for some in old.chunks(BLOCKS) {
            let positions: Vec<Position> = some.iter().map(|(position, _)| *position).collect();
            self.release(&positions, prompts);
        }
        self.entries.fit();
        let shed = unkeyed.len() + old.len();
        self.counts.shed += shed as u64;
        shed
    }

    /// Keyed blocks of nodes that are at least so old, up to a number. The last ones of a node come first, lest it be split.
    fn old(&self, oldest: u32, most: usize, prompts: &Prompts) -> Vec<(Position, EngineHash)> {
        let keyed = self.entries.iter().filter_map(|entry| Some((entry.position()?, entry.hash)));
        let mut keyed: Vec<(Position, EngineHash)> = keyed.collect();
        keyed.sort_unstable_by(|one, other| other.cmp(one));
        let mut old = Vec::new();
        let trees = keyed.chunk_by(|(one, _), (other, _)| Trees::same_tree(one.node, other.node));
        for some in trees.flat_map(|tree| tree.chunks(BLOCKS)) {
            if old.len() == most {
                break;
            }
            let tree = prompts.trees.read(Trees::tree_with(some[0].0.node));
            let is_old = |(position, _): &&(Position, EngineHash)| {
                tree.find(*position).is_some_and(|position| prompts.uses.age(&tree.node(position.node).used) >= oldest)
            };
            old.extend(some.iter().filter(is_old).take(most - old.len()));
        }
        old
    }
}
