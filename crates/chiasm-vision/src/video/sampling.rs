//! The arithmetic of numpy and PyTorch that picks frames.

/// Returns `numpy.linspace(0, total - 1, count)` of float64, before it is converted to integers.
///
/// `total` and `count` are at least 1.
fn linspace(total: u64, count: u64) -> impl Iterator<Item = f64> {
    let last = (total - 1) as f64;
    let step = if count > 1 { last / (count - 1) as f64 } else { 0.0 };
    (0..count).map(move |index| {
        // numpy sets the end exactly.
        if count > 1 && index == count - 1 { last } else { index as f64 * step }
    })
}

/// Returns `numpy.linspace(0, total - 1, count, dtype=int)`, which rounds down.
pub(super) fn linspace_floor(total: u64, count: u64) -> Vec<u64> {
    linspace(total, count).map(|position| position.floor() as u64).collect()
}

/// Returns `numpy.linspace(0, total - 1, count).round().astype(int)`, which rounds halves to even.
pub(super) fn linspace_round(total: u64, count: u64) -> Vec<u64> {
    linspace(total, count).map(|position| position.round_ties_even() as u64).collect()
}

/// The number of elements that PyTorch's `arange` computes from one rounded start on x86.
///
/// On 64-bit ARM it is 4, which changes one index in 300 long videos; x86 is the reference.
const ARANGE_LANES: u64 = 8;

/// Returns `torch.arange(0, total, total / count).int()` of float32, clamped to the last frame.
///
/// Follows `arange_kernel` in PyTorch's `RangeFactoriesKernel.cpp`: positions are computed in
/// float64, but a vector starts from a float32. Vectors are written in pairs; the rest one by one.
/// Rounding of `total / count` can add an element to `count`.
pub(super) fn arange(total: u64, count: u64) -> Vec<u64> {
    let step = total as f64 / count as f64;
    let elements = (total as f64 / step).ceil() as u64;
    let in_vectors = elements - elements % (2 * ARANGE_LANES);
    (0..elements)
        .map(|index| {
            let position = if index < in_vectors {
                let lane = index % ARANGE_LANES;
                let start = (step * (index - lane) as f64) as f32;
                (f64::from(start) + lane as f64 * step) as f32
            } else {
                (step * index as f64) as f32
            };
            (position as u64).min(total - 1)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linspace_ends_at_last_frame() {
        assert_eq!(linspace_floor(1, 1), [0]);
        assert_eq!(linspace_floor(10, 1), [0]);
        assert_eq!(linspace_floor(10, 4), [0, 3, 6, 9]);
        assert_eq!(linspace_floor(11, 4), [0, 3, 6, 10]);
    }

    #[test]
    fn linspace_halves_are_rounded_to_even() {
        // 0, 2.5, 5, 7.5, 10
        assert_eq!(linspace_round(11, 5), [0, 2, 5, 8, 10]);
    }

    #[test]
    fn arange_rounding_adds_last_frame() {
        assert_eq!(arange(7, 4), [0, 1, 3, 5]);
        assert_eq!(arange(2, 2), [0, 1]);
        // 17 / (17 / 14) is above 14 in f64; PyTorch's index 17 is clamped.
        let frames = arange(17, 14);
        assert_eq!(frames.len(), 15);
        assert_eq!(frames.last(), Some(&16));
    }
}
