//! Blocks of a part that no lookup sees any more, on their way out of the trees.

use super::forest::Forest;
use super::holders::Place;
use super::part::{Part, Prompts};
use super::tree::Spot;

/// Runs that are given up with a tree locked: some microseconds, for which lookups in that tree wait.
pub(super) const RUNS: usize = 32;

/// Goes from the blocks that lead to all others along the runs to the first blocks, a few runs at a time. Others change the
/// trees meanwhile, but a run that is held here stays, and the block before it too. Where it was left already, the way ends.
pub(super) struct Leaving {
    place: Place,
    /// The last one is next.
    starts: Vec<Spot>,
}

impl Leaving {
    pub(super) fn new(part: Part) -> Self {
        Self { place: part.place(), starts: part.starts() }
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Says whether anything may be left.
    pub(super) fn step(&mut self, prompts: &Prompts) -> bool {
        let Some(next) = self.starts.last() else { return false };
        let number = Forest::tree_with(next.run);
        let mut tree = prompts.forest.write(number);
        for _ in 0..RUNS {
            let Some(spot) = self.starts.pop_if(|spot| Forest::tree_with(spot.run) == number) else { break };
            self.starts.extend(tree.leave(spot, self.place));
        }
        true
    }
}
