//! Histograms of times that are written for each token, and can be read by more than Prometheus.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Parts of each doubling, so that quantiles are right within a tenth.
const PARTS: usize = 4;
/// A quarter of the upper end of the first class, in nanoseconds: half a millisecond.
const UNIT: u64 = 500_000 / PARTS as u64;
/// The last class but one ends after half an hour.
const DOUBLINGS: usize = 22;

/// Counts of times, in buckets for Prometheus, and in finer classes for who wants quantiles: these
/// double in length from half a millisecond on, each doubling in four parts of equal length.
///
/// Writing takes a search among the buckets and three atomic additions, and no lock. Clones are the
/// same histogram.
#[derive(Clone, Debug)]
pub struct LatencyHistogram(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    /// Upper ends of the buckets but the last, in seconds.
    bounds: &'static [f64],
    buckets: Box<[AtomicU64]>,
    classes: Box<[AtomicU64]>,
    nanoseconds: AtomicU64,
}

impl LatencyHistogram {
    /// Buckets with these upper ends, in seconds and in ascending order, and one for all that is
    /// longer.
    pub fn new(bounds: &'static [f64]) -> Self {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        let (buckets, classes) = (zeros(bounds.len() + 1), zeros(PARTS * DOUBLINGS + 2));
        Self(Arc::new(Counts { bounds, buckets, classes, nanoseconds: AtomicU64::new(0) }))
    }

    /// Counts a time.
    pub fn observe(&self, time: Duration) {
        self.observe_each(time, 1);
    }

    /// Counts a time so many times.
    pub fn observe_each(&self, time: Duration, times: u64) {
        let Counts { bounds, buckets, classes, nanoseconds: sum } = &*self.0;
        let seconds = time.as_secs_f64();
        // Most times are short.
        let bucket = bounds.iter().position(|bound| seconds <= *bound).unwrap_or(bounds.len());
        buckets[bucket].fetch_add(times, Ordering::Relaxed);
        let time = nanoseconds(time);
        classes[class_of(time).min(classes.len() - 1)].fetch_add(times, Ordering::Relaxed);
        sum.fetch_add(time.saturating_mul(times), Ordering::Relaxed);
    }

    /// What was counted so far.
    pub fn counts(&self) -> LatencyCounts {
        LatencyCounts(loaded(&self.0.classes))
    }
}

impl TypedMetric for LatencyHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for LatencyHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let counts = loaded(&self.0.buckets);
        let bounds = self.0.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
        let sum = self.0.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

fn loaded(counts: &[AtomicU64]) -> Vec<u64> {
    counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
}

/// Counts of one histogram's classes at a moment, or between two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyCounts(Vec<u64>);

impl LatencyCounts {
    /// What was counted after `before`, which is of the same histogram.
    pub fn since(&self, before: &Self) -> Self {
        Self(self.0.iter().zip(&before.0).map(|(now, then)| now.saturating_sub(*then)).collect())
    }

    /// How many times were counted.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The time that this part of all, 0 to 1, does not exceed; `None` if nothing was counted.
    /// Within a class times are taken to be spread evenly; of those beyond the last one only its
    /// lower end is known.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let total = self.total();
        let rank = (total as f64 * part).clamp(0.0, total as f64);
        let mut below = 0;
        let last = self.0.len() - 1;
        for (class, &count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            if (below + count) as f64 >= rank {
                let lower = class.checked_sub(1).map_or(0, upper_end);
                let upper = if class == last { lower } else { upper_end(class) };
                let within = (rank - below as f64) / count as f64;
                return Some(Duration::from_nanos(
                    lower + ((upper - lower) as f64 * within) as u64,
                ));
            }
            below += count;
        }
        None
    }
}

/// The class of a time, counted from 0 and without an end. Upper ends belong to their classes.
fn class_of(time: u64) -> usize {
    let units = time.saturating_sub(1) / UNIT;
    if units < PARTS as u64 {
        return 0;
    }
    let doublings = (units.ilog2() - PARTS.ilog2()) as usize;
    1 + PARTS * doublings + (units >> doublings) as usize % PARTS
}

/// The longest time of a class that has an end, in nanoseconds.
fn upper_end(class: usize) -> u64 {
    let Some(after) = class.checked_sub(1) else { return UNIT * PARTS as u64 };
    let (doublings, part) = (after / PARTS, after % PARTS);
    (UNIT * (PARTS + part + 1) as u64) << doublings
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::metrics::histogram::Histogram;
    use prometheus_client::registry::{Metric, Registry};

    use super::*;

    const BOUNDS: [f64; 4] = [0.001, 0.0025, 0.01, 0.04];

    fn encoded(metric: impl Metric) -> String {
        let mut registry = Registry::default();
        registry.register("t", "T", metric);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn prometheus_is_told_what_its_own_histogram_tells() {
        let (ours, theirs) = (LatencyHistogram::new(&BOUNDS), Histogram::new(BOUNDS));
        let mut time = 1_u64;
        while time < 100_000_000 {
            for time in [time, time + 1, 1_000_000, 1_000_001, 2_500_000, 40_000_000, 40_000_001] {
                ours.observe(Duration::from_nanos(time));
                theirs.observe(time as f64 / 1e9);
            }
            time = time * 5 / 3 + 1;
        }
        let (ours, theirs) = (encoded(ours), encoded(theirs));
        // Sums differ in their last digits.
        let lines = |text: &str| -> Vec<String> {
            text.lines().filter(|line| !line.starts_with("t_sum")).map(str::to_owned).collect()
        };
        assert_eq!(lines(&ours), lines(&theirs));
        assert!(ours.contains("le=\"0.0025\"") && ours.contains("le=\"+Inf\""), "{ours}");
    }

    #[test]
    fn each_class_begins_where_the_one_before_it_ends() {
        for class in 0..PARTS * DOUBLINGS {
            let end = upper_end(class);
            assert_eq!((class_of(end), class_of(end + 1)), (class, class + 1), "{end}");
        }
    }

    #[test]
    fn quantiles_are_right_within_a_tenth() {
        let histogram = LatencyHistogram::new(&BOUNDS);
        for microseconds in 1..=100_000 {
            histogram.observe(Duration::from_micros(microseconds));
        }
        let counts = histogram.counts();
        for part in [0.1, 0.5, 0.9, 0.99] {
            let found = counts.quantile(part).unwrap().as_secs_f64();
            assert!((found / (part * 0.1) - 1.0).abs() < 0.1, "{part}: {found}");
        }
        assert_eq!(counts.total(), 100_000);
    }

    #[test]
    fn what_lies_between_two_moments_is_told_alone() {
        let histogram = LatencyHistogram::new(&BOUNDS);
        let none = histogram.counts();
        assert_eq!(none.quantile(0.5), None);
        histogram.observe(Duration::from_secs(36_000));
        let before = histogram.counts();
        let longest = Duration::from_nanos(upper_end(PARTS * DOUBLINGS));
        assert_eq!(before.quantile(0.5), Some(longest), "the last class has no end");
        histogram.observe_each(Duration::from_millis(3), 2);
        let since = histogram.counts().since(&before);
        assert_eq!(since.total(), 2);
        assert!(since.quantile(1.0).unwrap() <= Duration::from_micros(3000));
    }
}
