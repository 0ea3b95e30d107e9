//! The filters and their formulas, in each library's order of operations: the last bit of a weight
//! depends on it.

use std::f64::consts::PI;

/// Keys' parameter, in both libraries.
const A: f64 = -0.5;

/// A resampling filter: how much an input counts by its distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Filter {
    /// A triangle.
    Bilinear,
    /// Keys' cubic convolution with a = -1/2.
    Bicubic,
    /// A windowed sinc of three lobes.
    Lanczos,
}

impl Filter {
    /// Distance beyond which nothing counts, at scale 1; downscaling widens it.
    pub(super) const fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }
}

/// The weight at a distance in PyTorch's `HelperInterpLinear` and `HelperInterpCubic`
/// (`UpSampleKernel.cpp`) with antialiasing. Lanczos is Pillow's.
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

/// The weight at a distance in Pillow's `bilinear_filter`, `bicubic_filter` and `lanczos_filter`
/// (`Resample.c`).
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

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * PI;
    x.sin() / x
}
