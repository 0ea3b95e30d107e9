//! The length of a resampled recording.

/// Returns the number of samples after resampling with torchaudio, as vLLM does by default.
///
/// Follows `_apply_sinc_resample_kernel` of `torchaudio/functional/functional.py`: the rates are
/// divided by their greatest common divisor, and the quotient is rounded to 32 bits before it is
/// rounded up. `None` for lengths and rates that a float of 64 bits does not hold exactly.
pub(crate) fn resampled_len(samples: u64, from: u32, to: u32) -> Option<u64> {
    const MAX_EXACT: u64 = 1 << 53;
    if from == to {
        return Some(samples);
    }
    let divisor = gcd(from, to);
    let product = samples.checked_mul(u64::from(to / divisor))?;
    if product > MAX_EXACT || from == 0 || to == 0 {
        return None;
    }
    let quotient = product as f64 / f64::from(from / divisor);
    Some((quotient as f32).ceil() as u64)
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_lengths_are_rounded_up() {
        assert_eq!(resampled_len(44_100, 44_100, 16_000), Some(16_000));
        assert_eq!(resampled_len(44_101, 44_100, 16_000), Some(16_001));
        assert_eq!(resampled_len(1, 8_000, 16_000), Some(2));
        assert_eq!(resampled_len(1, 48_000, 16_000), Some(1));
        assert_eq!(resampled_len(7, 16_000, 16_000), Some(7));
    }

    #[test]
    fn long_lengths_lose_their_fraction_first() {
        // 9,600,000.36 samples are 9,600,000 in 32 bits.
        assert_eq!(resampled_len(26_460_001, 44_100, 16_000), Some(9_600_000));
        assert_eq!(resampled_len(u64::MAX, 44_100, 16_000), None);
    }
}
