//! Both passes of the resize with AVX-512 VBMI and VNNI: four taps per multiply-add of bytes.
//!
//! Weights are split into signed bytes (see [`super::bytes`]). Each byte has its own sums, which
//! are combined at the end. The result is exact, because all sums are modulo 2^32.

use std::arch::x86_64::*;

use super::bytes::Word;
use super::fixed_point::BLOCK;
use super::lanes::{LANES, Lanes, TABLE_BYTES};
use super::weights::Rounding;
use super::{FixedPoint, Weights, avx2};

/// The number of rows per step of the horizontal pass.
const STEP_ROWS: usize = 4;
/// The number of bytes per step of the vertical pass.
const STEP_BYTES: usize = 64;
/// The maximum number of bytes of a weight.
const MAX_WEIGHT_BYTES: usize = 3;

/// Vector version of [`super::scalar::horizontal`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi,avx512vnni")]
pub(crate) fn horizontal<T: FixedPoint>(
    pixels: &[u8],
    row_stride: usize,
    weights: &Weights<T>,
    out: &mut [u8],
) {
    match weights.lanes() {
        Some(lanes) if lanes.tables() == 1 => {
            horizontal_with_tables::<T, 1>(pixels, row_stride, weights, lanes, out)
        }
        Some(lanes) => horizontal_with_tables::<T, 2>(pixels, row_stride, weights, lanes, out),
        None => avx2::horizontal(pixels, row_stride, weights, out),
    }
}

/// Filters along rows. Each vector computes 16 adjacent bytes of a row; several rows share the
/// loads of weights.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi,avx512vnni")]
#[inline]
fn horizontal_with_tables<T: FixedPoint, const TABLES: usize>(
    pixels: &[u8],
    row_stride: usize,
    weights: &Weights<T>,
    lanes: &Lanes,
    out: &mut [u8],
) {
    let input = 3 * weights.input();
    let out_row = 3 * weights.len();
    let rows = out.len() / out_row;
    if rows == 0 {
        return;
    }
    assert!(row_stride >= input && pixels.len() >= (rows - 1) * row_stride + input);
    assert!(out_row >= LANES && lanes.tables() == TABLES);
    let round = Round::new(weights.rounding());
    for y in (0..rows).step_by(STEP_ROWS) {
        // If fewer rows are left, the last row is processed several times.
        let lines: [usize; STEP_ROWS] = std::array::from_fn(|line| (y + line).min(rows - 1));
        // SAFETY: every line is below rows.
        let inputs = lines.map(|line| unsafe { pixels.as_ptr().add(line * row_stride) });
        for (group, (starts, vectors)) in lanes.groups::<T>().enumerate() {
            for input in inputs {
                // Prefetches the next lines.
                _mm_prefetch::<_MM_HINT_T0>(
                    input.wrapping_add(STEP_ROWS * row_stride + starts[0] as usize).cast(),
                );
            }
            let mut sums = [[_mm512_setzero_si512(); MAX_WEIGHT_BYTES]; STEP_ROWS];
            for (&start, vectors) in starts.iter().zip(vectors.chunks_exact(1 + T::BYTES)) {
                // SAFETY: reads the 64 bytes of a `Vector`, which is aligned to 64 bytes.
                let load =
                    |index: usize| unsafe { _mm512_load_si512((&raw const vectors[index]).cast()) };
                let indices = load(0);
                for (sums, input) in sums.iter_mut().zip(inputs) {
                    // SAFETY: all tables are within the first `input` bytes of the line, which are
                    // pixels.
                    let first = unsafe { _mm512_loadu_si512(input.add(start as usize).cast()) };
                    let taken = if TABLES == 1 {
                        _mm512_permutexvar_epi8(indices, first)
                    } else {
                        // SAFETY: as above.
                        let second = unsafe {
                            _mm512_loadu_si512(input.add(start as usize + TABLE_BYTES).cast())
                        };
                        _mm512_permutex2var_epi8(first, indices, second)
                    };
                    for (byte, sum) in sums[..T::BYTES].iter_mut().enumerate() {
                        *sum = _mm512_dpbusd_epi32(*sum, taken, load(1 + byte));
                    }
                }
            }
            let at = (LANES * group).min(out_row - LANES);
            for (sums, line) in sums.into_iter().zip(lines) {
                let pixels = _mm512_max_epi32(round.rounded::<T>(sums), _mm512_setzero_si512());
                // SAFETY: at + LANES <= out_row, and line < rows.
                unsafe {
                    _mm_storeu_si128(
                        out.as_mut_ptr().add(line * out_row + at).cast(),
                        _mm512_cvtusepi32_epi8(pixels),
                    )
                };
            }
        }
    }
}

