//! The pixel loops, and the one place that chooses among their implementations.
//!
//! One folder per operation, in it one file per instruction set; `scalar` is the reference that the others must equal
//! bit for bit. Everything here is about bytes and extents: no settings, no model families.

mod normalize;
mod patchify;
mod resize;

use std::borrow::Cow;

pub(crate) use normalize::{ChannelTable, Normalization};
pub(crate) use patchify::PatchGrid;
use resize::Weights;

use crate::{ImageSize, RgbView};

/// One implementation of every loop. All of them take packed RGB, and outputs of the exact size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    /// Rows of `pixels` to rows of another width: `(pixels, width, weights, out)`.
    horizontal: fn(&[u8], usize, &Weights, &mut [u8]),
    /// All rows of `pixels`, `row` bytes each, to another number of rows: `(pixels, row, weights, out)`.
    vertical: fn(&[u8], usize, &Weights, &mut [u8]),
    /// Pixels to rows of patches as they are.
    pub(crate) patchify: fn(&[u8], &PatchGrid, &mut [u8]),
    /// Pixels to rows of patches of 2-byte elements.
    pub(crate) patchify_2: fn(&[u8], &PatchGrid, &ChannelTable<2>, &mut [u8]),
    /// Pixels to rows of patches of 4-byte elements.
    pub(crate) patchify_4: fn(&[u8], &PatchGrid, &ChannelTable<4>, &mut [u8]),
}

static SCALAR: Kernels = Kernels {
    horizontal: resize::scalar::horizontal,
    vertical: resize::scalar::vertical,
    patchify: patchify::scalar::copy,
    patchify_2: patchify::scalar::map,
    patchify_4: patchify::scalar::map,
};

/// The fastest implementation that this CPU runs.
pub(crate) fn kernels() -> &'static Kernels {
    &SCALAR
}

impl Kernels {
    /// Antialiased bicubic resize. A side that keeps its length is not filtered; borrowed if both do.
    pub(crate) fn resize<'a>(&self, image: RgbView<'a>, to: ImageSize) -> Cow<'a, [u8]> {
        let ImageSize { width, height } = image.size();
        let (width, height) = (width as usize, height as usize);
        let (new_width, new_height) = (to.width as usize, to.height as usize);
        let mut pixels = Cow::Borrowed(image.pixels());
        if new_width != width {
            let mut out = vec![0; 3 * new_width * height];
            (self.horizontal)(&pixels, width, &Weights::bicubic(width, new_width), &mut out);
            pixels = Cow::Owned(out);
        }
        if new_height != height {
            let row = 3 * new_width;
            let mut out = vec![0; row * new_height];
            (self.vertical)(&pixels, row, &Weights::bicubic(height, new_height), &mut out);
            pixels = Cow::Owned(out);
        }
        pixels
    }
}
