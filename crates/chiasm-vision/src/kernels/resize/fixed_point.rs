//! The fixed-point types of weights in PyTorch and Pillow.

use super::filters::{self, Filter};

/// The number of weights per output is a multiple of this, so that vector code needs no tail loop.
pub(super) const BLOCK: usize = 4;

/// The fixed-point representation of weights in one library.
pub(crate) trait FixedPoint:
    Copy + Default + Into<i32> + std::fmt::Debug + Send + Sync + 'static
{
    /// The number of significant bytes of a weight; the others only repeat its sign.
    const BYTES: usize;
    /// The number of 16-bit numbers into which a weight fits.
    const HALVES: usize;
    /// Returns the weight at distance `x`, with the library's order of operations.
    fn filter(filter: Filter, x: f64) -> f64;
    /// Returns the number of fractional bits, given the largest weight.
    fn precision(largest: f64) -> u32;
    /// Truncates a scaled and rounded weight to its integer part.
    fn truncate(weight: f64) -> Self;
}

/// PyTorch's weights (`HelperInterpBase` in `UpSampleKernel.cpp`): 16 bits, with as many fractional
/// bits as the largest weight allows.
impl FixedPoint for i16 {
    const BYTES: usize = 2;
    const HALVES: usize = 1;

    fn filter(filter: Filter, x: f64) -> f64 {
        filters::torch(filter, x)
    }

    fn precision(largest: f64) -> u32 {
        (0..22).find(|bits| (0.5 + largest * f64::from(2 << bits)) as i32 >= 1 << 15).unwrap_or(22)
    }

    fn truncate(weight: f64) -> Self {
        weight as Self
    }
}

/// Pillow's weights (`Resample.c`): 22 fractional bits.
impl FixedPoint for i32 {
    const BYTES: usize = 3;
    const HALVES: usize = 2;

    fn filter(filter: Filter, x: f64) -> f64 {
        filters::pillow(filter, x)
    }

    fn precision(_largest: f64) -> u32 {
        22
    }

    fn truncate(weight: f64) -> Self {
        weight as Self
    }
}
