//! The reference implementation of both passes of the resize.

use super::{FixedPoint, Weights};

/// Filters along rows, until `out` is full.
///
/// Rows of `weights.input()` RGB pixels start every `row_stride` bytes of `pixels`; each becomes
/// `weights.len()` pixels. `pixels` may have more rows. The last row may end after its pixels.
pub(crate) fn horizontal<T: FixedPoint>(
    pixels: &[u8],
    row_stride: usize,
    weights: &Weights<T>,
    out: &mut [u8],
) {
    let rows = pixels.chunks(row_stride);
    for (row, out) in rows.zip(out.chunks_exact_mut(3 * weights.len())) {
        for (window, out) in weights.iter().zip(out.chunks_exact_mut(3)) {
            let mut sums = [window.rounding.half(); 3];
            let pixels = row[3 * window.range.start..3 * window.range.end].chunks_exact(3);
            for (pixel, &weight) in pixels.zip(window.weights) {
                for (sum, &channel) in sums.iter_mut().zip(pixel) {
                    *sum += weight.into() * i32::from(channel);
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = window.rounding.to_pixel(sum);
            }
        }
    }
}

/// Filters along columns, for one output row.
///
/// The rows of the output's window start every `row_stride` bytes of `rows` and are at least as
/// long as `out`. The last row may end after that length.
pub(crate) fn vertical<T: FixedPoint>(
    rows: &[u8],
    row_stride: usize,
    weights: &Weights<T>,
    output: usize,
    out: &mut [u8],
) {
    /// The number of bytes that are summed at a time.
    const BLOCK: usize = 1024;
    let window = weights.window(output);
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let mut sums = [window.rounding.half(); BLOCK];
        for (input, &weight) in rows.chunks(row_stride).zip(window.weights) {
            for (sum, &channel) in sums.iter_mut().zip(&input[block * BLOCK..][..out.len()]) {
                *sum += weight.into() * i32::from(channel);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = window.rounding.to_pixel(sum);
        }
    }
}
