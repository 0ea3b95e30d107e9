//! The overlap of every worker with a prompt.
//!
//! Without exceptions (see [`Disorder`]) the sets of holders along a prompt only shrink. So the deepest block of equal
//! sets is found by galloping and halving, and the number of probes grows with the number of distinct overlaps times the
//! logarithm of the depth, not with the depth, and not with the workers.

use super::blocks::Blocks;
use super::clock::Clock;
use super::disorder::{Disorder, Exceptions};
use super::holders::{Place, bit, places, word};
use crate::BlockKey;

/// How often a lookup starts over because something got out of order meanwhile, before it looks at block after block,
/// which needs no order.
const TRIES: usize = 3;

pub(super) struct Lookup<'a> {
    pub(super) blocks: &'a Blocks,
    pub(super) disorder: &'a Disorder,
    pub(super) clock: &'a Clock,
    pub(super) keys: &'a [BlockKey],
    /// Words of a set of places.
    pub(super) width: usize,
    /// Places that are not asked about, as bits: none of those beyond.
    pub(super) aside: &'a [u64],
}

impl Lookup<'_> {
    /// Fills in how many of the leading keys each worker holds, by place, for those that hold the first.
    pub(super) fn run(&self, sets: &mut Vec<u64>, depths: &mut [usize]) {
        depths.fill(0);
        if self.keys.is_empty() || self.width == 0 {
            return;
        }
        for _ in 0..TRIES {
            let epoch = self.disorder.epoch();
            let exceptions = self.disorder.exceptions(self.keys);
            self.search(sets, depths, exceptions.as_ref());
            if self.disorder.epoch() == epoch {
                return;
            }
            depths.fill(0);
        }
        self.walk(sets, depths);
    }

    fn search(&self, sets: &mut Vec<u64>, depths: &mut [usize], exceptions: Option<&Exceptions>) {
        self.everyone(sets);
        self.probe(0, sets, 0, 1);
        sets.drain(..self.width);
        let mut apart = Vec::new();
        if let Some(exceptions) = exceptions {
            let gaps = exceptions.gaps.iter().map(|(place, _)| place);
            for place in exceptions.hidden.iter().chain(&exceptions.tangled).chain(gaps) {
                if let Some(others) = sets.get_mut(word(*place)) {
                    if *others & bit(*place) != 0 && !exceptions.hidden.contains(place) {
                        apart.push(*place);
                    }
                    *others &= !bit(*place);
                }
            }
        }
        // Gallop: the set on top of the stack holds the block at `low`.
        let (mut low, mut step) = (0, 1);
        while sets.iter().any(|word| *word != 0) {
            let high = (low + step).min(self.keys.len());
            sets.resize(2 * self.width, 0);
            self.probe(high, sets, 0, 1);
            self.split(low, high, sets, 0, depths);
            sets.drain(..self.width);
            (low, step) = (high, 2 * step);
        }
        for place in apart {
            depths[place as usize] = self.alone(place, exceptions);
        }
    }

    /// The workers of set `at` hold the block at `low`, those of set `at + 1`, a subset of them, also the one at `high`.
    /// Tells the depths of those that are in the first only.
    fn split(&self, low: usize, high: usize, sets: &mut Vec<u64>, at: usize, depths: &mut [usize]) {
        let (upper, lower) = sets[at * self.width..].split_at(self.width);
        if upper == &lower[..self.width] {
            return;
        }
        if high == low + 1 {
            for (index, (upper, lower)) in upper.iter().zip(lower).enumerate() {
                let only = upper & !lower;
                places(&[only]).for_each(|place| depths[64 * index + place as usize] = high);
            }
            return;
        }
        let middle = low.midpoint(high);
        // Sets from here on: at, middle, high; then the same for each half on top.
        let top = sets.len() / self.width;
        sets.resize((top + 1) * self.width, 0);
        self.probe(middle, sets, at, top);
        // Under concurrent changes, who is seen at `high` was there at the middle too, at that moment.
        for index in 0..self.width {
            let deeper = sets[(at + 1) * self.width + index];
            sets[top * self.width + index] |= deeper;
        }
        // Each half wants its two sets side by side.
        let pair = sets.len() / self.width;
        sets.extend_from_within(at * self.width..(at + 1) * self.width);
        sets.extend_from_within(top * self.width..(top + 1) * self.width);
        self.split(low, middle, sets, pair, depths);
        sets.truncate(pair * self.width);
        sets.extend_from_within((at + 1) * self.width..(at + 2) * self.width);
        self.split(middle, high, sets, top, depths);
        sets.truncate(top * self.width);
    }

    /// The set to start from, and room for one more.
    fn everyone(&self, sets: &mut Vec<u64>) {
        sets.clear();
        sets.resize(2 * self.width, u64::MAX);
        sets.iter_mut().zip(self.aside).for_each(|(set, aside)| *set = !aside);
    }

    /// Writes the workers of set `from` that hold a block into set `into`; nobody holds the one after the last.
    fn probe(&self, index: usize, sets: &mut [u64], from: usize, into: usize) {
        let (before, rest) = sets.split_at_mut(into * self.width);
        let (from, into) = (&before[from * self.width..][..self.width], &mut rest[..self.width]);
        match self.keys.get(index) {
            Some(key) => self.blocks.intersect(*key, from, into, self.clock),
            None => into.fill(0),
        }
    }

    /// The overlap of one worker that may have gaps: between two of them its blocks are closed under parents.
    fn alone(&self, place: Place, exceptions: Option<&Exceptions>) -> usize {
        let holds = |index: usize| self.blocks.contains(self.keys[index], place);
        let tangled = exceptions.is_some_and(|exceptions| exceptions.tangled.contains(&place));
        if tangled {
            return (0..self.keys.len()).take_while(|index| holds(*index)).count();
        }
        let gaps = exceptions.iter().flat_map(|exceptions| &exceptions.gaps);
        let ends = gaps.filter(|(other, _)| *other == place).map(|(_, index)| *index).chain([self.keys.len()]);
        let mut start = 0;
        for end in ends {
            let (mut low, mut high) = (start, end);
            while low < high {
                let middle = low.midpoint(high);
                if holds(middle) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            if low < end || end == self.keys.len() || !holds(end) {
                return low;
            }
            start = end + 1;
        }
        start
    }

    /// Block after block, until nobody is left.
    fn walk(&self, sets: &mut Vec<u64>, depths: &mut [usize]) {
        let hidden = self.disorder.exceptions(&[]).map(|exceptions| exceptions.hidden).unwrap_or_default();
        self.everyone(sets);
        for index in 0..self.keys.len() {
            self.probe(index, sets, 0, 1);
            sets.drain(..self.width);
            if index == 0 {
                for place in hidden.iter().filter(|place| word(**place) < self.width) {
                    sets[word(*place)] &= !bit(*place);
                }
            }
            if sets.iter().all(|word| *word == 0) {
                return;
            }
            places(sets).for_each(|place| depths[place as usize] = index + 1);
            sets.resize(2 * self.width, 0);
        }
    }
}
