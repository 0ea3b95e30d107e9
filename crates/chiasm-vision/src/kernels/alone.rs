//! The resize stage by itself, for benchmarks: inside the crate it only runs together with the
//! layout stage.

use super::resize::Weights;
use super::{Filter, Implementation};
use crate::{ImageSize, RgbView, VisionError};

/// The number of rows that are resized at a time, as in `bands`, to keep the narrowed rows in the
/// CPU's cache.
const BAND_ROWS: usize = 32;

/// Resizes an image to packed RGB rows as PyTorch's antialiased bicubic filter does.
///
/// `out` must have `3 * to.area()` bytes. `narrowed` is scratch memory that can be reused for other
/// images.
///
/// # Errors
/// [`VisionError::OutputLength`], [`VisionError::EmptyImage`].
pub fn resize_bicubic(
    kernels: Implementation,
    image: RgbView<'_>,
    to: ImageSize,
    narrowed: &mut Vec<u8>,
    out: &mut [u8],
) -> Result<(), VisionError> {
    if to.area() == 0 {
        return Err(VisionError::EmptyImage { size: to });
    }
    let width = to.width as usize;
    let height = to.height as usize;
    let row = 3 * width;
    if out.len() != row * height {
        return Err(VisionError::OutputLength { expected: row * height, found: out.len() });
    }
    let from = image.size();
    let image_row = 3 * from.width as usize;
    let weights = |from: u32, to: usize| {
        (from as usize != to)
            .then(|| Weights::<i16>::new(Filter::Bicubic, from as usize, to, 0..to))
    };
    let horizontal = weights(from.width, width);
    let vertical = weights(from.height, height);
    // The source rows that are in `narrowed`.
    let mut cached = 0..0;
    for (band, out) in out.chunks_mut(row * BAND_ROWS).enumerate() {
        let rows = band * BAND_ROWS..band * BAND_ROWS + out.len() / row;
        let needed = vertical.as_ref().map_or(rows.clone(), |weights| weights.inputs(rows.clone()));
        let (source, first) = match &horizontal {
            None => (image.pixels(), 0),
            Some(weights) => {
                let first_new = if cached.contains(&needed.start) {
                    cached.end.min(needed.end)
                } else {
                    needed.start
                };
                let reused_bytes = row * (first_new - needed.start);
                narrowed.resize(narrowed.len().max(row * needed.len()), 0);
                if reused_bytes > 0 {
                    let from = row * (needed.start - cached.start);
                    narrowed.copy_within(from..from + reused_bytes, 0);
                }
                let new = &mut narrowed[reused_bytes..row * needed.len()];
                let pixels = &image.pixels()[image_row * first_new..];
                kernels.horizontal(pixels, image_row, weights, new);
                cached = needed;
                (narrowed.as_slice(), cached.start)
            }
        };
        let Some(weights) = &vertical else {
            out.copy_from_slice(&source[row * (rows.start - first)..][..out.len()]);
            continue;
        };
        for (y, out) in rows.zip(out.chunks_exact_mut(row)) {
            let range = weights.window(y).range;
            let inputs = &source[row * (range.start - first)..row * (range.end - first)];
            kernels.vertical(inputs, row, weights, y, out);
        }
    }
    Ok(())
}
