//! Workers whose overlap is more than the leading blocks of one group: several groups, windows, lower tiers.

use super::blocks::Blocks;
use super::clock::Clock;
use super::holders::{Place, bit, word};
use super::part::Part;
use super::source::{Source, Tier, Use};
use crate::BlockKey;

/// The places of one worker.
pub(super) struct Mixed {
    /// The one that stands for the worker.
    place: Place,
    /// Of groups that must hold all leading blocks.
    leading: Vec<Place>,
    /// Of groups that must hold the last so many.
    windows: Vec<(Place, usize)>,
    /// Of tiers that blocks are loaded from.
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
                (Tier::Device, Use::Leading) => mixed.leading.push(part.place()),
                (Tier::Device, Use::Last(blocks)) => mixed.windows.push((part.place(), blocks)),
                (Tier::Cpu | Tier::Storage, _) => mixed.lower.push(part.place()),
            }
        }
        // What several groups or a window need of lower tiers we don't claim to know.
        if first.role != Use::Leading || rest.iter().any(|(source, _)| source.group != first.group) {
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

    /// Of one block, by place; for windows alone if there is no other group.
    pub(super) fn holds(&self, holds: impl Fn(Place) -> bool) -> bool {
        match &self.leading[..] {
            [] => self.windows.iter().all(|(place, _)| holds(*place)),
            leading => leading.iter().all(|place| holds(*place)),
        }
    }

    /// How many leading blocks the engine can go on after: the most that suit every group, as its coordinator finds them.
    pub(super) fn overlap(&self, depths: &[usize], rows: &mut Rows<'_>) -> usize {
        let mut overlap = self.leading.iter().map(|place| depths[*place as usize]).min().unwrap_or(rows.keys.len());
        loop {
            let before = overlap;
            for (place, blocks) in &self.windows {
                let mut from = overlap;
                while from > 0 && overlap - from < *blocks {
                    from -= 1;
                    if !rows.holds(from, *place) {
                        overlap = from;
                    }
                }
            }
            if overlap == before {
                return overlap;
            }
        }
    }

    /// And the blocks after those that lower tiers hold, without a break.
    pub(super) fn with_lower_tiers(&self, overlap: usize, rows: &mut Rows<'_>) -> usize {
        let after = (overlap..rows.keys.len()).take_while(|at| self.lower.iter().any(|place| rows.holds(*at, *place)));
        overlap + after.count()
    }
}

/// The holders of blocks of a prompt that were asked for, each asked for once.
pub(super) struct Rows<'a> {
    pub(super) blocks: &'a Blocks,
    pub(super) clock: &'a Clock,
    pub(super) keys: &'a [BlockKey],
    /// Words of a set.
    pub(super) width: usize,
    pub(super) buffers: &'a mut RowBuffers,
}

/// Used again by the next lookup.
#[derive(Default)]
pub(super) struct RowBuffers {
    /// By index of the key: one more than the number of its row, or 0.
    numbers: Vec<u32>,
    /// As bits.
    rows: Vec<u64>,
    everyone: Vec<u64>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(
        blocks: &'a Blocks,
        clock: &'a Clock,
        keys: &'a [BlockKey],
        width: usize,
        buffers: &'a mut RowBuffers,
    ) -> Self {
        buffers.numbers.clear();
        buffers.numbers.resize(keys.len(), 0);
        buffers.rows.clear();
        buffers.everyone.resize(width, u64::MAX);
        Self { blocks, clock, keys, width, buffers }
    }

    fn holds(&mut self, index: usize, place: Place) -> bool {
        let RowBuffers { numbers, rows, everyone } = &mut *self.buffers;
        if numbers[index] == 0 {
            let start = rows.len();
            rows.resize(start + self.width, 0);
            self.blocks.intersect(self.keys[index], &everyone[..self.width], &mut rows[start..], self.clock);
            numbers[index] = (rows.len() / self.width) as u32;
        }
        let row = (numbers[index] - 1) as usize * self.width;
        rows[row + word(place)] & bit(place) != 0
    }
}
