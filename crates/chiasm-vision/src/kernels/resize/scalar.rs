//! The reference for both passes of the resize.

use super::Weights;

/// Filters along rows: `width` RGB pixels per row of `pixels` become `weights.len()` per row of `out`.
pub(crate) fn horizontal(pixels: &[u8], width: usize, weights: &Weights, out: &mut [u8]) {
    let rows = pixels.chunks_exact(3 * width);
    for (row, out) in rows.zip(out.chunks_exact_mut(3 * weights.len())) {
        for ((range, weights_here), out) in weights.iter().zip(out.chunks_exact_mut(3)) {
            let mut sums = [weights.half(); 3];
            let pixels = row[3 * range.start..3 * range.end].chunks_exact(3);
            for (pixel, &weight) in pixels.zip(weights_here) {
                for (sum, &channel) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(weight) * i32::from(channel);
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = weights.to_pixel(sum);
            }
        }
    }
}

/// Filters along columns: the rows of `pixels`, `row` bytes each, become `weights.len()` rows of `out`.
pub(crate) fn vertical(pixels: &[u8], row: usize, weights: &Weights, out: &mut [u8]) {
    let mut sums = vec![0_i32; row];
    for ((range, weights_here), out) in weights.iter().zip(out.chunks_exact_mut(row)) {
        sums.fill(weights.half());
        let rows = pixels[row * range.start..row * range.end].chunks_exact(row);
        for (input, &weight) in rows.zip(weights_here) {
            for (sum, &channel) in sums.iter_mut().zip(input) {
                *sum += i32::from(weight) * i32::from(channel);
            }
        }
        for (out, &sum) in out.iter_mut().zip(&sums) {
            *out = weights.to_pixel(sum);
        }
    }
}
