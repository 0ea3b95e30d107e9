//! The selection of workers where prompts and answers are computed by workers with different roles.

use chiasm_types::{MmHash, Role};
use rand::Rng;
use rand::rngs::SmallRng;

use super::candidate::Candidate;
use super::encoders::EmbeddingSources;
use super::{Assignment, EncodeAssignment, Scratch, choose};
use crate::config::{Policy, RouterConfig, StageWeights};
use crate::error::RouteError;
use crate::explain::Decision;
use crate::request::{RouteRequest, Splitting};
use crate::worker::PendingWork;
use crate::worker_table::WorkerTable;

/// The assignments of a request's stages.
pub(crate) struct Stages {
    pub(crate) answer: Assignment,
    /// The worker that computes the prompt, if it is not the one that answers.
    pub(crate) prefill: Option<Assignment>,
    pub(crate) encode: Vec<EncodeAssignment>,
    /// The media items whose embeddings the worker that computes the prompt finds in its machine's
    /// store.
    pub(crate) embedded: Vec<MmHash>,
}

impl Stages {
    fn new(answer: Assignment, prefill: Option<Assignment>) -> Self {
        Self { answer, prefill, encode: Vec::new(), embedded: Vec::new() }
    }
}

/// The location of a worker: where it hands over prompts, and its machine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Location {
    handover_domain: u64,
    machine: u64,
}

/// An assignment of one stage, with its cost.
struct PricedAssignment {
    assignment: Assignment,
    location: Location,
    cost: f64,
    /// The work on the worker until the prompt is computed, including the work that waits before
    /// it, in the unit of costs.
    work_until_computed: f64,
}

/// Two workers for a request.
struct StagePair {
    /// The index of the worker for the prompt, among the priced assignments.
    prefill: usize,
    /// The index of the worker that answers, among the candidates.
    answer: usize,
    /// The cost of sending one block.
    transfer: f64,
    cost: f64,
}

/// A split of a request over two workers, with its cost.
struct PricedStages {
    stages: Stages,
    cost: f64,
}

