//! Histograms of times that are written for each token, and can be read by more than Prometheus.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Parts of each doubling, so that quantiles are right within a tenth.
const PARTS: usize = 4;

/// Times in classes that double in length: `(start, 2 start]`, `(2 start, 4 start]` and so on, each in four parts of equal length,
/// with one class for all that is shorter and one for all that is longer. Prometheus is told of whole doublings.
///
/// Writing takes two atomic additions and no lock. Clones are the same histogram.
#[derive(Clone, Debug)]
pub(crate) struct LatencyHistogram(Arc<Classes>);

#[derive(Debug)]
struct Classes {
    /// A quarter of the upper end of the first class, in nanoseconds.
    unit: u64,
    counts: Box<[AtomicU64]>,
    nanoseconds: AtomicU64,
}

impl LatencyHistogram {
    /// Classes from `start` on, which doubles so many times.
    pub(crate) fn new(start: Duration, doublings: usize) -> Self {
        let unit = (nanoseconds(start) / PARTS as u64).max(1);
        let counts = (0..PARTS * doublings + 2).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Classes { unit, counts, nanoseconds: AtomicU64::new(0) }))
    }

    /// Counts a time.
    pub(crate) fn observe(&self, time: Duration) {
        self.observe_each(time, 1);
    }

    /// Counts a time so many times.
    pub(crate) fn observe_each(&self, time: Duration, times: u64) {
        let Classes { unit, counts, nanoseconds: sum } = &*self.0;
        let time = nanoseconds(time);
        let class = class_of(time, *unit).min(counts.len() - 1);
        counts[class].fetch_add(times, Ordering::Relaxed);
        sum.fetch_add(time.saturating_mul(times), Ordering::Relaxed);
    }

    /// What was counted so far.
    pub(crate) fn counts(&self) -> LatencyCounts {
        let counts = self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        LatencyCounts { unit: self.0.unit, counts }
    }
}

impl TypedMetric for LatencyHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for LatencyHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let LatencyCounts { unit, counts } = self.counts();
        let mut buckets = Vec::with_capacity(counts.len() / PARTS + 2);
        buckets.push((seconds(upper_end(0, unit)), counts[0]));
        let (doublings, beyond) = counts[1..].as_chunks::<PARTS>();
        for (at, parts) in doublings.iter().enumerate() {
            buckets.push((seconds(upper_end(PARTS * (at + 1), unit)), parts.iter().sum()));
        }
        buckets.push((f64::INFINITY, beyond.iter().sum()));
        let sum = seconds(self.0.nanoseconds.load(Ordering::Relaxed));
        encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// Counts of one histogram at a moment, or between two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LatencyCounts {
    unit: u64,
    counts: Vec<u64>,
}

impl LatencyCounts {
    /// What was counted after `before`, which is of the same histogram.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let counts = self.counts.iter().zip(&before.counts).map(|(now, then)| now.saturating_sub(*then)).collect();
        Self { unit: self.unit, counts }
    }

    /// How many times were counted.
    pub(crate) fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The time that this part of all, 0 to 1, does not exceed; `None` if nothing was counted. Within a class times are taken to be
    /// spread evenly; of those beyond the last one only its lower end is known.
    pub(crate) fn quantile(&self, part: f64) -> Option<Duration> {
        let total = self.total();
        let rank = (total as f64 * part).clamp(0.0, total as f64);
        let mut below = 0;
        let last = self.counts.len() - 1;
        for (class, &count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            if (below + count) as f64 >= rank {
                let lower = class.checked_sub(1).map_or(0, |before| upper_end(before, self.unit));
                let upper = if class == last { lower } else { upper_end(class, self.unit) };
                let within = (rank - below as f64) / count as f64;
                return Some(Duration::from_nanos(lower + ((upper - lower) as f64 * within) as u64));
            }
            below += count;
        }
        None
    }
}

/// The class of a time, counted from 0 and without an end.
fn class_of(time: u64, unit: u64) -> usize {
    // Upper ends belong to their classes, as Prometheus has it.
    let units = time.saturating_sub(1) / unit;
    if units < PARTS as u64 {
        return 0;
    }
    let doublings = (units.ilog2() - PARTS.ilog2()) as usize;
    1 + PARTS * doublings + (units >> doublings) as usize % PARTS
}

/// The longest time of a class, in nanoseconds; for the last one, which has no end, any number.
fn upper_end(class: usize, unit: u64) -> u64 {
    let Some(after) = class.checked_sub(1) else { return unit * PARTS as u64 };
    let (doublings, part) = (after / PARTS, after % PARTS);
    (unit * (PARTS + part + 1) as u64) << doublings
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
    use prometheus_client::registry::Registry;

    use super::*;

    fn encoded(metric: impl prometheus_client::registry::Metric) -> String {
        let mut registry = Registry::default();
        registry.register("t", "T", metric);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn prometheus_is_told_what_its_own_histogram_tells() {
        let ours = LatencyHistogram::new(Duration::from_millis(1), 3);
        let theirs = Histogram::new(exponential_buckets(0.001, 2.0, 4));
        let mut time = 1_u64;
        while time < 40_000_000 {
            for time in [time, time + 1, 1_000_000, 1_000_001, 8_000_000, 8_000_001] {
                ours.observe(Duration::from_nanos(time));
                theirs.observe(time as f64 / 1e9);
            }
            time = time * 5 / 3 + 1;
        }
        let (ours, theirs) = (encoded(ours), encoded(theirs));
        // Sums differ in their last digits.
        let lines =
            |text: &str| text.lines().filter(|line| !line.starts_with("t_sum")).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(lines(&ours), lines(&theirs));
        assert!(ours.contains("le=\"0.008\"") && ours.contains("le=\"+Inf\""), "{ours}");
    }

    #[test]
    fn quantiles_are_right_within_a_tenth() {
        let histogram = LatencyHistogram::new(Duration::from_micros(500), 13);
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
        let histogram = LatencyHistogram::new(Duration::from_millis(1), 4);
        let none = histogram.counts();
        assert_eq!(none.quantile(0.5), None);
        histogram.observe(Duration::from_secs(3600));
        let before = histogram.counts();
        assert_eq!(before.quantile(0.5), Some(Duration::from_millis(16)), "the last class has no end");
        histogram.observe(Duration::from_millis(3));
        let since = histogram.counts().since(&before);
        assert_eq!(since.total(), 1);
        assert!(since.quantile(1.0).unwrap() <= Duration::from_micros(3000));
    }
}
