//! Both passes of the resize with NEON: a tap of four channels per multiply-add, of 16-bit numbers.
//!
//! Weights that do not fit into 16 bits come in two halves (see [`super::halves`]). Each half has
//! sums of its own, which are put together at the end: exact, as all sums are modulo 2^32.

use std::arch::aarch64::*;

use super::fixed_point::BLOCK;
use super::halves::{Half, Halves, LOWER};
use super::weights::Rounding;
use super::{FixedPoint, Weights, scalar};

/// Output pixels per step of the horizontal pass.
const PIXELS: usize = 4;
/// Bytes that a load takes beyond the `3 * BLOCK` that are used.
const SPARE: usize = 16 - 3 * BLOCK;
/// Bytes per step of the vertical pass.
const BYTES: usize = 16;
/// Halves of a weight at most.
const MOST: usize = 2;

/// See [`scalar::horizontal`].
#[target_feature(enable = "neon")]
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
    let dense: [u8; 16] = [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0xFF, 0xFF, 0xFF, 0xFF];
    // SAFETY: 16 bytes of an array of that length.
    let dense = unsafe { vld1q_u8(dense.as_ptr()) };
    let round = Round::new(weights.rounding());
    let halves = weights.halves();
    for (y, line) in vectors.chunks_exact_mut(out_row).enumerate() {
        for x in (0..weights.len()).step_by(PIXELS) {
            let x = x.min(weights.len() - PIXELS);
            // SAFETY: y < rows, and (y + 1) * row + reach <= pixels.len().
            let (a, b, c, d) = unsafe {
                let start = pixels.as_ptr().add(y * row);
                (
                    dot(start, weights, halves, x),
                    dot(start, weights, halves, x + 1),
                    dot(start, weights, halves, x + 2),
                    dot(start, weights, halves, x + 3),
                )
            };
            let bytes = vqtbl1q_u8(round.to_pixels([a, b, c, d]), dense);
            // SAFETY: 12 bytes from pixel x of a line: x + PIXELS <= weights.len().
            unsafe {
                let at = line.as_mut_ptr().add(3 * x);
                vst1_u8(at, vget_low_u8(bytes));
                at.add(8)
                    .cast::<u32>()
                    .write_unaligned(vgetq_lane_u32::<2>(vreinterpretq_u32_u8(bytes)));
            }
        }
    }
    scalar::horizontal(&pixels[rows * row..], row, weights, rest);
}

/// One pixel's sums: red, green, blue, and one that means nothing.
///
/// # Safety
/// `3 * (input + stride) + SPARE` bytes can be read from the line's start, in the terms of
/// `weights`.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn dot<T: FixedPoint>(
    line: *const u8,
    weights: &Weights<T>,
    halves: &Halves,
    output: usize,
) -> int32x4_t {
    let spread: [u8; 16] = [0, 1, 2, 0xFF, 3, 4, 5, 0xFF, 6, 7, 8, 0xFF, 9, 10, 11, 0xFF];
    // SAFETY: 16 bytes of an array of that length.
    let spread = unsafe { vld1q_u8(spread.as_ptr()) };
    let mut sums = [vdupq_n_s32(0); MOST];
    let mut at = 3 * weights.range(output).start;
    for halves in halves.for_output(output).chunks_exact(T::HALVES) {
        // SAFETY: the range's start and the stride are at most what the caller allows.
        let input = vqtbl1q_u8(unsafe { vld1q_u8(line.add(at)) }, spread);
        at += 3 * BLOCK;
        let [first, last] = widened(input);
        for (half, sum) in halves.iter().zip(&mut sums) {
            let half = load(half);
            *sum = vmlal_lane_s16::<0>(*sum, vget_low_s16(first), half);
            *sum = vmlal_lane_s16::<1>(*sum, vget_high_s16(first), half);
            *sum = vmlal_lane_s16::<2>(*sum, vget_low_s16(last), half);
            *sum = vmlal_lane_s16::<3>(*sum, vget_high_s16(last), half);
        }
    }
    whole::<T>(sums)
}

/// See [`scalar::vertical`].
#[target_feature(enable = "neon")]
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
    let halves = weights.halves().for_output(output);
    let round = Round::new(weights.rounding());
    for x in (0..length).step_by(BYTES) {
        let x = x.min(length - BYTES);
        let mut sums = [[vdupq_n_s32(0); MOST]; 4];
        for tap in 0..taps {
            // SAFETY: tap < taps, and x + BYTES <= length.
            let [first, last] = widened(unsafe { vld1q_u8(rows.as_ptr().add(tap * row + x)) });
            for half in 0..T::HALVES {
                let weight = halves[tap / BLOCK * T::HALVES + half][tap % BLOCK];
                sums[0][half] = vmlal_n_s16(sums[0][half], vget_low_s16(first), weight);
                sums[1][half] = vmlal_n_s16(sums[1][half], vget_high_s16(first), weight);
                sums[2][half] = vmlal_n_s16(sums[2][half], vget_low_s16(last), weight);
                sums[3][half] = vmlal_n_s16(sums[3][half], vget_high_s16(last), weight);
            }
        }
        let [a, b, c, d] = sums;
        let bytes = round.to_pixels([whole::<T>(a), whole::<T>(b), whole::<T>(c), whole::<T>(d)]);
        // SAFETY: x + BYTES <= length = out.len().
        unsafe { vst1q_u8(out.as_mut_ptr().add(x), bytes) };
    }
}

/// Makes pixels of sums.
#[derive(Clone, Copy)]
struct Round {
    half: int32x4_t,
    /// The precision negated: a shift to the right.
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

    #[target_feature(enable = "neon")]
    #[inline]
    fn to_pixels(self, [a, b, c, d]: [int32x4_t; 4]) -> uint8x16_t {
        let low = vcombine_s16(vqmovn_s32(self.shifted(a)), vqmovn_s32(self.shifted(b)));
        let high = vcombine_s16(vqmovn_s32(self.shifted(c)), vqmovn_s32(self.shifted(d)));
        vcombine_u8(vqmovun_s16(low), vqmovun_s16(high))
    }

    #[target_feature(enable = "neon")]
    #[inline]
    fn shifted(self, sum: int32x4_t) -> int32x4_t {
        vshlq_s32(vaddq_s32(sum, self.half), self.shift)
    }
}

/// 16 bytes as 16-bit numbers.
#[target_feature(enable = "neon")]
#[inline]
fn widened(bytes: uint8x16_t) -> [int16x8_t; 2] {
    [
        vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))),
        vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes))),
    ]
}

/// The sums with weights from the sums with their halves.
#[target_feature(enable = "neon")]
#[inline]
fn whole<T: FixedPoint>([lower, upper]: [int32x4_t; MOST]) -> int32x4_t {
    if T::HALVES == 1 { lower } else { vaddq_s32(lower, vshlq_n_s32::<{ LOWER as i32 }>(upper)) }
}

#[target_feature(enable = "neon")]
#[inline]
fn load(half: &Half) -> int16x4_t {
    // SAFETY: 4 numbers of an array of that length.
    unsafe { vld1_s16(half.as_ptr()) }
}
