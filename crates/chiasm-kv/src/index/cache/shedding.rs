//! Blocks that are forgotten to stay below the cap. They are looked for and let go some at a time,
//! with events in between.

use super::removal::Removal;
use super::{Cache, EngineHash, Position, Prompts, Trees};

/// Entries that are looked at with the worker locked: some hundred microseconds, for which its
/// events wait.
const ENTRIES: usize = 4096;
/// Blocks that are looked at with a tree locked: some microseconds, for which lookups in that tree
/// wait.
const BLOCKS: usize = 256;

/// A hash that may be forgotten, with where its block was when it was looked at; nowhere if it had
/// no key.
pub(in crate::index) type Old = (Option<Position>, EngineHash);

impl Cache {
    /// Adds those that have no key, and those of nodes that are at least so old, of some entries
    /// from the hash `from` on. Returns the hash to go on with; `None` after the last one.
    pub(in crate::index) fn find_old(
        &self,
        from: EngineHash,
        oldest: u32,
        prompts: &Prompts,
        old: &mut Vec<Old>,
    ) -> Option<EngineHash> {
        let (mut keyed, mut looked, mut next) = (Vec::new(), 0, None);
        for entry in self.entries.iter_from(from) {
            if looked == ENTRIES {
                next = Some(entry.hash);
                break;
            }
            looked += 1;
            match entry.position() {
                Some(position) => keyed.push((position, entry.hash)),
                None => old.push((None, entry.hash)),
            }
        }
        keyed.sort_unstable_by_key(|(position, _)| Trees::tree_with(position.node));
        let trees = keyed.chunk_by(|(one, _), (other, _)| Trees::same_tree(one.node, other.node));
        for some in trees.flat_map(|tree| tree.chunks(BLOCKS)) {
            let tree = prompts.trees.read(Trees::tree_with(some[0].0.node));
            let is_old = |(position, _): &&(Position, EngineHash)| {
                tree.find(*position)
                    .is_some_and(|found| prompts.uses.age(&tree.node(found.node).used) >= oldest)
            };
            old.extend(some.iter().filter(is_old).map(|(position, hash)| (Some(*position), *hash)));
        }
        next
    }

    /// Forgets hashes that are still what they were when they were found. What the engine says of
    /// them later is as of blocks that we never heard of. Returns how many.
    pub(in crate::index) fn shed(&mut self, old: &[Old], prompts: &Prompts) -> usize {
        let before = self.len();
        let mut removal = Removal::new(prompts, self.holder);
        for &(position, hash) in old {
            let removed =
                self.entries.remove_if(hash, |_| true, |entry| entry.position() == position);
            let Some(Ok(entry)) = removed else { continue };
            if entry.has_several() {
                self.copies.remove(&hash);
            }
            match position {
                Some(position) => self.release_one(position, &mut removal),
                None => self.counts.unkeyed -= 1,
            }
        }
        removal.finish();
        let shed = before - self.len();
        self.counts.shed += shed as u64;
        shed
    }

    /// Gives back memory after blocks were shed.
    pub(in crate::index) fn fit(&mut self) {
        self.entries.fit();
    }
}
