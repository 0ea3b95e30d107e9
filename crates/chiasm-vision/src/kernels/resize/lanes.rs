//! Weights of the horizontal pass for vectors whose lanes are neighbouring bytes of an output row,
//! whatever their channels: which input bytes each lane takes, and what they weigh.

use std::ops::Range;

use super::bytes::{Bytes, Word};
use super::fixed_point::{BLOCK, FixedPoint};

/// Output bytes that are made together.
pub(super) const LANES: usize = 16;
/// Input bytes from which one vector's lanes can choose.
pub(super) const TABLE: usize = 64;

/// A vector: a [`Word`] for each lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub(super) struct Vector(pub(super) [Word; LANES]);

/// An output row in groups of [`LANES`] bytes, the last of which may overlap the one before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lanes {
    /// Tables from which the lanes choose: 1 or 2.
    tables: usize,
    /// Blocks of weights per output.
    blocks: usize,
    /// Indices in the input row of the first table's first byte, by group and block. All tables lie
    /// within the row.
    starts: Vec<u32>,
    /// Vectors by group and block: each lane's indices of [`BLOCK`] bytes in the tables, then
    /// [`FixedPoint::BYTES`] vectors of weights.
    vectors: Vec<Vector>,
}

impl Lanes {
    /// Arranges weights for outputs that take these `ranges` of `input` inputs; `bytes` holds
    /// `stride` weights per output. `None` if the row is too short, or if neighbouring outputs lie
    /// too far apart in the input.
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
        let (row, blocks) = (3 * ranges.len(), stride / BLOCK);
        let last_start = (3 * input).checked_sub(tables * TABLE)?;
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
                let mut weighing = [[[0; BLOCK]; LANES]; 4];
                for (lane, indices) in indices.iter_mut().enumerate() {
                    let (output, channel) = ((first + lane) / 3, (first + lane) % 3);
                    // The inputs behind the window weigh nothing: any byte will do.
                    let taps = ranges[output].len().saturating_sub(BLOCK * block).min(BLOCK);
                    if taps == 0 {
                        continue;
                    }
                    let index = input(output) + channel - start;
                    if index + 3 * (taps - 1) >= tables * TABLE {
                        return None;
                    }
                    *indices = std::array::from_fn(|tap| (index + 3 * tap) as i8);
                    let words = &bytes.for_output(output)[T::BYTES * block..][..T::BYTES];
                    for (vector, word) in weighing.iter_mut().zip(words) {
                        vector[lane] = *word;
                    }
                }
                vectors.push(Vector(indices));
                vectors.extend(weighing[..T::BYTES].iter().copied().map(Vector));
            }
        }
        Some(Self { tables, blocks, starts, vectors })
    }

    /// Tables from which the lanes choose: 1 or 2.
    pub(super) const fn tables(&self) -> usize {
        self.tables
    }

    /// Yields every group's blocks: where their tables begin, and their vectors.
    pub(super) fn groups<T: FixedPoint>(&self) -> impl Iterator<Item = (&[u32], &[Vector])> {
        let vectors = self.vectors.chunks_exact(self.blocks * (1 + T::BYTES));
        self.starts.chunks_exact(self.blocks).zip(vectors)
    }
}
