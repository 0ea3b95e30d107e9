//! A set of free ranges.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Disjoint ranges; adjacent ranges are merged. Allocation uses the smallest range that fits.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// The ends of the ranges by their starts.
    by_start: BTreeMap<u64, u64>,
    /// The lengths and starts of the ranges.
    by_length: BTreeSet<(u64, u64)>,
}

impl Ranges {
    /// Creates a set with one range.
    pub(crate) fn new(range: Range<u64>) -> Self {
        let mut ranges = Self::default();
        ranges.insert(range);
        ranges
    }

    /// Removes and returns `length` bytes, more than 0, that begin at a multiple of `alignment`.
    pub(crate) fn take(&mut self, length: u64, alignment: u64) -> Option<Range<u64>> {
        let (taken, from) = self.by_length.range((length, 0)..).find_map(|&(_, start)| {
            let end = self.by_start[&start];
            let aligned = start.checked_next_multiple_of(alignment)?;
            let taken = aligned..aligned.checked_add(length)?;
            (taken.end <= end).then_some((taken, start..end))
        })?;
        self.cut(from, &taken);
        Some(taken)
    }

    /// Removes `range`, which must be part of one of the ranges.
    pub(crate) fn remove(&mut self, range: &Range<u64>) {
        let found = self.by_start.range(..=range.start).next_back();
        let from = found.map(|(&start, &end)| start..end);
        debug_assert!(from.as_ref().is_some_and(|from| range.end <= from.end), "{range:?}");
        if let Some(from) = from {
            self.cut(from, range);
        }
    }

    /// Iterates over the ranges by their starts.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.by_start.iter().map(|(&start, &end)| start..end)
    }

    /// Returns the range that begins at `start`.
    pub(crate) fn starting_at(&self, start: u64) -> Option<Range<u64>> {
        self.by_start.get(&start).map(|&end| start..end)
    }

    /// Returns the range that ends at `end`.
    pub(crate) fn ending_at(&self, end: u64) -> Option<Range<u64>> {
        let (&start, &found) = self.by_start.range(..end).next_back()?;
        (found == end).then_some(start..end)
    }

    /// Adds a range, which must not overlap the set.
    pub(crate) fn insert(&mut self, mut range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        if let Some((&start, &end)) = self.by_start.range(..=range.start).next_back() {
            debug_assert!(end <= range.start, "{range:?} is free already");
            if end == range.start {
                self.drop_at(start);
                range.start = start;
            }
        }
        if let Some(&end) = self.by_start.get(&range.end) {
            self.drop_at(range.end);
            range.end = end;
        }
        self.add(range);
    }

    /// Returns the length of the longest range.
    pub(crate) fn longest(&self) -> u64 {
        self.by_length.last().map_or(0, |&(length, _)| length)
    }

    fn add(&mut self, range: Range<u64>) {
        self.by_length.insert((range.end - range.start, range.start));
        self.by_start.insert(range.start, range.end);
    }

    /// Removes `part` of the range `from` and keeps the rest on both sides.
    fn cut(&mut self, from: Range<u64>, part: &Range<u64>) {
        self.drop_at(from.start);
        for rest in [from.start..part.start, part.end..from.end] {
            if !rest.is_empty() {
                self.add(rest);
            }
        }
    }

    fn drop_at(&mut self, start: u64) {
        if let Some(end) = self.by_start.remove(&start) {
            self.by_length.remove(&(end - start, start));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn contents(ranges: &Ranges) -> Vec<(u64, u64)> {
        ranges.by_start.iter().map(|(&start, &end)| (start, end)).collect()
    }

    #[test]
    fn smallest_fit_is_taken_with_alignment() {
        let mut ranges = Ranges::new(10..100);
        ranges.insert(200..260);
        assert_eq!(ranges.take(50, 1), Some(200..250));
        assert_eq!(ranges.take(101, 1), None);
        assert_eq!(Ranges::new(1..101).take(50, 64), None);
        assert_eq!(ranges.take(30, 64), Some(64..94));
        assert_eq!(contents(&ranges), [(10, 64), (94, 100), (250, 260)]);
        ranges.insert(64..94);
        assert_eq!(contents(&ranges), [(10, 100), (250, 260)]);
        assert_eq!(ranges.longest(), 90);
    }

    /// A length, an alignment, and the number of a range to insert if there is no room.
    fn step() -> impl Strategy<Value = (u64, u64, usize)> {
        (1_u64..400, prop_oneof![Just(1_u64), Just(8), Just(64)], 0..100_usize)
    }

    proptest! {
        #[test]
        fn taken_ranges_are_disjoint_without_loss(
            steps in proptest::collection::vec(step(), 1..200),
        ) {
            const SIZE: u64 = 4096;
            let mut ranges = Ranges::new(0..SIZE);
            let mut taken: Vec<Range<u64>> = Vec::new();
            for (length, alignment, back) in steps {
                match ranges.take(length, alignment) {
                    Some(range) => {
                        prop_assert_eq!(range.end - range.start, length);
                        prop_assert!(range.start.is_multiple_of(alignment) && range.end <= SIZE);
                        let is_disjoint = |other: &Range<u64>| {
                            other.end <= range.start || range.end <= other.start
                        };
                        prop_assert!(taken.iter().all(is_disjoint));
                        taken.push(range);
                    }
                    None if !taken.is_empty() => {
                        ranges.insert(taken.swap_remove(back % taken.len()));
                    }
                    None => {}
                }
                let free: u64 = contents(&ranges).iter().map(|(start, end)| end - start).sum();
                let used: u64 = taken.iter().map(|range| range.end - range.start).sum();
                prop_assert_eq!(free + used, SIZE);
            }
            for range in taken {
                ranges.insert(range);
            }
            prop_assert_eq!(contents(&ranges), [(0, SIZE)]);
        }
    }
}
