//! A request on its way through the fleet.

use chiasm_kv::BlockKey;
use chiasm_router::Reservation;

use crate::sequence::Sequence;
use crate::virtual_time::Nanos;

/// What an engine is to compute of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Prompt and answer.
    Whole,
    /// The prompt, and one token that nobody sees. The blocks are kept until the engine that
    /// answers has got them.
    Prefill,
    /// The answer: the engine is given the prompt's keys and values.
    Decode,
}

/// A request that arrived and has not ended.
pub(crate) struct Live {
    /// Counts requests in the order of their arrival.
    pub(crate) number: u64,
    pub(crate) arrival: Nanos,
    /// Whether it counts in the results.
    pub(crate) counted: bool,
    pub(crate) sequence: Sequence,
    /// Keys of all full blocks, the answer's too.
    pub(crate) keys: Vec<BlockKey>,
    /// Its place on the engine that answers.
    pub(crate) reservation: Option<Reservation>,
    /// What the engine that has it, or gets it next, is to compute.
    pub(crate) stage: Stage,
    /// Its place on the engine that computes the prompt for another one, until it has.
    pub(crate) prefills: Option<Reservation>,
    /// Prompt tokens that the engine which computes the prompt found in its cache when it began.
    pub(crate) cached: usize,
    /// Embeddings that engines had to make for it.
    pub(crate) encoded: u64,
    /// Its images that engines which encode alone were given.
    pub(crate) encoded_elsewhere: u64,
    /// The first of its items that was not needed yet.
    pub(super) next_item: usize,
}

impl Live {
    pub(crate) fn new(
        number: u64,
        sequence: Sequence,
        keys: Vec<BlockKey>,
        arrival: Nanos,
        counted: bool,
    ) -> Self {
        Self {
            number,
            arrival,
            counted,
            sequence,
            keys,
            reservation: None,
            stage: Stage::Whole,
            prefills: None,
            cached: 0,
            encoded: 0,
            encoded_elsewhere: 0,
            next_item: 0,
        }
    }
}
