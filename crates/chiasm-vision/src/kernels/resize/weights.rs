//! The filter weights of one dimension: real numbers, which PyTorch and Pillow compute alike, then
//! converted to the fixed point of either library.

use std::ops::Range;
use std::sync::OnceLock;

use super::bytes::Bytes;
use super::filters::Filter;
use super::fixed_point::{BLOCK, FixedPoint};
use super::halves::Halves;
use super::lanes::Lanes;

/// The contributing inputs of each output, and their fixed-point weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weights<T> {
    /// The number of weights stored per output, a multiple of [`BLOCK`]. Weights beyond the range
    /// of the output are 0.
    stride: usize,
    /// The contributing inputs of each output: at least one, at most `stride`.
    ranges: Vec<Range<usize>>,
    /// The weights, `stride` per output.
    values: Vec<T>,
    /// The number of inputs.
    input: usize,
    rounding: Rounding,
    /// Computed on first use.
    halves: OnceLock<Halves>,
    /// Computed on first use.
    bytes: OnceLock<Option<Bytes>>,
    /// Computed on first use.
    lanes: OnceLock<Option<Lanes>>,
}

/// The inputs and weights of one output.
#[derive(Clone, Debug)]
pub(crate) struct Window<'a, T> {
    /// The contributing inputs.
    pub(crate) range: Range<usize>,
    /// The weights of the inputs, then zeros up to a multiple of [`BLOCK`].
    pub(super) weights: &'a [T],
    pub(super) rounding: Rounding,
}

/// The conversion of a sum of products to a pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rounding {
    /// The number of fractional bits of a weight, from 0 to 22, so that all sums fit into 32 bits.
    pub(super) precision: u32,
}

impl Rounding {
    /// Returns one half in fixed point: the initial value of a sum, so that the shift rounds.
    pub(super) const fn half(self) -> i32 {
        if self.precision == 0 { 0 } else { 1 << (self.precision - 1) }
    }

    /// Converts a sum of products to a pixel, clamped to 0..=255.
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

impl<T: FixedPoint> Weights<T> {
    /// Computes the weights for scaling `input` pixels to `output` pixels, both at least 1.
    ///
    /// Only the outputs in `kept`, which is not empty, get weights.
    pub(crate) fn new(filter: Filter, input: usize, output: usize, kept: Range<usize>) -> Self {
        let scale = input as f64 / output as f64;
        let widening = scale.max(1.0);
        let support = filter.support() * widening;
        let taps = support.ceil() as usize * 2 + 1;
        let shrink = 1.0 / widening;

        let mut ranges = Vec::with_capacity(kept.len());
        let mut exact = vec![0.0; kept.len() * taps];
        let mut discarded = vec![0.0; taps];
        let mut largest = 0.0_f64;
        // The precision depends on the weights of all outputs, including those that are not kept.
        for index in 0..output {
            let weights = if kept.contains(&index) {
                &mut exact[(index - kept.start) * taps..][..taps]
            } else {
                discarded.as_mut_slice()
            };
            let center = scale * (index as f64 + 0.5);
            // The casts truncate towards zero and clamp negative numbers to 0, as intended.
            let start = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(input);
            // Rounding errors can make the range longer than the taps by one.
            let length = end.saturating_sub(start).min(taps);
            let weights = &mut weights[..length];
            let mut total = 0.0;
            for (tap, weight) in weights.iter_mut().enumerate() {
                *weight = T::filter(filter, ((tap + start) as f64 - center + 0.5) * shrink);
                total += *weight;
            }
            if total != 0.0 {
                for weight in weights {
                    *weight /= total;
                    largest = largest.max(*weight);
                }
            }
            if kept.contains(&index) {
                ranges.push(start..start + length);
            }
        }

        let precision = T::precision(largest);
        let one = f64::from(1 << precision);
        let stride = ranges.iter().map(Range::len).max().unwrap_or(0).next_multiple_of(BLOCK);
        let mut values = vec![T::default(); ranges.len() * stride];
        for (values, exact) in values.chunks_exact_mut(stride).zip(exact.chunks_exact(taps)) {
            for (value, weight) in values.iter_mut().zip(exact) {
                *value = T::truncate(weight * one + 0.5_f64.copysign(*weight));
            }
        }
        Self {
            stride,
            ranges,
            values,
            input,
            rounding: Rounding { precision },
            halves: OnceLock::new(),
            bytes: OnceLock::new(),
            lanes: OnceLock::new(),
        }
    }

