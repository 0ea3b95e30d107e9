//! The resampling filters, with the order of operations of each library. The order changes the last
//! bit of a weight.

use std::f64::consts::PI;

/// The parameter of Keys' cubic convolution in both libraries.
const A: f64 = -0.5;

/// A resampling filter: the weight of an input as a function of its distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Filter {
    /// The triangle filter.
    Bilinear,
    /// Keys' cubic convolution with a = -1/2.
    Bicubic,
    /// The windowed sinc with three lobes.
    Lanczos,
}

impl Filter {
    /// Returns the distance beyond which weights are 0, at scale 1. Downscaling widens it.
    pub(super) const fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }
}

/// Returns the weight at distance `x` in PyTorch's `HelperInterpLinear` and `HelperInterpCubic`
/// (`UpSampleKernel.cpp`) with antialiasing. Lanczos is the same as Pillow's.
pub(super) fn torch(filter: Filter, x: f64) -> f64 {
    match filter {
        Filter::Bicubic => {
            let x = x.abs();
            if x < 1.0 {
                ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
            } else if x < 2.0 {
                ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
            } else {
                0.0
            }
        }
        Filter::Bilinear | Filter::Lanczos => pillow(filter, x),
    }
}

/// Returns the weight at distance `x` in Pillow's `bilinear_filter`, `bicubic_filter` and
/// `lanczos_filter` (`Resample.c`).
pub(super) fn pillow(filter: Filter, x: f64) -> f64 {
    match filter {
        Filter::Bilinear => (1.0 - x.abs()).max(0.0),
        Filter::Bicubic => {
            let x = x.abs();
            if x < 1.0 {
                ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
            } else if x < 2.0 {
                (((x - 5.0) * x + 8.0) * x - 4.0) * A
            } else {
                0.0
            }
        }
        Filter::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
        Filter::Lanczos => 0.0,
    }
}

/// Returns the normalised sinc: `sin(πx) / πx`.
fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * PI;
    x.sin() / x
}
