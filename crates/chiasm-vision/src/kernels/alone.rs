//! A stage by itself, for measurements: inside the crate it only runs together with the next one.

use super::resize::Weights;
use super::{Filter, Implementation};
use crate::{ImageSize, RgbView, VisionError};

/// Lines that are resized at a time, as `bands` does it: what is narrowed stays in the CPU's cache.
const BAND: usize = 32;

/// Resizes an image as PyTorch's antialiased bicubic filter does, to packed RGB rows. `out` is `3 *
/// to.area()` bytes long; `narrowed` is memory that is used again from image to image.
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
    let (width, height) = (to.width as usize, to.height as usize);
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
    let (horizontal, vertical) = (weights(from.width, width), weights(from.height, height));
    // Lines of the image that `narrowed` holds.
    let mut held = 0..0;
    for (band, out) in out.chunks_mut(row * BAND).enumerate() {
        let lines = band * BAND..band * BAND + out.len() / row;
        let needed =
            vertical.as_ref().map_or(lines.clone(), |weights| weights.inputs(lines.clone()));
        let (source, first) = match &horizontal {
            None => (image.pixels(), 0),
            Some(weights) => {
                let made = if held.contains(&needed.start) {
                    held.end.min(needed.end)
                } else {
                    needed.start
                };
                let kept = row * (made - needed.start);
                narrowed.resize(narrowed.len().max(row * needed.len()), 0);
                if kept > 0 {
                    let from = row * (needed.start - held.start);
                    narrowed.copy_within(from..from + kept, 0);
                }
                let new = &mut narrowed[kept..row * needed.len()];
                kernels.horizontal(&image.pixels()[image_row * made..], image_row, weights, new);
                held = needed;
                (narrowed.as_slice(), held.start)
            }
        };
        let Some(weights) = &vertical else {
            out.copy_from_slice(&source[row * (lines.start - first)..][..out.len()]);
            continue;
        };
        for (line, out) in lines.zip(out.chunks_exact_mut(row)) {
            let range = weights.window(line).range;
            let inputs = &source[row * (range.start - first)..row * (range.end - first)];
            kernels.vertical(inputs, row, weights, line, out);
        }
    }
    Ok(())
}
