//! Weights split into 16-bit numbers, for multiply-adds of 16-bit numbers.

use super::fixed_point::{BLOCK, FixedPoint};

/// One half of each weight of a block.
pub(super) type Half = [i16; BLOCK];

/// The number of bits of a lower half.
pub(super) const LOWER_BITS: u32 = 15;

/// The weights. Weights that do not fit into 16 bits are split into two halves: the lower
/// [`LOWER_BITS`] bits, which are never negative, and the upper bits.
///
/// The upper half of a Pillow weight has 9 bits, because sums of products with 255 must fit into 32
/// bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Halves {
    /// [`FixedPoint::HALVES`] halves per [`BLOCK`] of weights, output by output, the lower half
    /// first.
    halves: Vec<Half>,
    /// The number of halves per output.
    per_output: usize,
}

impl Halves {
    /// Splits weights. Each output has `stride` weights, a multiple of [`BLOCK`].
    pub(super) fn new<T: FixedPoint>(weights: &[T], stride: usize) -> Self {
        let mut halves = Vec::with_capacity(weights.len() / BLOCK * T::HALVES);
        for block in weights.chunks_exact(BLOCK) {
            let block: [i32; BLOCK] = std::array::from_fn(|tap| block[tap].into());
            if T::HALVES == 1 {
                halves.push(block.map(|weight| weight as i16));
            } else {
                halves.push(block.map(|weight| (weight & ((1 << LOWER_BITS) - 1)) as i16));
                halves.push(block.map(|weight| (weight >> LOWER_BITS) as i16));
            }
        }
        Self { halves, per_output: stride / BLOCK * T::HALVES }
    }

    /// Returns the halves of one output: [`FixedPoint::HALVES`] for each block of its weights.
    pub(super) fn for_output(&self, output: usize) -> &[Half] {
        &self.halves[output * self.per_output..][..self.per_output]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Filter, Weights};
    use super::*;
    use proptest::prelude::*;

    fn check<T: FixedPoint>(weights: &Weights<T>) -> Result<(), TestCaseError> {
        let halves = weights.halves();
        for (output, window) in weights.iter().enumerate() {
            let blocks = halves.for_output(output).chunks_exact(T::HALVES);
            for (halves, block) in blocks.zip(window.weights.chunks_exact(BLOCK)) {
                for (tap, &weight) in block.iter().enumerate() {
                    let sum = halves
                        .iter()
                        .rev()
                        .fold(0, |sum, half| (sum << LOWER_BITS) + i32::from(half[tap]));
                    prop_assert_eq!(sum, weight.into());
                }
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn halves_recombine_to_the_weights(input in 1..3000_usize, output in 1..1500_usize) {
            for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
                check(&Weights::<i16>::new(filter, input, output, 0..output))?;
                check(&Weights::<i32>::new(filter, input, output, 0..output))?;
            }
        }
    }
}
