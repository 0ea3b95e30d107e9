//! Medians, quantiles, and Zipf's law.

/// Returns the median; NaN for no numbers.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => f64::NAN,
        length => (numbers[(length - 1) / 2] + numbers[length / 2]) / 2.0,
    }
}

/// Returns the quantile of sorted numbers; NaN for no numbers. `part` is from 0 to 1.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted.get((sorted.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN)
}

/// Ranks by Zipf's law: the first is drawn twice as often as the second and three times as often as
/// the third.
#[cfg(any(feature = "door", feature = "index"))]
pub struct Zipf {
    /// The sum of the weights of each rank and those before it.
    cumulative: Vec<f64>,
}

#[cfg(any(feature = "door", feature = "index"))]
impl Zipf {
    /// Creates the law for this number of ranks.
    pub fn new(ranks: usize) -> Self {
        let weights = (1..=ranks).map(|rank| 1.0 / rank as f64);
        let cumulative = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self { cumulative: cumulative.collect() }
    }

    /// Draws a rank, starting at 0; always 0 without ranks.
    pub fn draw(&self, rng: &mut fastrand::Rng) -> usize {
        let point = rng.f64() * self.cumulative.last().copied().unwrap_or_default();
        let rank = self.cumulative.partition_point(|&cumulative| cumulative < point);
        rank.min(self.cumulative.len().saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_even_count_is_mean_of_middle_two() {
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
        assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }
}
