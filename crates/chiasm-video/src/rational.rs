//! Fractions as libavutil computes them.

/// Returns the fraction closest to `numerator / denominator` whose parts are at most `max`, as
/// `av_reduce` of `libavutil/rational.c` does. Both parts must be positive.
pub(crate) fn reduce(numerator: u64, denominator: u64, max: u64) -> (u64, u64) {
    let divisor = gcd(numerator, denominator).max(1);
    let mut numerator = numerator / divisor;
    let mut denominator = denominator / divisor;
    if numerator <= max && denominator <= max {
        return (numerator, denominator);
    }
    let mut previous = (0u128, 1u128);
    let mut best = (1u128, 0u128);
    let max = u128::from(max);
    while denominator != 0 {
        let quotient = u128::from(numerator / denominator);
        let rest = numerator % denominator;
        let next = (quotient * best.0 + previous.0, quotient * best.1 + previous.1);
        if next.0 > max || next.1 > max {
            let by_numerator = (max - previous.0).checked_div(best.0).unwrap_or(quotient);
            let by_denominator = (max - previous.1).checked_div(best.1).unwrap_or(u128::MAX);
            let steps = by_numerator.min(by_denominator);
            let whole = u128::from(numerator);
            let part = u128::from(denominator);
            let is_closer = part
                .checked_mul(2 * steps * best.1 + previous.1)
                .zip(whole.checked_mul(best.1))
                .is_some_and(|(left, right)| left > right);
            if is_closer {
                best = (steps * best.0 + previous.0, steps * best.1 + previous.1);
            }
            break;
        }
        previous = best;
        best = next;
        numerator = denominator;
        denominator = rest;
    }
    (best.0 as u64, best.1 as u64)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Returns `value * numerator / denominator`, rounded to the nearest and half away from zero, as
/// `av_rescale` does. Returns `None` on overflow or without a denominator.
pub(crate) fn rescale(value: i64, numerator: u64, denominator: u64) -> Option<i64> {
    if denominator == 0 {
        return None;
    }
    let product = u128::from(value.unsigned_abs()).checked_mul(u128::from(numerator))?;
    let denominator = u128::from(denominator);
    let magnitude = i64::try_from(product.checked_add(denominator / 2)? / denominator).ok()?;
    Some(if value < 0 { -magnitude } else { magnitude })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_durations_become_standard_rates() {
        assert_eq!(reduce(1_000_000_000, 33_333_333, 30_000), (30, 1));
        assert_eq!(reduce(1_000_000_000, 33_366_667, 30_000), (30_000, 1_001));
        assert_eq!(reduce(1_000_000_000, 41_708_333, 30_000), (24_000, 1_001));
        assert_eq!(reduce(1_000_000_000, 40_000_000, 30_000), (25, 1));
    }

    #[test]
    fn small_fractions_are_only_reduced() {
        assert_eq!(reduce(90_000, 3_003, 1 << 31), (30_000, 1_001));
    }

    #[test]
    fn rescaling_rounds_half_away_from_zero() {
        assert_eq!(rescale(3, 1, 2), Some(2));
        assert_eq!(rescale(-3, 1, 2), Some(-2));
        assert_eq!(rescale(i64::MAX, 3, 2), None);
    }
}
