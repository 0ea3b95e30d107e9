//! Blocks of a part that no lookup sees any more, on their way out of the trees.

use super::forest::Forest;
use super::holders::Place;
use super::part::{Part, Prompts};
use super::tree::Spot;

/// Blocks that are given up with a tree locked: some microseconds, for which lookups in that tree wait.
pub(super) const BLOCKS: usize = 64;

/// A few blocks at a time. Others change the trees meanwhile.
pub(super) struct Leaving {
    place: Place,
    /// The last one is next.
    spots: Vec<Spot>,
}

impl Leaving {
    pub(super) fn new(part: Part) -> Self {
        Self { place: part.place(), spots: part.spots() }
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Says whether anything may be left.
    pub(super) fn step(&mut self, prompts: &Prompts) -> bool {
        let Some(next) = self.spots.last() else { return false };
        let number = Forest::tree_with(next.run);
        let mut tree = prompts.forest.write(number);
        for _ in 0..BLOCKS {
            let Some(spot) = self.spots.pop_if(|spot| Forest::tree_with(spot.run) == number) else { break };
            tree.leave(spot, self.place);
        }
        true
    }
}