/// Picks the worker that answers. If it is allowed and cheaper, also picks another worker that
/// computes the prompt and can hand it over.
pub(crate) fn choose_stages(
    config: &RouterConfig,
    table: &mut WorkerTable,
    scratch: &mut Scratch,
    plans: &[RouteRequest<'_>],
    splitting: Splitting,
) -> Result<Stages, RouteError> {
    if !table.has_roles() {
        return choose(config, table, scratch, plans).map(|answer| Stages::new(answer, None));
    }
    scratch.gather_encoders(config, table, plans);
    // Before the candidates for answering, which must remain in `scratch` for the explanation.
    let prefills = match splitting {
        Splitting::Allowed => scratch.prefill_assignments(config, table, plans)?,
        Splitting::Forbidden => Vec::new(),
    };
    let whole = scratch.whole_assignment(config, table, plans);
    let split = if prefills.is_empty() {
        None
    } else {
        scratch.cheapest_split(config, table, plans, prefills)?
    };
    let is_cheaper = |cost: f64| match (&whole, config.policy) {
        (Ok(whole), Policy::KvMedia | Policy::Kv) => cost < whole.cost,
        // Policies that do not compute costs always use the workers of both roles.
        (Ok(_) | Err(_), _) => true,
    };
    let mut stages = match split {
        Some(split) if is_cheaper(split.cost + config.stages.hop) => split.stages,
        _ => Stages::new(whole?.assignment, None),
    };
    let prefill = stages.prefill.as_ref().unwrap_or(&stages.answer);
    let EmbeddingSources { embedded, encode } =
        scratch.embedding_sources(config, table, prefill)?;
    stages.embedded = embedded;
    stages.encode = encode;
    let first = plans.first().ok_or(RouteError::NoWorker)?;
    if let Some(session) = first.session {
        table.sessions.set_worker(session, stages.answer.handle);
    }
    table.last_answer = Some(stages.answer.id);
    if let Some(prefill) = &stages.prefill {
        table.last_prefill = Some(prefill.id);
    }
    Ok(stages)
}

impl Scratch {
    /// Returns the workers for the prompt alone: by cost the cheapest of each location, otherwise
    /// the one that the policy picks. Empty if there are none or all are busy.
    fn prefill_assignments(
        &mut self,
        config: &RouterConfig,
        table: &mut WorkerTable,
        plans: &[RouteRequest<'_>],
    ) -> Result<Vec<PricedAssignment>, RouteError> {
        self.gather_candidates(config, table, plans, |role| role == Role::Prefill);
        if self.candidates.is_empty() {
            return Ok(Vec::new());
        }
        self.fill_items(plans);
        // Round-robin has separate turns for the workers that compute prompts and those that
        // answer.
        let last_answer = std::mem::replace(&mut table.last_answer, table.last_prefill);
        let (chosen, decision) = self.pick(config, table, plans);
        table.last_answer = last_answer;
        let eligible = match decision {
            // Among candidates of the same cost, the one that was drawn wins.
            Decision::Cost(_) => self.best_per_key(location, 0..self.candidates.len(), |at| {
                (self.candidates[at].cost, u32::from(at != chosen))
            }),
            Decision::Session | Decision::Policy(_) => vec![chosen],
        };
        let priced = eligible
            .into_iter()
            .map(|at| self.priced_assignment(config, table, plans, at, decision));
        priced.collect()
    }

    /// Returns the worker that computes the whole request; one whose role is to prefill only if
    /// there is no other. Leaves the candidates that [`cheapest_split`](Self::cheapest_split) uses.
    fn whole_assignment(
        &mut self,
        config: &RouterConfig,
        table: &mut WorkerTable,
        plans: &[RouteRequest<'_>],
    ) -> Result<PricedAssignment, RouteError> {
        let mut busy = self.gather_candidates(config, table, plans, |role| {
            matches!(role, Role::Aggregated | Role::Decode)
        });
        if self.candidates.is_empty() && busy == 0 {
            busy = self.gather_candidates(config, table, plans, Role::can_answer);
        }
        self.busy = busy;
        if self.candidates.is_empty() {
            return Err(self.no_candidate_error(busy));
        }
        self.fill_items(plans);
        let (mut chosen, mut decision) = self.pick(config, table, plans);
        if let Decision::Cost(_) = decision {
            self.add_disturbance(config);
            chosen = self.cheapest(&mut table.rng, config.temperature);
        }
        if let Some(session_candidate) = self.session_candidate(table, plans) {
            chosen = session_candidate;
            decision = Decision::Session;
        }
        self.priced_assignment(config, table, plans, chosen, decision)
    }

    /// Returns the assignment of a candidate, with its cost.
    fn priced_assignment(
        &self,
        config: &RouterConfig,
        table: &WorkerTable,
        plans: &[RouteRequest<'_>],
        at: usize,
        decision: Decision,
    ) -> Result<PricedAssignment, RouteError> {
        let candidate = &self.candidates[at];
        let assignment = self.assignment(config, table, plans, at, decision)?;
        let work_until_computed = candidate.waiting_work + assignment.pending.work;
        Ok(PricedAssignment {
            assignment,
            location: location(candidate),
            cost: candidate.cost,
            work_until_computed,
        })
    }

    /// Adds, for workers that decode, the cost of the answers that wait while the worker computes
    /// this prompt.
    fn add_disturbance(&mut self, config: &RouterConfig) {
        let Self { candidates, plans, .. } = self;
        for candidate in candidates.iter_mut().filter(|candidate| candidate.role == Role::Decode) {
            let encode = candidate.encode(&plans[candidate.plan as usize].items);
            let delayed = (candidate.requests + 1) as f64;
            candidate.cost +=
                config.stages.disturb * delayed * candidate.work(encode, &config.weights);
        }
    }

    /// Returns the cheapest pair of a worker for the prompt and a worker that answers, if the first
    /// can hand over prompts to the second; `None` if there is no such pair.
    ///
    /// The answering worker is chosen by its load and by the blocks that have to be sent, or is the
    /// session's worker.
    fn cheapest_split(
        &self,
        config: &RouterConfig,
        table: &mut WorkerTable,
        plans: &[RouteRequest<'_>],
        prefills: Vec<PricedAssignment>,
    ) -> Result<Option<PricedStages>, RouteError> {
        let decodes = |at: &usize| self.candidates[*at].role == Role::Decode;
        let session_candidate = self.session_candidate(table, plans).filter(decodes);
        let decoding = (0..self.candidates.len())
            .filter(|at| decodes(at) && session_candidate.is_none_or(|only| only == *at));
        let StageWeights { transfer, network_transfer, .. } = config.stages;
        let near = self.pairs(
            config,
            &prefills,
            decoding.clone(),
            transfer,
            |location| location,
            &mut table.rng,
        );
        // A pair within a network may be on one machine. Then it is also among the pairs above,
        // with a lower cost.
        let networked = decoding
            .filter(|&at| self.candidates[at].handover_domain != self.candidates[at].machine);
        let far = self.pairs(
            config,
            &prefills,
            networked,
            network_transfer,
            |location| location.handover_domain,
            &mut table.rng,
        );
        let cheapest =
            near.into_iter().chain(far).min_by(|one, other| one.cost.total_cmp(&other.cost));
        let Some(StagePair { prefill, answer, transfer, cost }) = cheapest else {
            return Ok(None);
        };
        let Some(PricedAssignment { assignment: prefill, .. }) = prefills.into_iter().nth(prefill)
        else {
            return Ok(None);
        };
        let candidate = &self.candidates[answer];
        let assignment =
            self.assignment(config, table, plans, answer, Decision::Cost(config.policy))?;
        // The answering worker computes only the last token of the prompt.
        let work = transfer * candidate.missing();
        let answer = Assignment {
            pending: PendingWork { tokens: 1, work },
            first_encoded: usize::MAX,
            ..assignment
        };
        Ok(Some(PricedStages { stages: Stages::new(answer, Some(prefill)), cost }))
    }

    /// Pairs each worker for the prompt with the cheapest decoding candidate that has the same key.
    /// `transfer` is the cost of sending a block between the two.
    fn pairs<K: Ord>(
        &self,
        config: &RouterConfig,
        prefills: &[PricedAssignment],
        decoding: impl Iterator<Item = usize>,
        transfer: f64,
        key: impl Fn(Location) -> K,
        rng: &mut SmallRng,
    ) -> Vec<StagePair> {
        let candidate_key = |candidate: &Candidate| key(location(candidate));
        let cost = |at: usize, prefill_work: f64| {
            self.candidates[at].decode_cost(config, transfer, prefill_work)
        };
        // Ties are broken at random, so that all idle workers get blocks to hold.
        let answers =
            self.best_per_key(candidate_key, decoding, |at| (cost(at, 0.0), rng.random()));
        let pair = |(index, prefill): (usize, &PricedAssignment)| {
            let answer = answers
                .iter()
                .copied()
                .find(|&at| candidate_key(&self.candidates[at]) == key(prefill.location))?;
            let cost = prefill.cost + cost(answer, prefill.work_until_computed);
            Some(StagePair { prefill: index, answer, transfer, cost })
        };
        prefills.iter().enumerate().filter_map(pair).collect()
    }

    /// Returns the candidate with the lowest rank for each key.
    fn best_per_key<K: Ord>(
        &self,
        key: impl Fn(&Candidate) -> K,
        candidates: impl Iterator<Item = usize>,
        mut rank: impl FnMut(usize) -> (f64, u32),
    ) -> Vec<usize> {
        let mut ranked: Vec<(K, (f64, u32), usize)> =
            candidates.map(|at| (key(&self.candidates[at]), rank(at), at)).collect();
        ranked.sort_unstable_by(|(one, (cost, next), _), (other, (other_cost, other_next), _)| {
            one.cmp(other).then(cost.total_cmp(other_cost)).then(next.cmp(other_next))
        });
        ranked.dedup_by(|(one, ..), (other, ..)| one == other);
        ranked.into_iter().map(|(_, _, at)| at).collect()
    }
}

/// Returns the location of a candidate.
fn location(candidate: &Candidate) -> Location {
    let Candidate { handover_domain, machine, .. } = *candidate;
    Location { handover_domain, machine }
}
