//! Quantiles of times.

use serde::Serialize;

use crate::histogram::Histogram;

/// Quantiles in milliseconds, each off by at most 0.8 % of itself; the mean is exact.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// The mean.
    pub mean: f64,
    /// Half are at most this.
    pub p50: f64,
    /// Nine of ten are at most this.
    pub p90: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
}

impl Latency {
    pub(crate) fn of(histogram: &Histogram) -> Self {
        let ms = |nanos: f64| nanos / 1e6;
        let quantile = |part| ms(histogram.quantile(part));
        Self {
            mean: ms(histogram.mean()),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
        }
    }
}
