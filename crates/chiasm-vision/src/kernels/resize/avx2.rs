//! Both passes of the resize with AVX2: two taps per multiply-add, of 16-bit numbers.
//!
//! Weights that do not fit into 16 bits come in two halves (see [`super::halves`]). Each half has
//! sums of its own, which are put together at the end: exact, as all sums are modulo 2^32.

use std::arch::x86_64::*;

use super::fixed_point::BLOCK;
use super::halves::{Half, Halves, LOWER};
use super::{FixedPoint, Weights, scalar};

/// Output pixels per step of the horizontal pass.
const PIXELS: usize = 4;
/// Bytes that a load takes beyond the `3 * BLOCK` that are used.
const SPARE: usize = 16 - 3 * BLOCK;
/// Bytes per step of the vertical pass.
const BYTES: usize = 32;
/// Halves of a weight at most.
const MOST: usize = 2;

/// See [`scalar::horizontal`]. One row lies in each half of a vector, so that both share the
/// weights.
#[target_feature(enable = "avx2")]
pub(crate) fn horizontal<T: FixedPoint>(
    pixels: &[u8],
    row: usize,
    weights: &Weights<T>,
    out: &mut [u8],
) {
    assert!(row >= 3 * weights.input());
    let out_row = 3 * weights.len();
    // Loads reach beyond a row's end; where that is beyond the image, the reference takes over.
    let reach = 3 * weights.stride() + SPARE;
    let rows = (out.len() / out_row).min(pixels.len().saturating_sub(reach) / row);
    let rows = if weights.len() < PIXELS { 0 } else { rows };
    let (vectors, rest) = out.split_at_mut(rows * out_row);

    let dense = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1,
    ));
    let half = _mm256_set1_epi32(weights.rounding().half());
    let shift = _mm_cvtsi32_si128(weights.rounding().precision as i32);
    let halves = weights.halves();

    let (pixels_start, out_start) = (pixels.as_ptr(), vectors.as_mut_ptr());
    for y in (0..rows).step_by(2) {
        // The last row may stand in for a missing one: it is then written twice.
        let lines = [y, (y + 1).min(rows - 1)];
        for x in (0..weights.len()).step_by(PIXELS) {
            let x = x.min(weights.len() - PIXELS);
            for line in lines {
                // The next lines.
                let at = (line + lines.len()) * row + 3 * weights.range(x).start;
                _mm_prefetch::<_MM_HINT_T0>(pixels_start.wrapping_add(at).cast());
            }
            // SAFETY: every line is below rows, and (line + 1) * row + reach <= pixels.len().
            let (a, b, c, d) = unsafe {
                let lines = lines.map(|line| pixels_start.add(line * row));
                (
                    dot(lines, weights, halves, x),
                    dot(lines, weights, halves, x + 1),
                    dot(lines, weights, halves, x + 2),
                    dot(lines, weights, halves, x + 3),
                )
            };
            let round = |sum| _mm256_sra_epi32(_mm256_add_epi32(sum, half), shift);
            let (low, high) =
                (_mm256_packs_epi32(round(a), round(b)), _mm256_packs_epi32(round(c), round(d)));
            let bytes = _mm256_packus_epi16(low, high);
            let bytes = _mm256_shuffle_epi8(bytes, dense);
            let quarters = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
            for (line, bytes) in lines.into_iter().zip(quarters) {
                // SAFETY: 12 bytes from pixel x of a line: x + PIXELS <= weights.len(), and line <
                // rows.
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
/// `3 * (input + stride) + SPARE` bytes can be read from each line's start, in the terms of
/// `weights`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn dot<T: FixedPoint>(
    lines: [*const u8; 2],
    weights: &Weights<T>,
    halves: &Halves,
    output: usize,
) -> __m256i {
    let first_taps = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
    ));
    let last_taps = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1,
    ));
    let mut sums = [_mm256_setzero_si256(); MOST];
    let mut at = 3 * weights.range(output).start;
    for halves in halves.for_output(output).chunks_exact(T::HALVES) {
        // SAFETY: the range's start and the stride are at most what the caller allows.
        let input = unsafe {
            let high = _mm_loadu_si128(lines[1].add(at).cast());
            _mm256_set_m128i(high, _mm_loadu_si128(lines[0].add(at).cast()))
        };
        at += 3 * BLOCK;
        let (first, last) =
            (_mm256_shuffle_epi8(input, first_taps), _mm256_shuffle_epi8(input, last_taps));
        for half in 0..T::HALVES {
            let [first_pair, last_pair] = pairs(&halves[half]);
            let dots = _mm256_add_epi32(
                _mm256_madd_epi16(first, first_pair),
                _mm256_madd_epi16(last, last_pair),
            );
            sums[half] = _mm256_add_epi32(sums[half], dots);
        }
    }
    whole::<T>(sums)
}

