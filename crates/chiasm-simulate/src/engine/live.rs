//! The state of a request in the fleet.

use chiasm_kv::BlockKey;
use chiasm_router::Reservation;

use crate::sequence::Sequence;
use crate::virtual_time::Nanos;

/// The stage of a request that an engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Prompt and answer.
    Whole,
    /// The prompt, and one token that is discarded. The blocks are retained until the answering
    /// engine has received them.
    Prefill,
    /// The answer. The prompt's keys and values are transferred to the engine.
    Decode,
}

/// A request that has arrived and has not ended.
pub(crate) struct LiveRequest {
    /// The number of the request, in the order of arrival.
    pub(crate) number: u64,
    pub(crate) arrival: Nanos,
    /// `true` if the request counts in the results.
    pub(crate) counted: bool,
    pub(crate) sequence: Sequence,
    /// Keys of all full blocks, including those of the answer.
    pub(crate) keys: Vec<BlockKey>,
    /// The reservation on the engine that answers.
    pub(crate) reservation: Option<Reservation>,
    /// The stage for the engine that has the request or gets it next.
    pub(crate) stage: Stage,
    /// The reservation on the engine that computes the prompt for another one, until it is done.
    pub(crate) prefill: Option<Reservation>,
    /// Prompt tokens that the engine which computes the prompt found in its cache at the start.
    pub(crate) cached: usize,
    /// Embeddings that engines had to encode for the request.
    pub(crate) encoded: u64,
    /// Images of the request that were sent to encoding engines.
    pub(crate) encoded_elsewhere: u64,
    /// The index of the first item that was not needed yet.
    pub(super) next_item: usize,
}

impl LiveRequest {
    /// Creates a request that no engine has yet.
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
            prefill: None,
            cached: 0,
            encoded: 0,
            encoded_elsewhere: 0,
            next_item: 0,
        }
    }
}
