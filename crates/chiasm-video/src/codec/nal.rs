//! NAL units with lengths in front of them (ISO 14496-15), and parameter sets.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::picture::RandomAccess;
use crate::bytes::u16_at;
use crate::error::IndexError;

/// The maximum number of NAL units per sample; level 6.2 allows 600 slices.
const MAX_UNITS_PER_SAMPLE: usize = 4096;

/// Iterates over the NAL units of a sample. The last item is an error if the lengths do not add up.
pub(super) fn units(
    sample: &[u8],
    length_size: usize,
) -> impl Iterator<Item = Result<&[u8], IndexError>> {
    let mut rest = sample;
    let mut count = 0;
    std::iter::from_fn(move || {
        // libavcodec ignores fewer bytes than a length at the end.
        if rest.len() <= length_size {
            return None;
        }
        let (length, behind) = rest.split_at(length_size);
        let length = length.iter().fold(0, |value, &byte| value << 8 | usize::from(byte));
        count += 1;
        if length == 0 || length > behind.len() || count > MAX_UNITS_PER_SAMPLE {
            rest = &[];
            return Some(Err(IndexError::Pictures));
        }
        let (unit, behind) = behind.split_at(length);
        rest = behind;
        Some(Ok(unit))
    })
}

/// The maximum number of parameter sets in a decoder configuration; real ones have three.
const MAX_PARAMETER_SETS: usize = 64;

/// The parameter sets of a decoder configuration.
#[derive(Debug, Default)]
pub(super) struct ParameterSets<'a> {
    units: Vec<&'a [u8]>,
}

impl<'a> ParameterSets<'a> {
    /// Adds the NAL unit behind a 16-bit length at `at`. Returns the position behind it.
    pub(super) fn push_prefixed(&mut self, config: &'a [u8], at: usize) -> Option<usize> {
        let start = at.checked_add(2)?;
        let end = start.checked_add(u16_at(config, at)?.into())?;
        if self.units.len() == MAX_PARAMETER_SETS {
            return None;
        }
        self.units.push(config.get(start..end)?);
        Some(end)
    }

    /// Returns the units that fulfil a condition. Leaves out those without a byte.
    pub(super) fn all(&self, matches: impl Fn(&[u8]) -> bool) -> impl Iterator<Item = &'a [u8]> {
        self.units.iter().copied().filter(move |unit| !unit.is_empty() && matches(unit))
    }

    /// Returns the first unit whose header byte fulfils a condition.
    pub(super) fn find(&self, matches: impl Fn(u8) -> bool) -> Option<&'a [u8]> {
        self.units.iter().copied().find(|unit| unit.first().is_some_and(|&header| matches(header)))
    }
}

/// The parameter sets inside the samples of a stream.
///
/// Sets that repeat the decoder configuration change nothing. Others must be the same in front of
/// each safe start, or a cut that leaves out samples could also leave out a change.
#[derive(Debug)]
pub(super) struct InBandSets<'a> {
    config: &'a ParameterSets<'a>,
    /// The hash of the current sample's sets; 0 without any.
    current: u64,
    /// The hash of the first sample's sets.
    expected: Option<u64>,
    has_changes: bool,
}

impl<'a> InBandSets<'a> {
    pub(super) fn new(config: &'a ParameterSets<'a>) -> Self {
        Self { config, current: 0, expected: None, has_changes: false }
    }

    /// Adds a parameter set of the current sample. Returns `false` if the configuration has it.
    pub(super) fn add(&mut self, unit: &[u8]) -> bool {
        if self.config.units.contains(&unit) {
            return false;
        }
        let mut hasher = DefaultHasher::new();
        (self.current, unit).hash(&mut hasher);
        self.current = hasher.finish() | 1;
        true
    }

    /// Ends the current sample.
    pub(super) fn end_sample(&mut self, start: RandomAccess) {
        let sets = std::mem::take(&mut self.current);
        let expected = *self.expected.get_or_insert(sets);
        self.has_changes |= match start {
            RandomAccess::No => sets != 0,
            RandomAccess::Closed | RandomAccess::Open => sets != expected,
        };
    }

    /// Returns `true` if the sets differ between starts, or change behind a start.
    pub(super) fn has_changes(&self) -> bool {
        self.has_changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_split_by_their_lengths() {
        let split: Vec<_> = units(&[0, 1, 7, 0, 2, 8, 9], 2).collect();
        assert_eq!(split, [Ok(&[7][..]), Ok(&[8, 9][..])]);
    }

    #[test]
    fn length_past_the_end_is_an_error() {
        assert_eq!(units(&[0, 3, 7, 0], 2).last(), Some(Err(IndexError::Pictures)));
        assert_eq!(units(&[0, 0, 7], 2).last(), Some(Err(IndexError::Pictures)));
    }

    #[test]
    fn repeated_configuration_is_no_change() {
        let config = ParameterSets { units: vec![&[7, 1], &[8, 2]] };
        let mut sets = InBandSets::new(&config);
        sets.end_sample(RandomAccess::Closed);
        sets.add(&[8, 2]);
        sets.end_sample(RandomAccess::No);
        assert!(!sets.has_changes());
        sets.add(&[8, 3]);
        sets.end_sample(RandomAccess::Closed);
        assert!(sets.has_changes());
    }
}
