//! Both passes of the resize with AVX-512 VNNI: as with AVX2, but twice as wide, and multiply-add in one instruction.

use std::arch::x86_64::*;

use super::weights::BLOCK;
use super::{Weights, Window, avx2, scalar};

/// Output pixels per step of the horizontal pass.
const PIXELS: usize = 4;
/// Rows per step of the horizontal pass.
const LINES: usize = 4;
/// Bytes that a load takes beyond the `3 * BLOCK` that are used.
const SPARE: usize = 16 - 3 * BLOCK;
/// Bytes per step of the vertical pass.
const BYTES: usize = 64;

/// See [`scalar::horizontal`]. One row lies in each quarter of a vector, so that all share the weights.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
pub(crate) fn horizontal(pixels: &[u8], row: usize, weights: &Weights<i16>, out: &mut [u8]) {
    assert!(row >= 3 * weights.input());
    let out_row = 3 * weights.len();
    // Loads reach beyond a row's end; where that is beyond the image, the reference takes over.
    let reach = 3 * weights.stride() + SPARE;
    let rows = (out.len() / out_row).min(pixels.len().saturating_sub(reach) / row);
    let rows = if weights.len() < PIXELS { 0 } else { rows };
    let (vectors, rest) = out.split_at_mut(rows * out_row);

    let dense = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    let half = _mm512_set1_epi32(weights.rounding().half());
    let shift = _mm_cvtsi32_si128(weights.rounding().precision as i32);

    let (pixels_start, out_start) = (pixels.as_ptr(), vectors.as_mut_ptr());
    for y in (0..rows).step_by(LINES) {
        // The last row may stand in for missing ones: it is then written several times.
        let lines: [usize; LINES] = std::array::from_fn(|line| (y + line).min(rows - 1));
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
            let low = _mm512_packs_epi32(_mm512_sra_epi32(a, shift), _mm512_sra_epi32(b, shift));
            let high = _mm512_packs_epi32(_mm512_sra_epi32(c, shift), _mm512_sra_epi32(d, shift));
            let bytes = _mm512_packus_epi16(low, high);
            let bytes = _mm512_shuffle_epi8(bytes, dense);
            let quarters = [
                _mm512_castsi512_si128(bytes),
                _mm512_extracti32x4_epi32::<1>(bytes),
                _mm512_extracti32x4_epi32::<2>(bytes),
                _mm512_extracti32x4_epi32::<3>(bytes),
            ];
            for (line, bytes) in lines.into_iter().zip(quarters) {
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

/// One pixel's sums of all lines: red, green, blue, and one that means nothing.
///
/// # Safety
/// From each line's start, `3 * (window.range.start + window.weights.len()) + SPARE` bytes can be read.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
#[inline]
unsafe fn dot(lines: [*const u8; LINES], window: &Window<'_, i16>, half: __m512i) -> __m512i {
    let first_taps = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    let last_taps = _mm512_broadcast_i32x4(_mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
    let mut sum = half;
    for (block, weights) in window.weights.chunks_exact(BLOCK).enumerate() {
        let at = 3 * (window.range.start + block * BLOCK);
        // SAFETY: at + 16 is at most what the caller allows.
        let input = unsafe {
            let input = _mm512_castsi128_si512(_mm_loadu_si128(lines[0].add(at).cast()));
            let input = _mm512_inserti32x4::<1>(input, _mm_loadu_si128(lines[1].add(at).cast()));
            let input = _mm512_inserti32x4::<2>(input, _mm_loadu_si128(lines[2].add(at).cast()));
            _mm512_inserti32x4::<3>(input, _mm_loadu_si128(lines[3].add(at).cast()))
        };
        let (first, last) = (_mm512_shuffle_epi8(input, first_taps), _mm512_shuffle_epi8(input, last_taps));
        sum = _mm512_dpwssd_epi32(sum, first, pair(weights[0], weights[1]));
        sum = _mm512_dpwssd_epi32(sum, last, pair(weights[2], weights[3]));
    }
    sum
}

/// See [`scalar::vertical`]. Bytes of two rows are interleaved, so that one multiply-add takes both.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
pub(crate) fn vertical(rows: &[u8], window: &Window<'_, i16>, out: &mut [u8]) {
    let (row, taps) = (out.len(), window.range.len());
    if row < BYTES {
        return avx2::vertical(rows, window, out);
    }
    assert!(rows.len() >= taps * row && window.weights.len() >= taps);
    let half = _mm512_set1_epi32(window.rounding.half());
    let shift = _mm_cvtsi32_si128(window.rounding.precision as i32);
    let zero = _mm512_setzero_si512();
    for x in (0..row).step_by(BYTES) {
        let x = x.min(row - BYTES);
        let mut sums = [half; 4];
        for (pairs, weights) in window.weights[..taps.next_multiple_of(2)].chunks_exact(2).enumerate() {
            // Beyond the last row the weight is 0: any row will do.
            let taps = [2 * pairs, (2 * pairs + 1).min(taps - 1)];
            // SAFETY: a tap is below window.range.len(), and x + BYTES <= row.
            let [first, second] =
                taps.map(|tap| unsafe { _mm512_loadu_si512(rows.as_ptr().add(tap * row + x).cast()) });
            let weights = pair(weights[0], weights[1]);
            let low = _mm512_unpacklo_epi8(first, second);
            let high = _mm512_unpackhi_epi8(first, second);
            let inputs = [
                _mm512_unpacklo_epi8(low, zero),
                _mm512_unpackhi_epi8(low, zero),
                _mm512_unpacklo_epi8(high, zero),
                _mm512_unpackhi_epi8(high, zero),
            ];
            for (sum, input) in sums.iter_mut().zip(inputs) {
                *sum = _mm512_dpwssd_epi32(*sum, input, weights);
            }
        }
        let [a, b, c, d] = sums.map(|sum| _mm512_sra_epi32(sum, shift));
        // Packing works within 16 bytes as unpacking did: the order is restored.
        let bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
        // SAFETY: x + BYTES <= row = out.len().
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(x).cast(), bytes) };
    }
}

/// Two weights, side by side, everywhere.
#[target_feature(enable = "avx512f")]
fn pair(first: i16, second: i16) -> __m512i {
    _mm512_set1_epi32(i32::from(first) & 0xFFFF | i32::from(second) << 16)
}
