//! Both passes of the resize with NEON: one tap of four channels per multiply-add of 16-bit
//! numbers.
//!
//! Weights that do not fit into 16 bits are split into two halves (see [`super::halves`]). Each
//! half has its own sums, which are combined at the end. The result is exact, because all sums are
//! modulo 2^32.

use std::arch::aarch64::*;

use super::fixed_point::BLOCK;
use super::halves::{Half, Halves, LOWER_BITS};
use super::weights::Rounding;
use super::{FixedPoint, Weights, scalar};

/// The number of output pixels per step of the horizontal pass.
const STEP_PIXELS: usize = 4;
/// The number of bytes that a load reads beyond the `3 * BLOCK` bytes that are used.
const OVERREAD_BYTES: usize = 16 - 3 * BLOCK;
/// The number of bytes per step of the vertical pass.
const STEP_BYTES: usize = 16;
/// The maximum number of halves of a weight.
const MAX_HALVES: usize = 2;

/// Vector version of [`scalar::horizontal`].
#[target_feature(enable = "neon")]
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
    let dense: [u8; 16] = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0xFF, 0xFF, 0xFF, 0xFF];
    // SAFETY: reads the 16 bytes of the array.
    let dense = unsafe { vld1q_u8(dense.as_ptr()) };
    let round = Round::new(weights.rounding());
    let halves = weights.halves();
    for (y, line) in vectors.chunks_exact_mut(out_row).enumerate() {
        for x in (0..weights.len()).step_by(STEP_PIXELS) {
            let x = x.min(weights.len() - STEP_PIXELS);
            // SAFETY: y < rows, and (y + 1) * row_stride + reach <= pixels.len().
            let (a, b, c, d) = unsafe {
                let start = pixels.as_ptr().add(y * row_stride);
                (
                    dot(start, weights, halves, x),
                    dot(start, weights, halves, x + 1),
                    dot(start, weights, halves, x + 2),
                    dot(start, weights, halves, x + 3),
                )
            };
            let bytes = vqtbl1q_u8(round.to_pixels([a, b, c, d]), dense);
            // SAFETY: writes 12 bytes from pixel x of a line: x + STEP_PIXELS <= weights.len().
            unsafe {
                let at = line.as_mut_ptr().add(3 * x);
                vst1_u8(at, vget_low_u8(bytes));
                at.add(8)
                    .cast::<u32>()
                    .write_unaligned(vgetq_lane_u32::<2>(vreinterpretq_u32_u8(bytes)));
            }
        }
    }
    scalar::horizontal(&pixels[rows * row_stride..], row_stride, weights, rest);
}

/// Returns the sums of one pixel: red, green, blue, and one unused sum.
///
/// # Safety
/// `3 * (weights.input() + weights.stride()) + OVERREAD_BYTES` bytes must be readable from the
/// start of the line.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn dot<T: FixedPoint>(
    line: *const u8,
    weights: &Weights<T>,
    halves: &Halves,
    output: usize,
) -> int32x4_t {
    let spread: [u8; 16] = [0, 1, 2, 0xFF, 3, 4, 5, 0xFF, 6, 7, 8, 0xFF, 9, 10, 11, 0xFF];
    // SAFETY: reads the 16 bytes of the array.
    let spread = unsafe { vld1q_u8(spread.as_ptr()) };
    let mut sums = [vdupq_n_s32(0); MAX_HALVES];
    let mut at = 3 * weights.range(output).start;
    for halves in halves.for_output(output).chunks_exact(T::HALVES) {
        // SAFETY: the start of the range is below `input`, so the loads stay within the bytes that
        // the caller guarantees.
        let input = vqtbl1q_u8(unsafe { vld1q_u8(line.add(at)) }, spread);
        at += 3 * BLOCK;
        let [first, last] = widen(input);
        for (half, sum) in halves.iter().zip(&mut sums) {
            let half = load(half);
            *sum = vmlal_lane_s16::<0>(*sum, vget_low_s16(first), half);
            *sum = vmlal_lane_s16::<1>(*sum, vget_high_s16(first), half);
            *sum = vmlal_lane_s16::<2>(*sum, vget_low_s16(last), half);
            *sum = vmlal_lane_s16::<3>(*sum, vget_high_s16(last), half);
        }
    }
    combine::<T>(sums)
}

