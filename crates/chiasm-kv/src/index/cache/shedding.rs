//! Shedding of one cache's blocks, in small steps between which events can be applied.

use super::removal::Removal;
use super::{Cache, EngineHash, Position, Prompts, Trees};

/// The number of entries examined with the worker locked: some hundred microseconds, for which its
/// events wait.
const ENTRIES_PER_LOCK: usize = 4096;
/// The number of blocks examined with a tree locked: some microseconds, for which lookups in that
/// tree wait.
const BLOCKS_PER_LOCK: usize = 256;

/// A hash that may be shed, with the position of its block when it was examined; `None` if the
/// block had no key.
pub(in crate::index) type ShedCandidate = (Option<Position>, EngineHash);

impl Cache {
    /// Examines [`ENTRIES_PER_LOCK`] entries, starting at the hash `from`. Pushes entries without a
    /// key, and entries of nodes with an age of at least `min_age`.
    ///
    /// Returns the hash to continue with, or `None` after the last entry.
    pub(in crate::index) fn find_shed_candidates(
        &self,
        from: EngineHash,
        min_age: u32,
        prompts: &Prompts,
        candidates: &mut Vec<ShedCandidate>,
    ) -> Option<EngineHash> {
        let mut keyed = Vec::new();
        let mut next = None;
        for (examined, entry) in self.entries.iter_from(from).enumerate() {
            if examined == ENTRIES_PER_LOCK {
                next = Some(entry.hash);
                break;
            }
            match entry.position() {
                Some(position) => keyed.push((position, entry.hash)),
                None => candidates.push((None, entry.hash)),
            }
        }
        keyed.sort_unstable_by_key(|(position, _)| Trees::tree_with(position.node));
        let trees = keyed.chunk_by(|(one, _), (other, _)| Trees::same_tree(one.node, other.node));
        for chunk in trees.flat_map(|tree| tree.chunks(BLOCKS_PER_LOCK)) {
            let tree = prompts.trees.read(Trees::tree_with(chunk[0].0.node));
            let is_old = |(position, _): &&(Position, EngineHash)| {
                tree.find(*position)
                    .is_some_and(|found| prompts.uses.age(&tree.node(found.node).used) >= min_age)
            };
            let old = chunk.iter().filter(is_old);
            candidates.extend(old.map(|(position, hash)| (Some(*position), *hash)));
        }
        next
    }

    /// Sheds the candidates that have not changed since they were found. Returns the number shed.
    ///
    /// Later events about these hashes are handled like events about unknown blocks.
    pub(in crate::index) fn shed(
        &mut self,
        candidates: &[ShedCandidate],
        prompts: &Prompts,
    ) -> usize {
        let before = self.len();
        let mut removal = Removal::new(prompts, self.holder);
        for &(position, hash) in candidates {
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

    /// Frees memory after blocks were shed.
    pub(in crate::index) fn shrink(&mut self) {
        self.entries.shrink();
    }
}
