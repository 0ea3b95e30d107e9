//! What a worker costs a request; `docs/routing.md` has the formula.

use crate::config::{RouterConfig, Weights};

/// The terms of a worker's cost, before their weights; `docs/routing.md` says what each is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// M: blocks of 16 tokens to compute.
    pub compute: f64,
    /// F: blocks to load from the CPU or storage.
    pub fetch: f64,
    /// E: blocks that the embeddings to be encoded fill.
    pub encode: f64,
    /// P: blocks that the embeddings of items to be processed fill.
    pub process: f64,
    /// W: cost of the requests that wait there.
    pub waiting: f64,
    /// B: blocks in use.
    pub load: f64,
    /// X: cost of what it did lately beyond the mean.
    pub excess: f64,
}

/// Tokens of the blocks that costs count in, whatever blocks workers have: so those of one fleet
/// may have blocks of several sizes.
const BLOCK: f64 = 16.0;

/// As many tokens in the blocks of costs.
pub(crate) fn in_blocks(tokens: f64) -> f64 {
    tokens / BLOCK
}

impl Terms {
    /// The cost with these weights.
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

/// Bytes of a token's embedding, as a part of those of its keys and values: 7 of 57 kB for the
/// model that the weights were found with.
const EMBEDDING_PART: f64 = 0.125;

/// What it costs that a worker reads embeddings that fill so many blocks.
pub(crate) fn embedding_transfer(config: &RouterConfig, blocks: f64) -> f64 {
    config.stages.transfer * EMBEDDING_PART * blocks
}
