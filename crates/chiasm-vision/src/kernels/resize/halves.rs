//! Weights of at most 16 bits each, for multiply-adds of such numbers.

use super::weights::BLOCK;
use super::{FixedPoint, Weights};

/// A half of each weight of a block.
pub(super) type Half = [i16; BLOCK];

/// Bits of a lower half.
pub(super) const LOWER: u32 = 15;

/// All weights, in two halves where 16 bits do not hold them: the lower [`LOWER`] bits, which are never negative, and
/// the rest. (The rest of a weight of Pillow has 9 bits: sums with 255 must not leave 32 bits.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Halves {
    /// [`FixedPoint::HALVES`] halves per [`BLOCK`] of weights, output by output, the lower half first.
    halves: Vec<Half>,
}

impl Halves {
    pub(super) fn new<T: FixedPoint>(weights: &Weights<T>) -> Self {
        let blocks = weights.len() * weights.stride() / BLOCK;
        let mut halves = Vec::with_capacity(blocks * T::HALVES);
        for window in weights.iter() {
            for block in window.weights.chunks_exact(BLOCK) {
                let block: [i32; BLOCK] = std::array::from_fn(|tap| block[tap].into());
                if T::HALVES == 1 {
                    halves.push(block.map(|weight| weight as i16));
                } else {
                    halves.push(block.map(|weight| (weight & ((1 << LOWER) - 1)) as i16));
                    halves.push(block.map(|weight| (weight >> LOWER) as i16));
                }
            }
        }
        Self { halves }
    }

    /// One output's halves: [`FixedPoint::HALVES`] for each block of its weights.
    pub(super) fn of<T: FixedPoint>(&self, weights: &Weights<T>, output: usize) -> &[Half] {
        let count = weights.stride() / BLOCK * T::HALVES;
        &self.halves[output * count..][..count]
    }
}

#[cfg(test)]
mod tests {
    use super::super::Filter;
    use super::*;
    use proptest::prelude::*;

    fn check<T: FixedPoint>(weights: &Weights<T>) -> Result<(), TestCaseError> {
        let halves = Halves::new(weights);
        for (output, window) in weights.iter().enumerate() {
            let blocks = halves.of(weights, output).chunks_exact(T::HALVES);
            for (halves, block) in blocks.zip(window.weights.chunks_exact(BLOCK)) {
                for (tap, &weight) in block.iter().enumerate() {
                    let sum = halves.iter().rev().fold(0, |sum, half| (sum << LOWER) + i32::from(half[tap]));
                    prop_assert_eq!(sum, weight.into());
                }
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn halves_are_what_the_weights_are(input in 1..3000_usize, output in 1..1500_usize) {
            for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
                check(&Weights::<i16>::new(filter, input, output, 0..output))?;
                check(&Weights::<i32>::new(filter, input, output, 0..output))?;
            }
        }
    }
}
