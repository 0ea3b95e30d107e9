//! Why a request went where it went.

use chiasm_types::{PlanClassId, WorkerId};

use crate::config::{Policy, Weights};

/// What was compared when a worker was picked, as [`Router::select_explained`](crate::Router::select_explained) saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The worker that got the request.
    pub chosen: WorkerId,
    /// What decided.
    pub decision: Decision,
    /// What the terms counted for.
    pub weights: Weights,
    /// The workers that could have got the request, in the order of their ids.
    pub candidates: Vec<Considered>,
    /// Workers that were not among them because they had too much to do.
    pub busy: usize,
}

/// What a worker was picked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The lowest cost, or with a temperature one near it. [`Considered::cost`] is what was compared.
    Cost(Policy),
    /// An earlier request of the same session went there; costs were not compared.
    Session,
    /// A policy that knows no costs.
    Policy(Policy),
}

/// One worker that could have got a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Considered {
    /// The worker.
    pub worker: WorkerId,
    /// The class whose plan of the request it was judged by.
    pub class: PlanClassId,
    /// Tokens per block there.
    pub block_size: u32,
    /// Blocks of the prompt there, the last one possibly part full.
    pub blocks: u64,
    /// Leading blocks that it held.
    pub overlap: u32,
    /// Leading blocks that it would hold when requests in flight were computed; no fewer than `overlap`.
    pub expected: u32,
    /// Leading blocks that it held with those on the CPU and in storage.
    pub loadable: u32,
    /// What the cost is made of. Without [`Decision::Cost`] neither promises nor media items were looked for.
    pub terms: Terms,
    /// The cost that was compared; 0 without [`Decision::Cost`].
    pub cost: f64,
}

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

/// Tokens of the blocks that costs count in, whatever blocks workers have: so those of one fleet may have blocks of several sizes.
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
