//! Histograms of times that are cheap enough for each token, and also give quantiles.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// The number of classes per doubling. With 4, quantiles are exact within a tenth.
const PARTS: usize = 4;
/// A quarter of the upper end of the first class, in nanoseconds. The first class ends at half a
/// millisecond.
const UNIT_NANOS: u64 = 500_000 / PARTS as u64;
/// The number of doublings. The last class but one ends after half an hour.
const DOUBLINGS: usize = 22;

/// Counts of times, in buckets for Prometheus and in finer classes for quantiles.
///
/// The classes double in length from half a millisecond on, and each doubling has four parts of
/// equal length. An observation takes a search among the buckets, three atomic additions and no
/// lock. Clones share the histogram.
#[derive(Clone, Debug)]
pub struct LatencyHistogram(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    /// The upper bounds of all buckets except the last, in seconds.
    bounds: &'static [f64],
    buckets: Box<[AtomicU64]>,
    classes: Box<[AtomicU64]>,
    nanoseconds: AtomicU64,
}

impl LatencyHistogram {
    /// Creates a histogram. `bounds` are the buckets' upper bounds in seconds, ascending; a last
    /// bucket without a bound is added.
    pub fn new(bounds: &'static [f64]) -> Self {
        let zeros = |count| (0..count).map(|_| AtomicU64::new(0)).collect();
        let buckets = zeros(bounds.len() + 1);
        let classes = zeros(PARTS * DOUBLINGS + 2);
        Self(Arc::new(Counts { bounds, buckets, classes, nanoseconds: AtomicU64::new(0) }))
    }

    /// Counts a time.
    pub fn observe(&self, time: Duration) {
        self.observe_each(time, 1);
    }

    /// Counts a time `times` times.
    pub fn observe_each(&self, time: Duration, times: u64) {
        let Counts { bounds, buckets, classes, nanoseconds: sum } = &*self.0;
        let seconds = time.as_secs_f64();
        // The search begins with the smallest bucket, because most times are short.
        let bucket = bounds.iter().position(|bound| seconds <= *bound).unwrap_or(bounds.len());
        buckets[bucket].fetch_add(times, Ordering::Relaxed);
        let time = nanoseconds(time);
        classes[class_of(time).min(classes.len() - 1)].fetch_add(times, Ordering::Relaxed);
        sum.fetch_add(time.saturating_mul(times), Ordering::Relaxed);
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> LatencyCounts {
        LatencyCounts(load_all(&self.0.classes))
    }
}

impl TypedMetric for LatencyHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for LatencyHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let counts = load_all(&self.0.buckets);
        let bounds = self.0.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
        let sum = self.0.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

fn load_all(counts: &[AtomicU64]) -> Vec<u64> {
    counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
}

/// The counts of a histogram's classes at one time, or between two times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyCounts(Vec<u64>);

impl LatencyCounts {
    /// Returns the counts after `before`, which must be of the same histogram.
    pub fn since(&self, before: &Self) -> Self {
        Self(self.0.iter().zip(&before.0).map(|(now, then)| now.saturating_sub(*then)).collect())
    }

    /// Returns the number of observations.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the quantile `part`, from 0 to 1; `None` without observations.
    ///
    /// Interpolates linearly within a class. For the last class, returns its lower end.
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

/// Returns the class of a time in nanoseconds, counted from 0 and without a maximum. Upper ends
/// belong to their classes.
fn class_of(time: u64) -> usize {
    let units = time.saturating_sub(1) / UNIT_NANOS;
    if units < PARTS as u64 {
        return 0;
    }
    let doublings = (units.ilog2() - PARTS.ilog2()) as usize;
    1 + PARTS * doublings + (units >> doublings) as usize % PARTS
}

/// Returns the longest time of a class except the last, in nanoseconds.
fn upper_end(class: usize) -> u64 {
    let Some(index) = class.checked_sub(1) else { return UNIT_NANOS * PARTS as u64 };
    let doublings = index / PARTS;
    let part = index % PARTS;
    (UNIT_NANOS * (PARTS + part + 1) as u64) << doublings
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
    fn encoding_equals_prometheus_histogram() {
        let ours = LatencyHistogram::new(&BOUNDS);
        let theirs = Histogram::new(BOUNDS);
        let mut time = 1_u64;
        while time < 100_000_000 {
            for time in [time, time + 1, 1_000_000, 1_000_001, 2_500_000, 40_000_000, 40_000_001] {
                ours.observe(Duration::from_nanos(time));
                theirs.observe(time as f64 / 1e9);
            }
            time = time * 5 / 3 + 1;
        }
        let ours = encoded(ours);
        let theirs = encoded(theirs);
        // The sums differ in their last digits.
        let lines = |text: &str| -> Vec<String> {
            text.lines().filter(|line| !line.starts_with("t_sum")).map(str::to_owned).collect()
        };
        assert_eq!(lines(&ours), lines(&theirs));
        assert!(ours.contains("le=\"0.0025\"") && ours.contains("le=\"+Inf\""), "{ours}");
    }

    #[test]
    fn classes_are_contiguous() {
        for class in 0..PARTS * DOUBLINGS {
            let end = upper_end(class);
            assert_eq!((class_of(end), class_of(end + 1)), (class, class + 1), "{end}");
        }
    }

    #[test]
    fn quantiles_are_exact_within_a_tenth() {
        let histogram = LatencyHistogram::new(&BOUNDS);
        for microseconds in 1..=100_000 {
            histogram.observe(Duration::from_micros(microseconds));
        }
        let counts = histogram.counts();
        for part in [0.1, 0.5, 0.9, 0.99] {
            let quantile = counts.quantile(part).unwrap().as_secs_f64();
            assert!((quantile / (part * 0.1) - 1.0).abs() < 0.1, "{part}: {quantile}");
        }
        assert_eq!(counts.total(), 100_000);
    }

    #[test]
    fn difference_counts_only_later_times() {
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
