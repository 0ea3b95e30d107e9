//! Why a request went where it went.

use chiasm_types::{PlanClassId, WorkerId};

use crate::config::{Policy, Weights};
use crate::cost::Terms;

/// What was compared when a worker was picked, as
/// [`Router::select_explained`](crate::Router::select_explained) saw it.
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
    /// The lowest cost, or with a temperature one near it. [`Considered::cost`] is what was
    /// compared.
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
    /// Leading blocks that it would hold when requests in flight were computed; no fewer than
    /// `overlap`.
    pub expected: u32,
    /// Leading blocks that it held with those on the CPU and in storage.
    pub loadable: u32,
    /// What the cost is made of. Without [`Decision::Cost`] neither promises nor media items were
    /// looked for.
    pub terms: Terms,
    /// The cost that was compared; 0 without [`Decision::Cost`].
    pub cost: f64,
}