/// Vector version of [`super::scalar::vertical`]. Bytes of four rows are interleaved, so that one
/// multiply-add processes all four.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi,avx512vnni")]
pub(crate) fn vertical<T: FixedPoint>(
    rows: &[u8],
    row_stride: usize,
    weights: &Weights<T>,
    output: usize,
    out: &mut [u8],
) {
    let length = out.len();
    let taps = weights.range(output).len();
    let Some(bytes) = weights.bytes().filter(|_| length >= STEP_BYTES) else {
        return avx2::vertical(rows, row_stride, weights, output, out);
    };
    assert!(rows.len() >= (taps - 1) * row_stride + length);
    let words = &bytes.for_output(output)[..taps.div_ceil(BLOCK) * T::BYTES];
    let round = Round::new(weights.rounding());
    for x in (0..length).step_by(STEP_BYTES) {
        let x = x.min(length - STEP_BYTES);
        // Prefetches the row after the window, which the next output row is likely to need.
        _mm_prefetch::<_MM_HINT_T0>(rows.as_ptr().wrapping_add(taps * row_stride + x).cast());
        let mut sums = [[_mm512_setzero_si512(); MAX_WEIGHT_BYTES]; 4];
        for (block, words) in words.chunks_exact(T::BYTES).enumerate() {
            let [a, b, c, d] = std::array::from_fn(|tap| {
                // Rows after the window have weight 0: any row will do.
                let tap = (BLOCK * block + tap).min(taps - 1);
                // SAFETY: tap < taps, and x + STEP_BYTES <= length.
                unsafe { _mm512_loadu_si512(rows.as_ptr().add(tap * row_stride + x).cast()) }
            });
            let ab_low = _mm512_unpacklo_epi8(a, b);
            let ab_high = _mm512_unpackhi_epi8(a, b);
            let cd_low = _mm512_unpacklo_epi8(c, d);
            let cd_high = _mm512_unpackhi_epi8(c, d);
            let inputs = [
                _mm512_unpacklo_epi16(ab_low, cd_low),
                _mm512_unpackhi_epi16(ab_low, cd_low),
                _mm512_unpacklo_epi16(ab_high, cd_high),
                _mm512_unpackhi_epi16(ab_high, cd_high),
            ];
            for (byte, word) in words.iter().enumerate() {
                let word = broadcast(word);
                for (sums, input) in sums.iter_mut().zip(inputs) {
                    sums[byte] = _mm512_dpbusd_epi32(sums[byte], input, word);
                }
            }
        }
        let [a, b, c, d] = sums.map(|sums| round.rounded::<T>(sums));
        // Packing works within lanes of 16 bytes like unpacking, so it restores the order.
        let bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
        // SAFETY: x + STEP_BYTES <= length = out.len().
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(x).cast(), bytes) };
    }
}

/// The conversion of vectors of sums to pixels.
#[derive(Clone, Copy)]
struct Round {
    half: __m512i,
    precision: __m128i,
}

impl Round {
    #[target_feature(enable = "avx512f")]
    fn new(rounding: Rounding) -> Self {
        Self {
            half: _mm512_set1_epi32(rounding.half()),
            precision: _mm_cvtsi32_si128(rounding.precision as i32),
        }
    }

    /// Combines the sums of products with each byte of the negated weights, and rounds them to
    /// pixels that are not clamped yet.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn rounded<T: FixedPoint>(self, sums: [__m512i; MAX_WEIGHT_BYTES]) -> __m512i {
        let mut pixels = _mm512_sub_epi32(self.half, sums[0]);
        pixels = _mm512_sub_epi32(pixels, _mm512_slli_epi32::<8>(sums[1]));
        if T::BYTES > 2 {
            pixels = _mm512_sub_epi32(pixels, _mm512_slli_epi32::<16>(sums[2]));
        }
        _mm512_sra_epi32(pixels, self.precision)
    }
}

/// Broadcasts a word to all lanes.
#[target_feature(enable = "avx512f")]
#[inline]
fn broadcast(word: &Word) -> __m512i {
    _mm512_set1_epi32(i32::from_ne_bytes(word.map(|byte| byte as u8)))
}
