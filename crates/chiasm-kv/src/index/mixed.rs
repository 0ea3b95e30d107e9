//! Workers whose overlap is more than the leading blocks of one group: several groups, windows, lower tiers.

use super::holders::Place;
use super::part::Part;
use super::source::{Need, Source, Tier};
use super::tree::{RunId, Spot, Tree};

/// The places of one worker.
#[derive(Clone)]
pub(super) struct Mixed {
    /// The one that stands for the worker.
    place: Place,
    /// Places of groups that must hold all leading blocks.
    leading: Vec<Place>,
    /// Places of groups that must hold the last blocks, and how many of them.
    windows: Vec<(Place, usize)>,
    /// Places of tiers that blocks are loaded from.
    lower: Vec<Place>,
}

impl Mixed {
    /// `None` if the first part says it all.
    pub(super) fn of(parts: &[(Source, Part)]) -> Option<Self> {
        let ((first, part), rest) = parts.split_first()?;
        if rest.is_empty() && first.is_chain() {
            return None;
        }
        let mut mixed = Self { place: part.place(), leading: Vec::new(), windows: Vec::new(), lower: Vec::new() };
        for (source, part) in parts {
            match (source.tier, source.role) {
                (Tier::Device, Need::Leading) => mixed.leading.push(part.place()),
                (Tier::Device, Need::Last(blocks)) => mixed.windows.push((part.place(), blocks)),
                (Tier::Cpu | Tier::Storage, _) => mixed.lower.push(part.place()),
            }
        }
        // What several groups or a window need of lower tiers we don't claim to know.
        if first.role != Need::Leading || rest.iter().any(|(source, _)| source.group != first.group) {
            mixed.lower.clear();
        }
        Some(mixed)
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    pub(super) fn has_lower(&self) -> bool {
        !self.lower.is_empty()
    }

    /// How many leading blocks the engine can go on after: the most that suit every group, as its coordinator finds them.
    pub(super) fn overlap(&self, depths: &[u32], path: &Path<'_>) -> usize {
        let mut overlap = self.leading.iter().map(|place| depths[*place as usize] as usize).min().unwrap_or(path.len);
        loop {
            let before = overlap;
            for (place, blocks) in &self.windows {
                let mut from = overlap;
                while from > 0 && overlap - from < *blocks {
                    from -= 1;
                    if !path.holds(from, *place) {
                        overlap = from;
                    }
                }
            }
            if overlap == before {
                return overlap;
            }
        }
    }

    /// Adds the blocks after the overlap that lower tiers hold, without a break.
    pub(super) fn with_lower_tiers(&self, overlap: usize, path: &Path<'_>) -> usize {
        let after = (overlap..path.len).take_while(|at| self.lower.iter().any(|place| path.holds(*at, *place)));
        overlap + after.count()
    }
}

/// The blocks of a prompt that are in the tree.
pub(super) struct Path<'a> {
    pub(super) tree: &'a Tree,
    /// The runs of the prompt, with the number of blocks before each.
    pub(super) runs: &'a [(RunId, usize)],
    /// Blocks that somebody may hold.
    pub(super) len: usize,
}

impl Path<'_> {
    fn holds(&self, index: usize, place: Place) -> bool {
        let run = self.runs.partition_point(|(_, before)| *before <= index);
        run.checked_sub(1).is_some_and(|run| {
            let (run, before) = self.runs[run];
            self.tree.holds(Spot { run, at: (index - before) as u32 }, place)
        })
    }
}
