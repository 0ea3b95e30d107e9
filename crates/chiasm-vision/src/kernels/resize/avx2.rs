//! Both passes of the resize with AVX2: two taps per multiply-add.

use std::arch::x86_64::*;

use super::weights::BLOCK;
use super::{Weights, Window, scalar};

/// Output pixels per step of the horizontal pass.
const PIXELS: usize = 4;
/// Bytes that a load takes beyond the `3 * BLOCK` that are used.
const SPARE: usize = 16 - 3 * BLOCK;
/// Bytes per step of the vertical pass.
const BYTES: usize = 32;

/// See [`scalar::horizontal`]. One row lies in each half of a vector, so that both share the weights.
#[target_feature(enable = "avx2")]
pub(crate) fn horizontal(pixels: &[u8], row: usize, weights: &Weights<i16>, out: &mut [u8]) {
    assert!(row >= 3 * weights.input());
    let out_row = 3 * weights.len();
    // Loads reach beyond a row's end; where that is beyond the image, the reference takes over.
    let reach = 3 * weights.stride() + SPARE;
    let rows = (out.len() / out_row).min(pixels.len().saturating_sub(reach) / row);
    let rows = if weights.len() < PIXELS { 0 } else { rows };
    let (vectors, rest) = out.split_at_mut(rows * out_row);

    let dense = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    let half = _mm256_set1_epi32(weights.rounding().half());
    let shift = _mm_cvtsi32_si128(weights.rounding().precision as i32);

    let (pixels_start, out_start) = (pixels.as_ptr(), vectors.as_mut_ptr());
    for y in (0..rows).step_by(2) {
        // The last row may stand in for a missing one: it is then written twice.
        let lines = [y, (y + 1).min(rows - 1)];
        for x in (0..weights.len()).step_by(PIXELS) {
            let x = x.min(weights.len() - PIXELS);
            // SAFETY: every line is below rows, and (line + 1) * row + reach <= pixels.len().
            let (a, b, c, d) = unsafe {
                let lines = lines.map(|line| pixels_start.add(line * row));
                (
                    dot(lines, &weights.window(x), half),
                    dot(lines, &weights.window(x + 1), half),
                    dot(lines, &weights.window(x + 2), half),
                    dot(lines, &weights.window(x + 3), half),
                )
            };
            let low = _mm256_packs_epi32(_mm256_sra_epi32(a, shift), _mm256_sra_epi32(b, shift));
            let high = _mm256_packs_epi32(_mm256_sra_epi32(c, shift), _mm256_sra_epi32(d, shift));
            let bytes = _mm256_packus_epi16(low, high);
            let bytes = _mm256_shuffle_epi8(bytes, dense);
            let halves = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
            for (line, bytes) in lines.into_iter().zip(halves) {
                // SAFETY: 12 bytes from pixel x of a line: x + PIXELS <= weights.len(), and line < rows.
                unsafe {
                    let at = out_start.add(line * out_row + 3 * x);
                    _mm_storel_epi64(at.cast(), bytes);
                    at.add(8).cast::<i32>().write_unaligned(_mm_extract_epi32::<2>(bytes));
                }
            }
        }
    }
    scalar::horizontal(&pixels[rows * row..], row, weights, rest);
}

/// One pixel's sums of both lines: red, green, blue, and one that means nothing.
///
/// # Safety
/// From each line's start, `3 * (window.range.start + window.weights.len()) + SPARE` bytes can be read.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn dot(lines: [*const u8; 2], window: &Window<'_, i16>, half: __m256i) -> __m256i {
    let first_taps =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    let last_taps =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    let mut sum = half;
    for (block, weights) in window.weights.chunks_exact(BLOCK).enumerate() {
        let at = 3 * (window.range.start + block * BLOCK);
        // SAFETY: at + 16 is at most what the caller allows.
        let input = unsafe {
            let high = _mm_loadu_si128(lines[1].add(at).cast());
            _mm256_set_m128i(high, _mm_loadu_si128(lines[0].add(at).cast()))
        };
        let (first, last) = (_mm256_shuffle_epi8(input, first_taps), _mm256_shuffle_epi8(input, last_taps));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(first, pair(weights[0], weights[1])));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(last, pair(weights[2], weights[3])));
    }
    sum
}

/// See [`scalar::vertical`]. Bytes of two rows are interleaved, so that one multiply-add takes both.
#[target_feature(enable = "avx2")]
pub(crate) fn vertical(rows: &[u8], window: &Window<'_, i16>, out: &mut [u8]) {
    let (row, taps) = (out.len(), window.range.len());
    if row < BYTES {
        return scalar::vertical(rows, window, out);
    }
    assert!(rows.len() >= taps * row && window.weights.len() >= taps);
    let half = _mm256_set1_epi32(window.rounding.half());
    let shift = _mm_cvtsi32_si128(window.rounding.precision as i32);
    let zero = _mm256_setzero_si256();
    for x in (0..row).step_by(BYTES) {
        let x = x.min(row - BYTES);
        let mut sums = [half; 4];
        for (pairs, weights) in window.weights[..taps.next_multiple_of(2)].chunks_exact(2).enumerate() {
            // Beyond the last row the weight is 0: any row will do.
            let taps = [2 * pairs, (2 * pairs + 1).min(taps - 1)];
            // SAFETY: a tap is below window.range.len(), and x + BYTES <= row.
            let [first, second] =
                taps.map(|tap| unsafe { _mm256_loadu_si256(rows.as_ptr().add(tap * row + x).cast()) });
            let weights = pair(weights[0], weights[1]);
            let low = _mm256_unpacklo_epi8(first, second);
            let high = _mm256_unpackhi_epi8(first, second);
            let inputs = [
                _mm256_unpacklo_epi8(low, zero),
                _mm256_unpackhi_epi8(low, zero),
                _mm256_unpacklo_epi8(high, zero),
                _mm256_unpackhi_epi8(high, zero),
            ];
            for (sum, input) in sums.iter_mut().zip(inputs) {
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(input, weights));
            }
        }
        let [a, b, c, d] = sums.map(|sum| _mm256_sra_epi32(sum, shift));
        // Packing works within 16 bytes as unpacking did: the order is restored.
        let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        // SAFETY: x + BYTES <= row = out.len().
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().add(x).cast(), bytes) };
    }
}

/// Two weights, side by side, everywhere.
#[target_feature(enable = "avx2")]
fn pair(first: i16, second: i16) -> __m256i {
    _mm256_set1_epi32(i32::from(first) & 0xFFFF | i32::from(second) << 16)
}
