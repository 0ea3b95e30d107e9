//! Quantiles of durations.

use serde::Serialize;

use crate::histogram::Histogram;

/// The mean and quantiles of durations, in milliseconds. The mean is exact, quantiles have an error
/// of at most 0.8 %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
}

impl Latency {
    /// Computes the quantiles of a histogram of nanoseconds.
    pub(crate) fn from_histogram(histogram: &Histogram) -> Self {
        let ms = |nanos: f64| nanos / 1e6;
        let quantile = |fraction| ms(histogram.quantile(fraction));
        Self {
            mean: ms(histogram.mean()),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
        }
    }
}