/// See [`scalar::vertical`]. Bytes of two rows are interleaved, so that one multiply-add takes
/// both.
#[target_feature(enable = "avx2")]
pub(crate) fn vertical<T: FixedPoint>(
    rows: &[u8],
    row: usize,
    weights: &Weights<T>,
    output: usize,
    out: &mut [u8],
) {
    let (length, taps) = (out.len(), weights.range(output).len());
    if length < BYTES {
        return scalar::vertical(rows, row, weights, output, out);
    }
    assert!(rows.len() >= (taps - 1) * row + length);
    let half = _mm256_set1_epi32(weights.rounding().half());
    let shift = _mm_cvtsi32_si128(weights.rounding().precision as i32);
    let zero = _mm256_setzero_si256();
    let halves = weights.halves().for_output(output);
    for x in (0..length).step_by(BYTES) {
        let x = x.min(length - BYTES);
        // The next output row is likely to need the row behind this one's.
        _mm_prefetch::<_MM_HINT_T0>(rows.as_ptr().wrapping_add(taps * row + x).cast());
        let mut sums = [[zero; MOST]; 4];
        for (block, halves) in halves.chunks_exact(T::HALVES).take(taps.div_ceil(BLOCK)).enumerate()
        {
            // Beyond the last row the weights are 0: any row will do.
            let inputs: [__m256i; BLOCK] = std::array::from_fn(|tap| {
                let tap = (BLOCK * block + tap).min(taps - 1);
                // SAFETY: tap < taps, and x + BYTES <= length.
                unsafe { _mm256_loadu_si256(rows.as_ptr().add(tap * row + x).cast()) }
            });
            for pair in 0..BLOCK / 2 {
                // A short window's second pair weighs nothing.
                if BLOCK * block + 2 * pair >= taps {
                    break;
                }
                let low = _mm256_unpacklo_epi8(inputs[2 * pair], inputs[2 * pair + 1]);
                let high = _mm256_unpackhi_epi8(inputs[2 * pair], inputs[2 * pair + 1]);
                let inputs = [
                    _mm256_unpacklo_epi8(low, zero),
                    _mm256_unpackhi_epi8(low, zero),
                    _mm256_unpacklo_epi8(high, zero),
                    _mm256_unpackhi_epi8(high, zero),
                ];
                for (index, half) in halves.iter().enumerate() {
                    let weights = pairs(half)[pair];
                    for (sums, input) in sums.iter_mut().zip(inputs) {
                        sums[index] =
                            _mm256_add_epi32(sums[index], _mm256_madd_epi16(input, weights));
                    }
                }
            }
        }
        let [a, b, c, d] =
            sums.map(|sums| _mm256_sra_epi32(_mm256_add_epi32(half, whole::<T>(sums)), shift));
        // Packing works within 16 bytes as unpacking did: the order is restored.
        let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        // SAFETY: x + BYTES <= length = out.len().
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().add(x).cast(), bytes) };
    }
}

/// The sums with weights from the sums with their halves.
#[target_feature(enable = "avx2")]
#[inline]
fn whole<T: FixedPoint>(sums: [__m256i; MOST]) -> __m256i {
    let [lower, upper] = sums;
    if T::HALVES == 1 {
        lower
    } else {
        _mm256_add_epi32(lower, _mm256_slli_epi32::<{ LOWER as i32 }>(upper))
    }
}

/// The first two of a block, side by side, everywhere; then the last two.
#[target_feature(enable = "avx2")]
#[inline]
fn pairs(half: &Half) -> [__m256i; 2] {
    let pairs = half.as_ptr().cast::<i32>();
    // SAFETY: 8 bytes of an array of that length.
    unsafe {
        [
            _mm256_set1_epi32(pairs.read_unaligned()),
            _mm256_set1_epi32(pairs.add(1).read_unaligned()),
        ]
    }
}