    /// Returns the number of outputs.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns the inputs and weights of one output.
    pub(crate) fn window(&self, output: usize) -> Window<'_, T> {
        let weights = &self.values[output * self.stride..][..self.stride];
        Window { range: self.ranges[output].clone(), weights, rounding: self.rounding }
    }

    /// Returns the windows of all outputs, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Window<'_, T>> {
        (0..self.len()).map(|output| self.window(output))
    }

    /// Returns the range of inputs that these outputs need; `outputs` is not empty.
    pub(crate) fn inputs(&self, outputs: Range<usize>) -> Range<usize> {
        self.ranges[outputs]
            .iter()
            .cloned()
            .reduce(|all, one| all.start.min(one.start)..all.end.max(one.end))
            .unwrap_or(0..0)
    }
}

/// Methods for vector code.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "not every architecture uses all methods")
)]
impl<T: FixedPoint> Weights<T> {
    /// Returns the number of inputs, which bounds every range.
    pub(super) const fn input(&self) -> usize {
        self.input
    }

    /// Returns the number of weights stored per output.
    pub(super) const fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the conversion of sums to pixels.
    pub(super) const fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// Returns the inputs of one output.
    pub(super) fn range(&self, output: usize) -> &Range<usize> {
        &self.ranges[output]
    }

    /// Returns the weights split into 16-bit numbers.
    pub(super) fn halves(&self) -> &Halves {
        self.halves.get_or_init(|| Halves::new(&self.values, self.stride))
    }

    /// Returns the weights split into bytes; `None` if a weight does not fit.
    pub(super) fn bytes(&self) -> Option<&Bytes> {
        self.bytes.get_or_init(|| Bytes::new(&self.values, self.stride)).as_ref()
    }

    /// Returns the weights arranged in vector lanes; `None` if they do not fit.
    pub(super) fn lanes(&self) -> Option<&Lanes> {
        self.lanes
            .get_or_init(|| Lanes::new::<T>(&self.ranges, self.stride, self.input, self.bytes()?))
            .as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equal_lengths_give_identity_weights() {
        let weights = Weights::<i16>::new(Filter::Bicubic, 9, 9, 0..9);
        for (index, window) in weights.iter().enumerate() {
            for (input, &value) in window.range.zip(window.weights) {
                assert_eq!(value, if input == index { 1 << window.rounding.precision } else { 0 });
            }
        }
    }

    fn filters() -> impl Strategy<Value = Filter> {
        prop_oneof![Just(Filter::Bilinear), Just(Filter::Bicubic), Just(Filter::Lanczos)]
    }

    /// Checks that the i32 sums of the kernels cannot overflow for any pixels.
    fn check<T: FixedPoint>(weights: &Weights<T>, output: usize) -> Result<(), TestCaseError> {
        prop_assert_eq!(weights.len(), output);
        let one = 1_i64 << weights.rounding.precision;
        for Window { range, weights: values, .. } in weights.iter() {
            let values: Vec<i64> = values.iter().map(|&value| i64::from(value.into())).collect();
            prop_assert!(!range.is_empty() && range.end <= weights.input);
            prop_assert!(
                values.len().is_multiple_of(BLOCK)
                    && values[range.len()..].iter().all(|&value| value == 0)
            );
            let sum: i64 = values.iter().sum();
            prop_assert!((sum - one).abs() <= values.len() as i64);
            let reach: i64 = values.iter().map(|value| value.abs()).sum();
            prop_assert!(reach * 255 + one < i64::from(i32::MAX));
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn weights_sum_to_one_without_overflow(
            filter in filters(), input in 1..3000_usize, output in 1..1500_usize,
        ) {
            check(&Weights::<i16>::new(filter, input, output, 0..output), output)?;
            check(&Weights::<i32>::new(filter, input, output, 0..output), output)?;
        }

        #[test]
        fn kept_outputs_have_the_weights_of_the_whole(
            filter in filters(),
            input in 1..300_usize,
            output in 1..150_usize,
            from in 0..150_usize,
            count in 1..150_usize,
        ) {
            let from = from % output;
            let kept = from..(from + count).min(output);
            let whole = Weights::<i16>::new(filter, input, output, 0..output);
            let part = Weights::<i16>::new(filter, input, output, kept.clone());
            prop_assert_eq!(part.len(), kept.len());
            for (part, whole) in part.iter().zip(whole.iter().skip(from)) {
                prop_assert_eq!(&part.range, &whole.range);
                prop_assert_eq!(part.rounding, whole.rounding);
                let length = part.range.len();
                prop_assert_eq!(&part.weights[..length], &whole.weights[..length]);
            }
        }
    }
}
