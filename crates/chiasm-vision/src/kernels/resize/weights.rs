//! Filter weights of one dimension: real numbers as both PyTorch and Pillow compute them, then
//! fixed point of either.

use std::ops::Range;
use std::sync::OnceLock;

use super::bytes::Bytes;
use super::filters::Filter;
use super::fixed_point::{BLOCK, FixedPoint};
use super::halves::Halves;
use super::lanes::Lanes;

/// The inputs that contribute to each output, and their fixed-point weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Weights<T> {
    /// Weights stored per output, a multiple of [`BLOCK`]; those beyond its range are 0.
    stride: usize,
    /// Contributing inputs of each output, at least one and at most `stride`.
    ranges: Vec<Range<usize>>,
    /// `stride` per output.
    values: Vec<T>,
    /// Number of inputs.
    input: usize,
    rounding: Rounding,
    /// Made when first asked for.
    halves: OnceLock<Halves>,
    /// Made when first asked for.
    bytes: OnceLock<Option<Bytes>>,
    /// Made when first asked for.
    lanes: OnceLock<Option<Lanes>>,
}

/// One output's part of [`Weights`].
#[derive(Clone, Debug)]
pub(crate) struct Window<'a, T> {
    /// Its inputs.
    pub(crate) range: Range<usize>,
    /// Their weights, then zeros up to a multiple of [`BLOCK`].
    pub(super) weights: &'a [T],
    pub(super) rounding: Rounding,
}

/// Makes a pixel of a sum of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rounding {
    /// A weight of `1 << precision` is 1.0. From 0 to 22, so that no sum leaves 32 bits.
    pub(super) precision: u32,
}

impl Rounding {
    /// The sum's first term: one half in fixed point, so that the shift rounds.
    pub(super) const fn half(self) -> i32 {
        if self.precision == 0 { 0 } else { 1 << (self.precision - 1) }
    }

    /// The pixel of a sum of products, clamped to 0..=255.
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
    /// Weights for scaling `input` pixels to `output` pixels, both at least 1, of which only those
    /// in `kept`, at least one, are wanted.
    pub(crate) fn new(filter: Filter, input: usize, output: usize, kept: Range<usize>) -> Self {
        let scale = input as f64 / output as f64;
        let widening = scale.max(1.0);
        let support = filter.support() * widening;
        let taps = support.ceil() as usize * 2 + 1;
        let shrink = 1.0 / widening;

        let mut ranges = Vec::with_capacity(kept.len());
        let mut exact = vec![0.0; kept.len() * taps];
        let mut unwanted = vec![0.0; taps];
        let mut largest = 0.0_f64;
        // The precision depends on the weights of all outputs, also of those that are not wanted.
        for index in 0..output {
            let weights = match kept.contains(&index) {
                true => &mut exact[(index - kept.start) * taps..][..taps],
                false => unwanted.as_mut_slice(),
            };
            let center = scale * (index as f64 + 0.5);
            // Casts cut towards zero and negative numbers to zero, which is the clamping that is
            // wanted.
            let start = (center - support + 0.5) as usize;
            let end = ((center + support + 0.5) as usize).min(input);
            // By rounding errors the range can be longer than the taps by one.
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
                *value = T::cut(weight * one + 0.5_f64.copysign(*weight));
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

    /// Number of outputs.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// One output's inputs and weights.
    pub(crate) fn window(&self, output: usize) -> Window<'_, T> {
        let weights = &self.values[output * self.stride..][..self.stride];
        Window { range: self.ranges[output].clone(), weights, rounding: self.rounding }
    }

    /// Yields every output's window, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Window<'_, T>> {
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
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "not every architecture's code needs all")
)]
impl<T: FixedPoint> Weights<T> {
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

    /// One output's inputs.
    pub(super) fn range(&self, output: usize) -> &Range<usize> {
        &self.ranges[output]
    }

    /// The weights in 16-bit numbers.
    pub(super) fn halves(&self) -> &Halves {
        self.halves.get_or_init(|| Halves::new(&self.values, self.stride))
    }

    /// The weights in bytes, `None` if one does not fit into them.
    pub(super) fn bytes(&self) -> Option<&Bytes> {
        self.bytes.get_or_init(|| Bytes::new(&self.values, self.stride)).as_ref()
    }

    /// The weights in lanes, `None` if they do not fit into them.
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
    fn the_same_length_gets_the_identity() {
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

    /// The sums of the kernels are i32: no pixels may make them overflow.
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
        fn weights_sum_to_one_and_stay_in_bounds(filter in filters(), input in 1..3000_usize, output in 1..1500_usize) {
            check(&Weights::<i16>::new(filter, input, output, 0..output), output)?;
            check(&Weights::<i32>::new(filter, input, output, 0..output), output)?;
        }

        #[test]
        fn a_part_of_the_outputs_has_the_weights_that_it_has_in_the_whole(
            filter in filters(), input in 1..300_usize, output in 1..150_usize, from in 0..150_usize, count in 1..150_usize,
        ) {
            let from = from % output;
            let kept = from..(from + count).min(output);
            let whole = Weights::<i16>::new(filter, input, output, 0..output);
            let part = Weights::<i16>::new(filter, input, output, kept.clone());
            prop_assert_eq!(part.len(), kept.len());
            for (part, whole) in part.iter().zip(whole.iter().skip(from)) {
                prop_assert_eq!(&part.range, &whole.range);
                prop_assert_eq!(part.rounding, whole.rounding);
                prop_assert_eq!(&part.weights[..part.range.len()], &whole.weights[..part.range.len()]);
            }
        }
    }
}
