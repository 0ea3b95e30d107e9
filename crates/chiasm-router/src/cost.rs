//! The cost of a request on a worker; `docs/routing.md` has the formula. `select/candidate.rs`
//! computes the terms.

use crate::config::{RouterConfig, Weights};

/// The terms of a worker's cost, before they are weighted; `docs/routing.md` defines each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostTerms {
    /// M: blocks of 16 tokens to compute.
    pub compute: f64,
    /// F: blocks to load from the CPU or storage.
    pub fetch: f64,
    /// E: blocks that the embeddings of the items to encode would fill.
    pub encode: f64,
    /// P: blocks that the embeddings of the items to process would fill.
    pub process: f64,
    /// W: the cost of the requests waiting on the worker.
    pub waiting: f64,
    /// B: blocks in use.
    pub load: f64,
    /// X: the cost of the worker's recent work beyond the mean of all workers.
    pub excess: f64,
}

/// The number of tokens in a block of the cost formula. It is fixed, because the workers of one
/// fleet may have KV blocks of several sizes.
const COST_BLOCK_TOKENS: f64 = 16.0;

/// Converts a number of tokens to blocks of the cost formula.
pub(crate) fn in_blocks(tokens: f64) -> f64 {
    tokens / COST_BLOCK_TOKENS
}

impl CostTerms {
    /// Returns the weighted sum of the terms.
    pub fn cost(&self, weights: &Weights) -> f64 {
        weights.prefill * self.compute
            + weights.fetch * self.fetch
            + weights.encode * self.encode
            + weights.process * self.process
            + weights.queue * self.waiting
            + weights.load * self.load
            + weights.balance * self.excess
    }
}

/// The size of a token's embedding relative to its keys and values: 7 of 57 kB for the model that
/// the weights were found with.
const EMBEDDING_TO_KV_RATIO: f64 = 0.125;

/// Returns the cost of reading embeddings that would fill `blocks` blocks.
pub(crate) fn embedding_transfer_cost(config: &RouterConfig, blocks: f64) -> f64 {
    config.stages.transfer * EMBEDDING_TO_KV_RATIO * blocks
}
