//! Medians, quantiles, and numbers that are drawn.

/// Returns the median; not a number, if there are none.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    match numbers.len() {
        0 => f64::NAN,
        length => (numbers[(length - 1) / 2] + numbers[length / 2]) / 2.0,
    }
}

/// Returns the number below which this part of sorted ones lies; not a number, if there are none.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted.get((sorted.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN)
}

/// Ranks by Zipf's law: the first is drawn twice as often as the second and three times as often as
/// the third.
#[cfg(any(feature = "door", feature = "index", feature = "serve"))]
pub struct Zipf {
    /// The sum of the weights of the ranks up to each.
    up_to: Vec<f64>,
}

#[cfg(any(feature = "door", feature = "index", feature = "serve"))]
impl Zipf {
    /// Creates the law for so many ranks.
    pub fn new(ranks: usize) -> Self {
        let weights = (1..=ranks).map(|rank| 1.0 / rank as f64);
        let up_to = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Self { up_to: up_to.collect() }
    }

    /// Draws a rank, from 0; always 0 where there are none.
    pub fn draw(&self, rng: &mut fastrand::Rng) -> usize {
        let point = rng.f64() * self.up_to.last().copied().unwrap_or_default();
        let rank = self.up_to.partition_point(|&up_to| up_to < point);
        rank.min(self.up_to.len().saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_an_even_count_is_between_the_middle_two() {
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
        assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }
}
