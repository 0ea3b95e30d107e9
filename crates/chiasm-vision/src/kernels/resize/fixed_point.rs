//! The fixed-point numbers that PyTorch and Pillow make of their weights.

use super::filters::{self, Filter};

/// Weights per output come in multiples of this, so that vector code needs no tail.
pub(super) const BLOCK: usize = 4;

/// A library's way to make fixed-point weights. Both libraries filter rows first, then columns, and
/// round to 8 bits in between.
pub(crate) trait FixedPoint:
    Copy + Default + Into<i32> + std::fmt::Debug + Send + Sync + 'static
{
    /// Bytes of a weight that count: the others only repeat its sign.
    const BYTES: usize;
    /// 16-bit numbers in which it fits.
    const HALVES: usize;
    /// The filter in the library's order of operations.
    fn filter(filter: Filter, x: f64) -> f64;
    /// Fractional bits, from the largest weight.
    fn precision(largest: f64) -> u32;
    /// A weight that was scaled and rounded, cut to its integer part.
    fn cut(weight: f64) -> Self;
}

/// PyTorch (`HelperInterpBase` in `UpSampleKernel.cpp`): weights of 16 bits, as fine as the largest
/// one allows.
impl FixedPoint for i16 {
    const BYTES: usize = 2;
    const HALVES: usize = 1;

    fn filter(filter: Filter, x: f64) -> f64 {
        filters::torch(filter, x)
    }

    fn precision(largest: f64) -> u32 {
        (0..22).find(|bits| (0.5 + largest * f64::from(2 << bits)) as i32 >= 1 << 15).unwrap_or(22)
    }

    fn cut(weight: f64) -> Self {
        weight as Self
    }
}

/// Pillow (`Resample.c`): weights of 22 fractional bits.
impl FixedPoint for i32 {
    const BYTES: usize = 3;
    const HALVES: usize = 2;

    fn filter(filter: Filter, x: f64) -> f64 {
        filters::pillow(filter, x)
    }

    fn precision(_largest: f64) -> u32 {
        22
    }

    fn cut(weight: f64) -> Self {
        weight as Self
    }
}
