//! Quantiles of many numbers in little memory.

/// Buckets per doubling, as a power of two.
const FINENESS: u32 = 6;
const BUCKETS: usize = ((u64::BITS - FINENESS + 1) << FINENESS) as usize;

/// Counts of whole numbers in buckets whose width grows with the numbers: below 128 each has its
/// own, above there are 64 to a doubling. A quantile is the middle of its bucket, so that it is off
/// by less than 1/128 (0.8 %) of itself. 30 kB, however many numbers.
#[derive(Clone)]
pub(crate) struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    pub(crate) fn new() -> Self {
        Self { buckets: vec![0; BUCKETS], count: 0, sum: 0.0 }
    }

    /// Counts `value` so many times.
    pub(crate) fn add(&mut self, value: u64, times: u64) {
        self.buckets[bucket(value)] += times;
        self.count += times;
        self.sum += value as f64 * times as f64;
    }

    /// Counts all that `other` has counted.
    pub(crate) fn add_all(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(bucket, count)| *bucket += count);
        self.count += other.count;
        self.sum += other.sum;
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    pub(crate) fn mean(&self) -> f64 {
        self.sum / (self.count.max(1)) as f64
    }

    /// The smallest number that at least this part (0 to 1) of all numbers don't exceed; 0 when
    /// there are none.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let rank = ((self.count as f64 * part).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle(bucket);
            }
        }
        0.0
    }
}

fn bucket(value: u64) -> usize {
    let octave = value.max(1).ilog2().saturating_sub(FINENESS);
    ((u64::from(octave) << FINENESS) + (value >> octave)) as usize
}

fn middle(bucket: usize) -> f64 {
    let octave = (bucket >> FINENESS).saturating_sub(1);
    let low = (bucket - (octave << FINENESS)) as f64;
    let width = (octave as f64).exp2();
    low * width + (width - 1.0) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_numbers_are_exact() {
        let mut histogram = Histogram::new();
        (1..=100).for_each(|value| histogram.add(value, 1));
        assert_eq!(
            [0.5, 0.9, 0.99, 1.0].map(|part| histogram.quantile(part)),
            [50.0, 90.0, 99.0, 100.0]
        );
        assert_eq!(histogram.mean(), 50.5);
    }

    #[test]
    fn there_is_a_bucket_for_every_number() {
        assert!(bucket(u64::MAX) < BUCKETS);
        assert_eq!(Histogram::new().quantile(0.5), 0.0);
    }

    proptest! {
        #[test]
        fn a_quantile_is_off_by_less_than_one_part_in_128(mut values in prop::collection::vec(0..u64::MAX >> 8, 1..200), part in 0.0f64..1.0) {
            let mut histogram = Histogram::new();
            values.iter().for_each(|value| histogram.add(*value, 1));
            values.sort_unstable();
            let rank = (values.len() as f64 * part).ceil().max(1.0);
            let exact = values[rank as usize - 1] as f64;
            let found = histogram.quantile(part);
            prop_assert!((found - exact).abs() <= exact / 128.0, "{found} is far from {exact}");
        }
    }
}
