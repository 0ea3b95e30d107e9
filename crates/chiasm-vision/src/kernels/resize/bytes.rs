//! Weights split into signed bytes, for multiply-adds of unsigned by signed bytes.

use super::fixed_point::{BLOCK, FixedPoint};

/// The weights, negated and split into signed bytes. Each byte counts 256 times as much as the
/// previous one.
///
/// Weights are negated because a weight of almost 1.0 is as large as 16 bits allow: its upper byte
/// would be 128.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bytes {
    /// [`FixedPoint::BYTES`] words per [`BLOCK`] of weights, output by output. The first word has
    /// the lowest byte of each weight, the last word the highest.
    words: Vec<Word>,
    /// The number of words per output.
    per_output: usize,
}

/// One byte of each weight of a block.
pub(super) type Word = [i8; BLOCK];

impl Bytes {
    /// Splits weights. Each output has `stride` weights, a multiple of [`BLOCK`]. Returns `None` if
    /// a weight does not fit into the bytes.
    pub(super) fn new<T: FixedPoint>(weights: &[T], stride: usize) -> Option<Self> {
        let mut words = Vec::with_capacity(weights.len() / BLOCK * T::BYTES);
        for block in weights.chunks_exact(BLOCK) {
            let mut remainders: [i32; BLOCK] = std::array::from_fn(|tap| -block[tap].into());
            for _ in 0..T::BYTES {
                let word = remainders.map(|remainder| remainder as i8);
                for (remainder, byte) in remainders.iter_mut().zip(word) {
                    *remainder = (*remainder - i32::from(byte)) >> 8;
                }
                words.push(word);
            }
            if remainders != [0; BLOCK] {
                return None;
            }
        }
        Some(Self { words, per_output: stride / BLOCK * T::BYTES })
    }

    /// Returns the words of one output: [`FixedPoint::BYTES`] for each block of its weights.
    pub(super) fn for_output(&self, output: usize) -> &[Word] {
        &self.words[output * self.per_output..][..self.per_output]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Filter, Weights};
    use super::*;
    use proptest::prelude::*;

    fn check<T: FixedPoint>(weights: &Weights<T>) -> Result<(), TestCaseError> {
        let bytes = weights.bytes().ok_or_else(|| TestCaseError::fail("a weight does not fit"))?;
        for (output, window) in weights.iter().enumerate() {
            let blocks = bytes.for_output(output).chunks_exact(T::BYTES);
            for (words, block) in blocks.zip(window.weights.chunks_exact(BLOCK)) {
                for (tap, &weight) in block.iter().enumerate() {
                    let sum =
                        words.iter().rev().fold(0, |sum, word| 256 * sum + i32::from(word[tap]));
                    prop_assert_eq!(sum, -weight.into());
                }
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn bytes_recombine_to_the_weights(input in 1..3000_usize, output in 1..1500_usize) {
            for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
                check(&Weights::<i16>::new(filter, input, output, 0..output))?;
                check(&Weights::<i32>::new(filter, input, output, 0..output))?;
            }
        }
    }
}
