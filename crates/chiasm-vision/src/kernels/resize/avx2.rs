//! Both passes of the resize with AVX2: two taps per multiply-add of 16-bit numbers.
//!
//! Weights that do not fit into 16 bits are split into two halves (see [`super::halves`]). Each
//! half has its own sums, which are combined at the end. The result is exact, because all sums are
//! modulo 2^32.

use std::arch::x86_64::*;

use super::fixed_point::BLOCK;
use super::halves::{Half, Halves, LOWER_BITS};
use super::{FixedPoint, Weights, scalar};

/// The number of output pixels per step of the horizontal pass.
const STEP_PIXELS: usize = 4;
/// The number of bytes that a load reads beyond the `3 * BLOCK` bytes that are used.
const OVERREAD_BYTES: usize = 16 - 3 * BLOCK;
/// The number of bytes per step of the vertical pass.
const STEP_BYTES: usize = 32;
/// The maximum number of halves of a weight.
const MAX_HALVES: usize = 2;

/// Vector version of [`scalar::horizontal`]. Each half of a vector has one row, so that two rows
/// share the loads of weights.
#[target_feature(enable = "avx2")]
pub(crate) fn horizontal<T: FixedPoint>(
    pixels: &[u8],
    row_stride: usize,
    weights: &Weights<T>,
    out: &mut [u8],
) {
    assert!(row_stride >= 3 * weights.input());
    let out_row = 3 * weights.len();
    // Loads read beyond the end of a row. Where that is beyond the image, the scalar code takes
    // over.
    let reach = 3 * weights.stride() + OVERREAD_BYTES;
    let rows = (out.len() / out_row).min(pixels.len().saturating_sub(reach) / row_stride);
    let rows = if weights.len() < STEP_PIXELS { 0 } else { rows };
    let (vectors, rest) = out.split_at_mut(rows * out_row);

    let dense = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1,
    ));
    let half = _mm256_set1_epi32(weights.rounding().half());
    let shift = _mm_cvtsi32_si128(weights.rounding().precision as i32);
    let halves = weights.halves();

    let pixels_start = pixels.as_ptr();
    let out_start = vectors.as_mut_ptr();
    for y in (0..rows).step_by(2) {
        // With an odd number of rows, the last row is processed twice.
        let lines = [y, (y + 1).min(rows - 1)];
        for x in (0..weights.len()).step_by(STEP_PIXELS) {
            let x = x.min(weights.len() - STEP_PIXELS);
            for line in lines {
                // Prefetches the next lines.
                let at = (line + lines.len()) * row_stride + 3 * weights.range(x).start;
                _mm_prefetch::<_MM_HINT_T0>(pixels_start.wrapping_add(at).cast());
            }
            // SAFETY: every line is below rows, and (line + 1) * row_stride + reach <=
            // pixels.len().
            let (a, b, c, d) = unsafe {
                let lines = lines.map(|line| pixels_start.add(line * row_stride));
                (
                    dot(lines, weights, halves, x),
                    dot(lines, weights, halves, x + 1),
                    dot(lines, weights, halves, x + 2),
                    dot(lines, weights, halves, x + 3),
                )
            };
            let round = |sum| _mm256_sra_epi32(_mm256_add_epi32(sum, half), shift);
            let low = _mm256_packs_epi32(round(a), round(b));
            let high = _mm256_packs_epi32(round(c), round(d));
            let bytes = _mm256_packus_epi16(low, high);
            let bytes = _mm256_shuffle_epi8(bytes, dense);
            let quarters = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
            for (line, bytes) in lines.into_iter().zip(quarters) {
                // SAFETY: writes 12 bytes from pixel x of a line: x + STEP_PIXELS <= weights.len(),
                // and line < rows.
                unsafe {
                    let at = out_start.add(line * out_row + 3 * x);
                    _mm_storel_epi64(at.cast(), bytes);
                    at.add(8).cast::<i32>().write_unaligned(_mm_extract_epi32::<2>(bytes));
                }
            }
        }
    }
    scalar::horizontal(&pixels[rows * row_stride..], row_stride, weights, rest);
}

