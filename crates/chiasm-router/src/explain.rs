//! Explanations of routing decisions, for people.

use chiasm_types::{PlanClassId, WorkerId};

use crate::config::{Policy, Weights};
use crate::cost::CostTerms;

/// The comparison behind a routing decision, as returned by
/// [`Router::select_explained`](crate::Router::select_explained).
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The worker that got the request.
    pub chosen: WorkerId,
    /// The criterion that decided.
    pub decision: Decision,
    /// The weights of the cost terms.
    pub weights: Weights,
    /// The workers that could have got the request, in the order of their ids.
    pub candidates: Vec<CandidateExplanation>,
    /// The number of workers that were not candidates because they were too busy.
    pub busy: usize,
}

/// The criterion by which a worker was picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The lowest cost, or with a temperature one near it. The compared values are in
    /// [`CandidateExplanation::cost`].
    Cost(Policy),
    /// An earlier request of the same session went to the worker; costs were not compared.
    Session,
    /// A policy that does not compute costs.
    Policy(Policy),
}

/// One worker that could have got a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CandidateExplanation {
    /// The worker.
    pub worker: WorkerId,
    /// The plan class by whose plan of the request the worker was judged.
    pub class: PlanClassId,
    /// Tokens per block on the worker.
    pub block_size: u32,
    /// Prompt blocks on the worker, including a partial last one.
    pub blocks: u64,
    /// Leading blocks that the worker held.
    pub overlap: u32,
    /// Leading blocks that the worker would hold once the requests in flight were computed; at
    /// least `overlap`.
    pub expected: u32,
    /// Leading blocks that the worker held, including those on the CPU and in storage.
    pub loadable: u32,
    /// The terms of the cost. Only with [`Decision::Cost`] do they take promises and media items
    /// into account.
    pub terms: CostTerms,
    /// The cost that was compared; 0 without [`Decision::Cost`].
    pub cost: f64,
}
