//! Names that lead to a worker's blocks without a table of all of them.
//!
//! Of the blocks that are held by their names in runs, each one is anchored or comes before one that is held. Engines go on
//! after a prompt's last block or where prompts part, and evict the last block first, then that before it: so what they name is
//! anchored, or before what was removed last. Anything else is searched for along the way from the anchors to the first blocks.

use super::{Entry, Name};
use crate::index::table::Table;
use crate::index::tree::Spot;

/// Blocks that can be looked at in the time in which a table would have taken in or given up one.
const LOOKS: usize = 16;

/// Anchors of one part: names of blocks, with where they are, from which ways lead to all others.
pub(super) struct Anchors {
    /// Anchored blocks, where they were at that time. Some may not be held any more, some names may be there several times:
    /// whoever uses one looks.
    spots: Table<Entry>,
    /// The block before the one that was removed last.
    next: Option<(Name, Spot)>,
    /// How many of `spots` were left when those that led nowhere were last taken out.
    swept: usize,
    /// Number of blocks that were looked at in searches, beyond what a table of all blocks would have cost meanwhile.
    search_cost: usize,
}

impl Default for Anchors {
    fn default() -> Self {
        Self { spots: Table::new(), next: None, swept: 0, search_cost: 0 }
    }
}

impl Anchors {
    pub(super) fn get(&self, name: Name) -> Option<Spot> {
        match self.next {
            Some((next, spot)) if next == name => Some(spot),
            _ => self.spots.get(name, |_| true).and_then(Entry::spot),
        }
    }

    pub(super) fn insert(&mut self, name: Name, spot: Spot) {
        self.spots.entry(name, |entry| entry.spot() == Some(spot), || Entry::new(name, Some(spot)));
    }

    /// Removes every anchor called `name` for which `is_wanted` holds.
    pub(super) fn remove(&mut self, name: Name, is_wanted: impl Fn(Spot) -> bool) {
        while self.spots.remove(name, |entry| entry.spot().is_some_and(&is_wanted)).is_some() {}
    }

    /// The one that leads to the block that will be removed next, most likely.
    pub(super) fn take_next(&mut self) -> Option<(Name, Spot)> {
        self.next.take()
    }

    pub(super) fn set_next(&mut self, next: Option<(Name, Spot)>) {
        self.next = next;
    }

    pub(super) fn spots(&self) -> impl Iterator<Item = Spot> {
        self.spots.iter().filter_map(Entry::spot).chain(self.next.map(|(_, spot)| spot))
    }

    /// Whether there are many more than there were left of them last time.
    pub(super) fn want_sweeping(&self) -> bool {
        self.spots.len() > 2 * self.swept + 64
    }

    /// Takes out those that lead nowhere.
    pub(super) fn sweep(&mut self, mut leads: impl FnMut(Name, Spot) -> bool) {
        let spots = self.spots.iter().filter_map(|entry| Some((entry.name, entry.spot()?)));
        let gone: Vec<_> = spots.filter(|(name, spot)| !leads(*name, *spot)).collect();
        gone.into_iter().for_each(|(name, spot)| self.remove(name, |other| other == spot));
        self.swept = self.spots.len();
    }

    /// Lowers the cost counted against searching by what a table of all blocks would have spent on these, which came or
    /// went.
    pub(super) fn credit(&mut self, blocks: usize) {
        self.search_cost = self.search_cost.saturating_sub(LOOKS * blocks);
    }

    /// Counts a search that looks at so many blocks. Says whether a table of all of them would cost less in the long run.
    pub(super) fn charge(&mut self, blocks: usize) -> bool {
        self.search_cost += blocks.max(LOOKS);
        self.search_cost > 8 * blocks + SLACK
    }

    pub(super) fn bytes(&self) -> usize {
        self.spots.bytes()
    }
}

/// Whether so many removals since all blocks got entries are enough to try again without: what the change takes is little
/// beside what they took.
pub(super) fn are_enough(removals: usize, blocks: usize) -> bool {
    removals > PATIENCE * (blocks + SLACK / LOOKS)
}

const PATIENCE: usize = if cfg!(test) { 1 } else { 2 * LOOKS };

/// Looks that searches may take before they are compared with a table. Smaller in tests, so that both ways are gone.
const SLACK: usize = if cfg!(test) { 64 } else { 1 << 14 };
