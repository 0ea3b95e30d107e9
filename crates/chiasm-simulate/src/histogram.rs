//! A histogram that computes quantiles of many numbers in little memory.

/// The binary logarithm of the number of buckets per doubling.
const BUCKET_BITS: u32 = 6;
const BUCKETS: usize = ((u64::BITS - BUCKET_BITS + 1) << BUCKET_BITS) as usize;

/// A histogram of whole numbers, in buckets whose width grows with the numbers.
///
/// Each number below 128 has its own bucket; above, there are 64 buckets per doubling. A quantile
/// is the middle of its bucket, so its error is less than 1/128 (0.8 %). The size is 30 kB, however
/// many numbers are added.
#[derive(Clone)]
pub(crate) struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    /// Creates an empty histogram.
    pub(crate) fn new() -> Self {
        Self { buckets: vec![0; BUCKETS], count: 0, sum: 0.0 }
    }

    /// Adds `value` `times` times.
    pub(crate) fn add(&mut self, value: u64, times: u64) {
        self.buckets[bucket(value)] += times;
        self.count += times;
        self.sum += value as f64 * times as f64;
    }

    /// Adds all numbers of `other`.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(bucket, count)| *bucket += count);
        self.count += other.count;
        self.sum += other.sum;
    }

    /// Returns the number of values.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean of the values; 0 if there are none.
    pub(crate) fn mean(&self) -> f64 {
        self.sum / (self.count.max(1)) as f64
    }

    /// Returns the smallest number that at least this fraction (0 to 1) of all numbers don't
    /// exceed; 0 if there are none.
    pub(crate) fn quantile(&self, fraction: f64) -> f64 {
        let rank = ((self.count as f64 * fraction).ceil() as u64).max(1);
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

/// Returns the bucket of a value.
fn bucket(value: u64) -> usize {
    let octave = value.max(1).ilog2().saturating_sub(BUCKET_BITS);
    ((u64::from(octave) << BUCKET_BITS) + (value >> octave)) as usize
}

/// Returns the middle of a bucket.
fn middle(bucket: usize) -> f64 {
    let octave = (bucket >> BUCKET_BITS).saturating_sub(1);
    let low = (bucket - (octave << BUCKET_BITS)) as f64;
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
            [0.5, 0.9, 0.99, 1.0].map(|fraction| histogram.quantile(fraction)),
            [50.0, 90.0, 99.0, 100.0]
        );
        assert_eq!(histogram.mean(), 50.5);
    }

    #[test]
    fn every_number_has_a_bucket() {
        assert!(bucket(u64::MAX) < BUCKETS);
        assert_eq!(Histogram::new().quantile(0.5), 0.0);
    }

    proptest! {
        #[test]
        fn quantile_error_is_less_than_one_128th(
            mut values in prop::collection::vec(0..u64::MAX >> 8, 1..200),
            fraction in 0.0f64..1.0,
        ) {
            let mut histogram = Histogram::new();
            values.iter().for_each(|value| histogram.add(*value, 1));
            values.sort_unstable();
            let rank = (values.len() as f64 * fraction).ceil().max(1.0);
            let exact = values[rank as usize - 1] as f64;
            let found = histogram.quantile(fraction);
            prop_assert!((found - exact).abs() <= exact / 128.0, "{found} is far from {exact}");
        }
    }
}
