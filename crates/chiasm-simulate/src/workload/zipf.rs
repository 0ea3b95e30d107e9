//! Zipf-distributed random numbers.

use rand::Rng;

/// A Zipf distribution over ranks 0 to n − 1: rank r is drawn in proportion to `(r + 1)^-exponent`.
#[derive(Clone, Debug)]
pub(super) struct Zipf {
    /// The cumulative weights up to each rank.
    sums: Vec<f64>,
}

impl Zipf {
    /// Creates a distribution; 0 ranks count as one.
    pub(super) fn new(ranks: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weight = |rank: usize| (rank as f64).powf(-exponent);
        let add = |rank| {
            sum += weight(rank);
            sum
        };
        Self { sums: (1..=ranks.max(1)).map(add).collect() }
    }

    /// Draws a rank.
    pub(super) fn draw(&self, rng: &mut impl Rng) -> usize {
        let total = self.sums.last().copied().unwrap_or(1.0);
        let point = rng.random::<f64>() * total;
        self.sums.partition_point(|sum| *sum <= point).min(self.sums.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    #[test]
    fn ranks_are_drawn_with_zipf_frequencies() {
        let zipf = Zipf::new(4, 1.0);
        let mut rng = SmallRng::seed_from_u64(1);
        let mut drawn = [0.0; 4];
        (0..100_000).for_each(|_| drawn[zipf.draw(&mut rng)] += 1.0);
        let total = 1.0 + 1.0 / 2.0 + 1.0 / 3.0 + 1.0 / 4.0;
        for (rank, drawn) in (1..).zip(drawn) {
            let expected = 100_000.0 / f64::from(rank) / total;
            // Five standard deviations of the rarest rank.
            assert!((drawn - expected).abs() < 550.0, "rank {rank}: {drawn} instead of {expected}");
        }
    }
}
