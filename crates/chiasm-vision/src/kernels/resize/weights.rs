//! Filter weights of one dimension (`HelperInterpBase` in PyTorch's `UpSampleKernel.cpp`, after Pillow's resampler).

use std::ops::Range;

/// For each output index, which inputs contribute and with what fixed-point weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weights {
    /// Weights stored per output, a multiple of [`BLOCK`]; those beyond its range are 0.
    stride: usize,
    /// Contributing inputs of each output, at least one and at most `stride`.
    ranges: Vec<Range<usize>>,
    /// `stride` per output.
    values: Vec<i16>,
    /// Number of inputs.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "there is no vector code"))]
    input: usize,
    rounding: Rounding,
}

/// Weights per output come in multiples of this, so that vector code needs no tail.
pub(super) const BLOCK: usize = 4;

/// One output's part of [`Weights`].
#[derive(Clone, Debug)]
pub(crate) struct Window<'a> {
    /// Its inputs.
    pub(crate) range: Range<usize>,
    /// Their weights, then zeros up to a multiple of [`BLOCK`].
    pub(super) weights: &'a [i16],
    pub(super) rounding: Rounding,
}

/// From a sum of products to a pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rounding {
    /// A weight of `1 << precision` is 1.0. From 0 to 22, so that no weight leaves 16 bits.
    pub(super) precision: u32,
}

impl Rounding {
    /// Where the sum starts: one half in fixed point, so that the shift rounds.
    pub(super) const fn half(self) -> i32 {
        if self.precision == 0 { 0 } else { 1 << (self.precision - 1) }
    }

    /// From a sum of products to the pixel.
    pub(super) const fn to_pixel(self, sum: i32) -> u8 {
        let pixel = sum >> self.precision;
        if pixel < 0 {
            0
        } else if pixel > 255 {
            255
        } else {
            pixel as u8
        }
    }
}

impl Weights {
    /// Weights for scaling `input` pixels to `output` pixels, both at least 1.
    pub(crate) fn bicubic(input: usize, output: usize) -> Self {
        let scale = input as f64 / output as f64;
        let widening = scale.max(1.0);
        // The cubic filter is 4 wide at scale 1; downscaling widens it.
        let support = 2.0 * widening;
        let taps = support.ceil() as usize * 2 + 1;
        let shrink = 1.0 / widening;

        let mut ranges = Vec::with_capacity(output);
        let mut exact = vec![0.0; output * taps];
        let mut largest = 0.0_f64;
        for (index, weights) in exact.chunks_exact_mut(taps).enumerate() {
            let center = scale * (index as f64 + 0.5);
            // Casts cut towards zero and negative numbers to zero, which is the clamping that is wanted.
            let start = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(input);
            // By rounding errors the range can be longer than the taps by one.
            let length = end.saturating_sub(start).min(taps);
            let weights = &mut weights[..length];
            let mut total = 0.0;
            for (tap, weight) in weights.iter_mut().enumerate() {
                *weight = cubic(((tap + start) as f64 - center + 0.5) * shrink);
                total += *weight;
            }
            if total != 0.0 {
                for weight in weights {
                    *weight /= total;
                    largest = largest.max(*weight);
                }
            }
            ranges.push(start..start + length);
        }

        let precision = precision(largest);
        let one = f64::from(1 << precision);
        let stride = ranges.iter().map(Range::len).max().unwrap_or(0).next_multiple_of(BLOCK);
        let mut values = vec![0; output * stride];
        for (values, exact) in values.chunks_exact_mut(stride).zip(exact.chunks_exact(taps)) {
            for (value, weight) in values.iter_mut().zip(exact) {
                *value = (weight * one + 0.5_f64.copysign(*weight)) as i16;
            }
        }
        Self { stride, ranges, values, input, rounding: Rounding { precision } }
    }

    /// Number of outputs.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// One output's inputs and weights.
    pub(crate) fn window(&self, output: usize) -> Window<'_> {
        let weights = &self.values[output * self.stride..][..self.stride];
        Window { range: self.ranges[output].clone(), weights, rounding: self.rounding }
    }

    /// For each output in order: its window.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Window<'_>> {
        (0..self.len()).map(|output| self.window(output))
    }

    /// The inputs that these outputs, at least one, need together.
    pub(crate) fn inputs(&self, outputs: Range<usize>) -> Range<usize> {
        self.ranges[outputs]
            .iter()
            .cloned()
            .reduce(|all, one| all.start.min(one.start)..all.end.max(one.end))
            .unwrap_or(0..0)
    }
}

/// What vector code relies on.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "there is no vector code"))]
impl Weights {
    /// Number of inputs: every range lies below it.
    pub(super) const fn input(&self) -> usize {
        self.input
    }

    /// Weights stored per output.
    pub(super) const fn stride(&self) -> usize {
        self.stride
    }

    pub(super) const fn rounding(&self) -> Rounding {
        self.rounding
    }
}

/// The most fractional bits with which the largest weight still fits into 16 bits, sign included.
fn precision(largest: f64) -> u32 {
    (0..22).find(|bits| (0.5 + largest * f64::from(2 << bits)) as i32 >= 1 << 15).unwrap_or(22)
}

/// Keys' cubic convolution with a = -1/2, written in PyTorch's order of operations.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        ((A * x - 5.0 * A) * x + 8.0 * A) * x - 4.0 * A
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_same_length_gets_the_identity() {
        let weights = Weights::bicubic(9, 9);
        for (index, window) in weights.iter().enumerate() {
            for (input, &value) in window.range.zip(window.weights) {
                assert_eq!(value, if input == index { 1 << window.rounding.precision } else { 0 });
            }
        }
    }

    proptest! {
        /// The sums of the kernels are i32: no pixels may make them overflow.
        #[test]
        fn weights_sum_to_one_and_stay_in_bounds(input in 1..3000_usize, output in 1..1500_usize) {
            let weights = Weights::bicubic(input, output);
            prop_assert_eq!(weights.len(), output);
            let one = 1_i64 << weights.rounding.precision;
            for Window { range, weights: values, .. } in weights.iter() {
                prop_assert!(!range.is_empty() && range.end <= input);
                prop_assert!(values.len() % BLOCK == 0 && values[range.len()..].iter().all(|&value| value == 0));
                let sum: i64 = values.iter().map(|&value| i64::from(value)).sum();
                prop_assert!((sum - one).abs() <= values.len() as i64);
                let reach: i64 = values.iter().map(|&value| i64::from(value).abs()).sum();
                prop_assert!(reach * 255 + one < i64::from(i32::MAX));
            }
        }
    }
}
