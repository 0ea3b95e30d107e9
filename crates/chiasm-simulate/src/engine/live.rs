//! A request on its way through the fleet.

use chiasm_kv::BlockKey;
use chiasm_router::Reservation;

use crate::sequence::Sequence;
use crate::virtual_time::Nanos;

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
    pub(crate) reservation: Option<Reservation>,
    /// Prompt tokens that the engine found in its cache when it began.
    pub(crate) cached: usize,
    /// Embeddings that the engine had to make.
    pub(crate) encoded: u64,
    /// The first of its items that was not needed yet.
    pub(super) next_item: usize,
}

impl Live {
    pub(crate) fn new(number: u64, sequence: Sequence, keys: Vec<BlockKey>, arrival: Nanos, counted: bool) -> Self {
        Self { number, arrival, counted, sequence, keys, reservation: None, cached: 0, encoded: 0, next_item: 0 }
    }
}