/// Vector version of [`scalar::vertical`].
#[target_feature(enable = "neon")]
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
    let halves = weights.halves().for_output(output);
    let round = Round::new(weights.rounding());
    for x in (0..length).step_by(STEP_BYTES) {
        let x = x.min(length - STEP_BYTES);
        let mut sums = [[vdupq_n_s32(0); MAX_HALVES]; 4];
        for tap in 0..taps {
            // SAFETY: tap < taps, and x + STEP_BYTES <= length.
            let [first, last] = widen(unsafe { vld1q_u8(rows.as_ptr().add(tap * row_stride + x)) });
            for half in 0..T::HALVES {
                let weight = halves[tap / BLOCK * T::HALVES + half][tap % BLOCK];
                sums[0][half] = vmlal_n_s16(sums[0][half], vget_low_s16(first), weight);
                sums[1][half] = vmlal_n_s16(sums[1][half], vget_high_s16(first), weight);
                sums[2][half] = vmlal_n_s16(sums[2][half], vget_low_s16(last), weight);
                sums[3][half] = vmlal_n_s16(sums[3][half], vget_high_s16(last), weight);
            }
        }
        let [a, b, c, d] = sums;
        let bytes =
            round.to_pixels([combine::<T>(a), combine::<T>(b), combine::<T>(c), combine::<T>(d)]);
        // SAFETY: x + STEP_BYTES <= length = out.len().
        unsafe { vst1q_u8(out.as_mut_ptr().add(x), bytes) };
    }
}

/// The conversion of vectors of sums to pixels.
#[derive(Clone, Copy)]
struct Round {
    half: int32x4_t,
    /// The negated precision: a shift to the right.
    shift: int32x4_t,
}

impl Round {
    #[target_feature(enable = "neon")]
    fn new(rounding: Rounding) -> Self {
        Self {
            half: vdupq_n_s32(rounding.half()),
            shift: vdupq_n_s32(-(rounding.precision as i32)),
        }
    }

    /// Converts four vectors of sums to pixels, clamped to 0..=255.
    #[target_feature(enable = "neon")]
    #[inline]
    fn to_pixels(self, [a, b, c, d]: [int32x4_t; 4]) -> uint8x16_t {
        let low = vcombine_s16(vqmovn_s32(self.rounded(a)), vqmovn_s32(self.rounded(b)));
        let high = vcombine_s16(vqmovn_s32(self.rounded(c)), vqmovn_s32(self.rounded(d)));
        vcombine_u8(vqmovun_s16(low), vqmovun_s16(high))
    }

    /// Rounds sums to integers that are not clamped yet.
    #[target_feature(enable = "neon")]
    #[inline]
    fn rounded(self, sum: int32x4_t) -> int32x4_t {
        vshlq_s32(vaddq_s32(sum, self.half), self.shift)
    }
}

/// Widens 16 bytes to 16-bit numbers.
#[target_feature(enable = "neon")]
#[inline]
fn widen(bytes: uint8x16_t) -> [int16x8_t; 2] {
    [
        vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))),
        vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes))),
    ]
}

/// Combines the sums of products with each half of the weights.
#[target_feature(enable = "neon")]
#[inline]
fn combine<T: FixedPoint>([lower, upper]: [int32x4_t; MAX_HALVES]) -> int32x4_t {
    if T::HALVES == 1 {
        lower
    } else {
        vaddq_s32(lower, vshlq_n_s32::<{ LOWER_BITS as i32 }>(upper))
    }
}

/// Loads the halves of one block.
#[target_feature(enable = "neon")]
#[inline]
fn load(half: &Half) -> int16x4_t {
    // SAFETY: reads the 4 numbers of the array.
    unsafe { vld1_s16(half.as_ptr()) }
}
