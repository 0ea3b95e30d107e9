//! The reference for both passes of the resize.

use super::{FixedPoint, Weights};

/// Filters along rows: every `row` bytes of `pixels` begin `weights.input()` RGB pixels, which
/// become `weights.len()` pixels, until `out` is full. `pixels` may hold more rows; the last one
/// may be cut after its pixels.
pub(crate) fn horizontal<T: FixedPoint>(
    pixels: &[u8],
    row: usize,
    weights: &Weights<T>,
    out: &mut [u8],
) {
    let rows = pixels.chunks(row);
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

/// Filters along columns, for one output row: every `row` bytes of `rows` begins a row of its
/// window, at least as long as `out`. The last one may be cut to that length.
pub(crate) fn vertical<T: FixedPoint>(
    rows: &[u8],
    row: usize,
    weights: &Weights<T>,
    output: usize,
    out: &mut [u8],
) {
    const BLOCK: usize = 1024;
    let window = weights.window(output);
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let mut sums = [window.rounding.half(); BLOCK];
        for (input, &weight) in rows.chunks(row).zip(window.weights) {
            for (sum, &channel) in sums.iter_mut().zip(&input[block * BLOCK..][..out.len()]) {
                *sum += weight.into() * i32::from(channel);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = window.rounding.to_pixel(sum);
        }
    }
}
