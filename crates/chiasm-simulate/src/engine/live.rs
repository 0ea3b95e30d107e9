//! A request on its way through the fleet.

use chiasm_engine_caches::BlockTable;
use chiasm_kv::BlockKey;
use chiasm_router::Reservation;

use crate::sequence::Sequence;
use crate::virtual_time::Nanos;

/// A request that arrived and has not ended.
pub(crate) struct Live {
    pub(crate) arrival: Nanos,
    /// Whether it counts in the results.
    pub(crate) counted: bool,
    pub(crate) sequence: Sequence,
    /// Keys of all full blocks, the answer's too.
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) reservation: Option<Reservation>,
    /// Prompt tokens that the engine found in its cache.
    pub(crate) cached: usize,
    /// Embeddings that the engine had to make.
    pub(crate) encoded: u64,
    pub(super) table: BlockTable,
    /// Prompt tokens computed or found.
    pub(super) computed: usize,
    /// The first of its items that was not needed yet.
    pub(super) next_item: usize,
    /// The engine's step that gave the first token.
    pub(super) first_step: u64,
}

impl Live {
    pub(crate) fn new(sequence: Sequence, keys: Vec<BlockKey>, arrival: Nanos, counted: bool) -> Self {
        Self {
            arrival,
            counted,
            sequence,
            keys,
            reservation: None,
            cached: 0,
            encoded: 0,
            table: BlockTable::default(),
            computed: 0,
            next_item: 0,
            first_step: 0,
        }
    }

    /// The step that computes the first token of the block after its last one.
    pub(super) fn next_boundary(&self, block_size: usize) -> u64 {
        self.first_step + (self.table.len() * block_size + 1 - self.sequence.prompt()) as u64
    }
}