/// Returns the sums of one pixel of both lines: red, green, blue, and one unused sum.
///
/// # Safety
/// `3 * (weights.input() + weights.stride()) + OVERREAD_BYTES` bytes must be readable from the
/// start of each line.
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
    let mut sums = [_mm256_setzero_si256(); MAX_HALVES];
    let mut at = 3 * weights.range(output).start;
    for halves in halves.for_output(output).chunks_exact(T::HALVES) {
        // SAFETY: the start of the range is below `input`, so the loads stay within the bytes that
        // the caller guarantees.
        let input = unsafe {
            let high = _mm_loadu_si128(lines[1].add(at).cast());
            _mm256_set_m128i(high, _mm_loadu_si128(lines[0].add(at).cast()))
        };
        at += 3 * BLOCK;
        let first = _mm256_shuffle_epi8(input, first_taps);
        let last = _mm256_shuffle_epi8(input, last_taps);
        for half in 0..T::HALVES {
            let [first_pair, last_pair] = pairs(&halves[half]);
            let dots = _mm256_add_epi32(
                _mm256_madd_epi16(first, first_pair),
                _mm256_madd_epi16(last, last_pair),
            );
            sums[half] = _mm256_add_epi32(sums[half], dots);
        }
    }
    combine::<T>(sums)
}

/// Vector version of [`scalar::vertical`]. Bytes of two rows are interleaved, so that one
/// multiply-add processes both.
#[target_feature(enable = "avx2")]
pub(crate) fn vertical<T: FixedPoint>(
    rows: &[u8],
    row_stride: usize,
    weights: &Weights<T>,
    output: usize,
    out: &mut [u8],
) {
    let length = out.len();
    let taps = weights.range(output).len();
    if length < STEP_BYTES {
        return scalar::vertical(rows, row_stride, weights, output, out);
    }
    assert!(rows.len() >= (taps - 1) * row_stride + length);
    let half = _mm256_set1_epi32(weights.rounding().half());
    let shift = _mm_cvtsi32_si128(weights.rounding().precision as i32);
    let zero = _mm256_setzero_si256();
    let halves = weights.halves().for_output(output);
    for x in (0..length).step_by(STEP_BYTES) {
        let x = x.min(length - STEP_BYTES);
        // Prefetches the row after the window, which the next output row is likely to need.
        _mm_prefetch::<_MM_HINT_T0>(rows.as_ptr().wrapping_add(taps * row_stride + x).cast());
        let mut sums = [[zero; MAX_HALVES]; 4];
        for (block, halves) in halves.chunks_exact(T::HALVES).take(taps.div_ceil(BLOCK)).enumerate()
        {
            // Rows after the window have weight 0: any row will do.
            let inputs: [__m256i; BLOCK] = std::array::from_fn(|tap| {
                let tap = (BLOCK * block + tap).min(taps - 1);
                // SAFETY: tap < taps, and x + STEP_BYTES <= length.
                unsafe { _mm256_loadu_si256(rows.as_ptr().add(tap * row_stride + x).cast()) }
            });
            for pair in 0..BLOCK / 2 {
                // The second pair of a short window has weight 0.
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
            sums.map(|sums| _mm256_sra_epi32(_mm256_add_epi32(half, combine::<T>(sums)), shift));
        // Packing works within lanes of 16 bytes like unpacking, so it restores the order.
        let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        // SAFETY: x + STEP_BYTES <= length = out.len().
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().add(x).cast(), bytes) };
    }
}

/// Combines the sums of products with each half of the weights.
#[target_feature(enable = "avx2")]
#[inline]
fn combine<T: FixedPoint>(sums: [__m256i; MAX_HALVES]) -> __m256i {
    let [lower, upper] = sums;
    if T::HALVES == 1 {
        lower
    } else {
        _mm256_add_epi32(lower, _mm256_slli_epi32::<{ LOWER_BITS as i32 }>(upper))
    }
}

/// Broadcasts the first two numbers of a block to all lanes of one vector, and the last two to all
/// lanes of another.
#[target_feature(enable = "avx2")]
#[inline]
fn pairs(half: &Half) -> [__m256i; 2] {
    let pairs = half.as_ptr().cast::<i32>();
    // SAFETY: reads the 8 bytes of the array.
    unsafe {
        [
            _mm256_set1_epi32(pairs.read_unaligned()),
            _mm256_set1_epi32(pairs.add(1).read_unaligned()),
        ]
    }
}
