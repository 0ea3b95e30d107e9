//! Log probabilities of tokens.

use bytes::Bytes;
use chiasm_types::TokenId;

use super::codec::{Fields, Wire};
use super::error::{Named, Problem, WireError};
use super::reader::Reader;
use super::tensor::{TensorData, WireTensor};
use super::writer::Writer;

/// Log probabilities at some positions, with `width` candidates each.
///
/// `LogprobsLists` (numpy, of new tokens) and `LogprobsTensors` (torch, of prompt tokens) in
/// `vllm/v1/outputs.py`. The first candidate of a position is its actual token; the others follow
/// by falling probability.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// The number of candidates per position; at least 1 unless there are no positions.
    pub width: usize,
    /// The candidates of all positions: `positions × width`.
    pub token_ids: Vec<TokenId>,
    /// The natural logarithms of the candidates' probabilities: `positions × width`.
    pub logprobs: Vec<f32>,
    /// The rank of each position's actual token, from 1.
    pub ranks: Vec<u32>,
}

/// Log probabilities at one position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PositionLogprobs<'a> {
    /// The actual token, then the most likely ones.
    pub token_ids: &'a [TokenId],
    /// The natural logarithms of the tokens' probabilities.
    pub logprobs: &'a [f32],
    /// The rank of the actual token, from 1.
    pub rank: u32,
}

/// The library of a message's arrays, which decides the names of element types.
#[derive(Clone, Copy)]
pub(crate) enum Arrays {
    /// New tokens: `<i4`, `<f4`, `<i8`
    Numpy,
    /// Prompt tokens: `int32`, `float32`, `int32`
    Torch,
}

impl Logprobs {
    /// Returns the number of positions.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Returns `true` if there are no positions.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Returns the size of the lists in memory, in bytes.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of_val(&self.token_ids[..])
            + size_of_val(&self.logprobs[..])
            + size_of_val(&self.ranks[..])
    }

    /// Iterates over the positions.
    pub fn positions(&self) -> impl Iterator<Item = PositionLogprobs<'_>> {
        let width = self.width.max(1);
        let candidates = self.token_ids.chunks_exact(width).zip(self.logprobs.chunks_exact(width));
        candidates.zip(&self.ranks).map(|((token_ids, logprobs), &rank)| PositionLogprobs {
            token_ids,
            logprobs,
            rank,
        })
    }

    pub(crate) fn write(&self, arrays: Arrays, to: &mut Writer) {
        let shape = || vec![self.len(), self.width];
        let array = |dtype: &'static str, shape, data: Bytes| WireTensor {
            dtype: dtype.into(),
            shape,
            data: TensorData::Bytes(data),
        };
        let ids = self.token_ids.iter().flat_map(|id| (id.0 as i32).to_le_bytes()).collect();
        let logprobs = self.logprobs.iter().flat_map(|logprob| logprob.to_le_bytes()).collect();
        match arrays {
            Arrays::Numpy => {
                let ranks =
                    self.ranks.iter().flat_map(|&rank| i64::from(rank).to_le_bytes()).collect();
                to.array(4);
                array("<i4", shape(), ids).write(to);
                array("<f4", shape(), logprobs).write(to);
                array("<i8", vec![self.len()], ranks).write(to);
                to.nil();
            }
            Arrays::Torch => {
                let ranks =
                    self.ranks.iter().flat_map(|&rank| (rank as i32).to_le_bytes()).collect();
                to.array(5);
                array("int32", shape(), ids).write(to);
                array("float32", shape(), logprobs).write(to);
                array("int32", vec![self.len()], ranks).write(to);
                to.nil();
                to.nil();
            }
        }
    }

    pub(crate) fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let fields = Fields::open(from, 3)?;
        let ids = WireTensor::read(from).named("logprob_token_ids")?;
        let logprobs = WireTensor::read(from).named("logprobs")?;
        let ranks = WireTensor::read(from).named("sampled_token_ranks")?;
        fields.close_after(3, from)?;

        let unsupported =
            |tensor: &WireTensor, field| Problem::Unsupported(tensor.dtype.to_string()).at(field);
        let misshaped = |tensor: &WireTensor, field| {
            let bytes = tensor.bytes().map_or(0, <[u8]>::len);
            Problem::TensorSize {
                dtype: tensor.dtype.to_string(),
                shape: tensor.shape.clone(),
                bytes,
            }
            .at(field)
        };
        let &[positions, width] = &ids.shape[..] else {
            return Err(misshaped(&ids, "logprob_token_ids"));
        };
        if logprobs.shape != ids.shape {
            return Err(misshaped(&logprobs, "logprobs"));
        }
        if ranks.shape != [positions] {
            return Err(misshaped(&ranks, "sampled_token_ranks"));
        }
        let narrow =
            |value: i64| u32::try_from(value).map_err(|_| Problem::Range(i128::from(value)));
        let token_ids = ids.integers().ok_or_else(|| unsupported(&ids, "logprob_token_ids"))?;
        let token_ids =
            token_ids.into_iter().map(|id| narrow(id).map(TokenId)).collect::<Result<_, _>>();
        let rank_values =
            ranks.integers().ok_or_else(|| unsupported(&ranks, "sampled_token_ranks"))?;
        let rank_values = rank_values.into_iter().map(narrow).collect::<Result<_, _>>();
        Ok(Self {
            width,
            token_ids: token_ids.map_err(|problem| problem.at("logprob_token_ids"))?,
            logprobs: logprobs.floats().ok_or_else(|| unsupported(&logprobs, "logprobs"))?,
            ranks: rank_values.map_err(|problem| problem.at("sampled_token_ranks"))?,
        })
    }
}
