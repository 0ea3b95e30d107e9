//! Both passes of the resize with AVX-512 VBMI and VNNI: four taps per multiply-add, of bytes by
//! bytes.
//!
//! A weight is taken apart into signed bytes (see [`super::bytes`]). Each byte has sums of its own,
//! which are put together at the end: exact, as all sums are modulo 2^32.

use std::arch::x86_64::*;

use super::bytes::Word;
use super::fixed_point::BLOCK;
use super::lanes::{LANES, Lanes, TABLE};
use super::weights::Rounding;
use super::{FixedPoint, Weights, avx2};

/// Rows per step of the horizontal pass.
const LINES: usize = 4;
/// Bytes per step of the vertical pass.
const BYTES: usize = 64;
/// Bytes of a weight at most.
const MOST: usize = 3;

/// See [`super::scalar::horizontal`].
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi,avx512vnni")]
pub(crate) fn horizontal<T: FixedPoint>(
    pixels: &[u8],
    row: usize,
    weights: &Weights<T>,
    out: &mut [u8],
) {
    match weights.lanes() {
        Some(lanes) if lanes.tables() == 1 => {
            horizontal_from::<T, 1>(pixels, row, weights, lanes, out)
        }
        Some(lanes) => horizontal_from::<T, 2>(pixels, row, weights, lanes, out),
        None => avx2::horizontal(pixels, row, weights, out),
    }
}

/// Each vector makes 16 neighbouring bytes of a row. Several rows share the loads of weights.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi,avx512vnni")]
#[inline]
fn horizontal_from<T: FixedPoint, const TABLES: usize>(
    pixels: &[u8],
    row: usize,
    weights: &Weights<T>,
    lanes: &Lanes,
    out: &mut [u8],
) {
    let (input, out_row) = (3 * weights.input(), 3 * weights.len());
    let rows = out.len() / out_row;
    if rows == 0 {
        return;
    }
    assert!(row >= input && pixels.len() >= (rows - 1) * row + input);
    assert!(out_row >= LANES && lanes.tables() == TABLES);
    let round = Round::new(weights.rounding());
    for y in (0..rows).step_by(LINES) {
        // The last row may stand in for missing ones: it is then written several times.
        let lines: [usize; LINES] = std::array::from_fn(|line| (y + line).min(rows - 1));
        // SAFETY: every line is below rows.
        let inputs = lines.map(|line| unsafe { pixels.as_ptr().add(line * row) });
        for (group, (starts, vectors)) in lanes.groups::<T>().enumerate() {
            for input in inputs {
                // The next lines.
                _mm_prefetch::<_MM_HINT_T0>(
                    input.wrapping_add(LINES * row + starts[0] as usize).cast(),
                );
            }
            let mut sums = [[_mm512_setzero_si512(); MOST]; LINES];
            for (&start, vectors) in starts.iter().zip(vectors.chunks_exact(1 + T::BYTES)) {
                // SAFETY: 64 bytes of arrays of that length.
                let load =
                    |index: usize| unsafe { _mm512_load_si512((&raw const vectors[index]).cast()) };
                let indices = load(0);
                for (sums, input) in sums.iter_mut().zip(inputs) {
                    // SAFETY: all tables lie within the row's first `input` bytes, which are pixels
                    // of the line.
                    let first = unsafe { _mm512_loadu_si512(input.add(start as usize).cast()) };
                    let taken = if TABLES == 1 {
                        _mm512_permutexvar_epi8(indices, first)
                    } else {
                        // SAFETY: as above.
                        let second =
                            unsafe { _mm512_loadu_si512(input.add(start as usize + TABLE).cast()) };
                        _mm512_permutex2var_epi8(first, indices, second)
                    };
                    for (byte, sum) in sums[..T::BYTES].iter_mut().enumerate() {
                        *sum = _mm512_dpbusd_epi32(*sum, taken, load(1 + byte));
                    }
                }
            }
            let at = (LANES * group).min(out_row - LANES);
            for (sums, line) in sums.into_iter().zip(lines) {
                let pixels = _mm512_max_epi32(round.shifted::<T>(sums), _mm512_setzero_si512());
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

/// See [`super::scalar::vertical`]. Bytes of four rows are interleaved, so that one multiply-add
/// takes all.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vbmi,avx512vnni")]
pub(crate) fn vertical<T: FixedPoint>(
    rows: &[u8],
    row: usize,
    weights: &Weights<T>,
    output: usize,
    out: &mut [u8],
) {
    let (length, taps) = (out.len(), weights.range(output).len());
    let Some(bytes) = weights.bytes().filter(|_| length >= BYTES) else {
        return avx2::vertical(rows, row, weights, output, out);
    };
    assert!(rows.len() >= (taps - 1) * row + length);
    let words = &bytes.for_output(output)[..taps.div_ceil(BLOCK) * T::BYTES];
    let round = Round::new(weights.rounding());
    for x in (0..length).step_by(BYTES) {
        let x = x.min(length - BYTES);
        // The next output row is likely to need the row behind this one's.
        _mm_prefetch::<_MM_HINT_T0>(rows.as_ptr().wrapping_add(taps * row + x).cast());
        let mut sums = [[_mm512_setzero_si512(); MOST]; 4];
        for (block, words) in words.chunks_exact(T::BYTES).enumerate() {
            let [a, b, c, d] = std::array::from_fn(|tap| {
                // Beyond the last row the weights are 0: any row will do.
                let tap = (BLOCK * block + tap).min(taps - 1);
                // SAFETY: tap < taps, and x + BYTES <= length.
                unsafe { _mm512_loadu_si512(rows.as_ptr().add(tap * row + x).cast()) }
            });
            let (ab, ab_2) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
            let (cd, cd_2) = (_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d));
            let inputs = [
                _mm512_unpacklo_epi16(ab, cd),
                _mm512_unpackhi_epi16(ab, cd),
                _mm512_unpacklo_epi16(ab_2, cd_2),
                _mm512_unpackhi_epi16(ab_2, cd_2),
            ];
            for (byte, word) in words.iter().enumerate() {
                let word = everywhere(word);
                for (sums, input) in sums.iter_mut().zip(inputs) {
                    sums[byte] = _mm512_dpbusd_epi32(sums[byte], input, word);
                }
            }
        }
        let [a, b, c, d] = sums.map(|sums| round.shifted::<T>(sums));
        // Packing works within 16 bytes as unpacking did: the order is restored.
        let bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
        // SAFETY: x + BYTES <= length = out.len().
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(x).cast(), bytes) };
    }
}

/// Makes pixels of sums.
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

    /// Makes pixels that are not clamped yet of sums with the bytes of the negated weights.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn shifted<T: FixedPoint>(self, sums: [__m512i; MOST]) -> __m512i {
        let mut pixels = _mm512_sub_epi32(self.half, sums[0]);
        pixels = _mm512_sub_epi32(pixels, _mm512_slli_epi32::<8>(sums[1]));
        if T::BYTES > 2 {
            pixels = _mm512_sub_epi32(pixels, _mm512_slli_epi32::<16>(sums[2]));
        }
        _mm512_sra_epi32(pixels, self.precision)
    }
}

/// A word in every lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn everywhere(word: &Word) -> __m512i {
    _mm512_set1_epi32(i32::from_ne_bytes(word.map(|byte| byte as u8)))
}
