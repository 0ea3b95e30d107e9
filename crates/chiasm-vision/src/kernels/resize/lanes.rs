//! Weights of the horizontal pass, arranged for vectors whose lanes are adjacent bytes of an output
//! row of any channel: the input bytes of each lane and their weights.

use std::ops::Range;

use super::bytes::{Bytes, Word};
use super::fixed_point::{BLOCK, FixedPoint};

/// The number of output bytes per vector.
pub(super) const LANES: usize = 16;
/// The number of input bytes in a table, from which the lanes of a vector select their bytes.
pub(super) const TABLE_BYTES: usize = 64;

/// A vector with one [`Word`] per lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(super) struct Vector(pub(super) [Word; LANES]);

/// The weights of an output row in groups of [`LANES`] bytes. The last group may overlap the one
/// before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lanes {
    /// The number of tables from which the lanes select: 1 or 2.
    tables: usize,
    /// The number of blocks of weights per output.
    blocks: usize,
    /// The index in the input row of the first table's first byte, by group and block. All tables
    /// are within the row.
    starts: Vec<u32>,
    /// The vectors by group and block: one with each lane's indices of [`BLOCK`] bytes in the
    /// tables, then [`FixedPoint::BYTES`] with their weights.
    vectors: Vec<Vector>,
}

impl Lanes {
    /// Arranges the weights of outputs that use these `ranges` of `input` inputs. `bytes` has
    /// `stride` weights per output.
    ///
    /// Returns `None` if the row is too short, or if the inputs of adjacent outputs are too far
    /// apart.
    pub(super) fn new<T: FixedPoint>(
        ranges: &[Range<usize>],
        stride: usize,
        input: usize,
        bytes: &Bytes,
    ) -> Option<Self> {
        (1..=2).find_map(|tables| Self::with_tables::<T>(ranges, stride, input, bytes, tables))
    }

    fn with_tables<T: FixedPoint>(
        ranges: &[Range<usize>],
        stride: usize,
        input: usize,
        bytes: &Bytes,
        tables: usize,
    ) -> Option<Self> {
        let row = 3 * ranges.len();
        let blocks = stride / BLOCK;
        let last_start = (3 * input).checked_sub(tables * TABLE_BYTES)?;
        let groups = row.div_ceil(LANES);
        let mut starts = Vec::with_capacity(groups * blocks);
        let mut vectors = Vec::with_capacity(groups * blocks * (1 + T::BYTES));
        for group in 0..groups {
            let first = (LANES * group).min(row.checked_sub(LANES)?);
            for block in 0..blocks {
                let input = |output: usize| 3 * (ranges[output].start + BLOCK * block);
                let start = input(first / 3).min(last_start);
                starts.push(u32::try_from(start).ok()?);
                let mut indices = [[0; BLOCK]; LANES];
                let mut weights = [[[0; BLOCK]; LANES]; 4];
                for (lane, indices) in indices.iter_mut().enumerate() {
                    let output = (first + lane) / 3;
                    let channel = (first + lane) % 3;
                    // Inputs after the window have weight 0: any byte will do.
                    let taps = ranges[output].len().saturating_sub(BLOCK * block).min(BLOCK);
                    if taps == 0 {
                        continue;
                    }
                    let index = input(output) + channel - start;
                    if index + 3 * (taps - 1) >= tables * TABLE_BYTES {
                        return None;
                    }
                    *indices = std::array::from_fn(|tap| (index + 3 * tap) as i8);
                    let words = &bytes.for_output(output)[T::BYTES * block..][..T::BYTES];
                    for (vector, word) in weights.iter_mut().zip(words) {
                        vector[lane] = *word;
                    }
                }
                vectors.push(Vector(indices));
                vectors.extend(weights[..T::BYTES].iter().copied().map(Vector));
            }
        }
        Some(Self { tables, blocks, starts, vectors })
    }

    /// Returns the number of tables from which the lanes select: 1 or 2.
    pub(super) const fn tables(&self) -> usize {
        self.tables
    }

    /// Returns the blocks of each group: the start indices of their tables, and their vectors.
    pub(super) fn groups<T: FixedPoint>(&self) -> impl Iterator<Item = (&[u32], &[Vector])> {
        let vectors = self.vectors.chunks_exact(self.blocks * (1 + T::BYTES));
        self.starts.chunks_exact(self.blocks).zip(vectors)
    }
}
