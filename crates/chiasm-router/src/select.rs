//! The selection of a worker. `docs/routing.md` has the formula of the cost.

mod candidate;
mod encoders;
mod stages;

use chiasm_kv::{BlockKey, Overlaps};
use chiasm_types::{BlockSize, Role, WorkerId};
use rand::Rng;
use rand::rngs::SmallRng;

use crate::config::{BusyThresholds, Policy, RouterConfig, Weights};
use crate::cost::{embedding_transfer_cost, in_blocks};
use crate::error::RouteError;
use crate::explain::{CandidateExplanation, Decision, Explanation};
use crate::media_holders::ItemUse;
use crate::request::{RouteItem, RouteRequest};
use crate::worker::{Admission, Knowledge, PendingWork, Worker};
use crate::worker_handle::WorkerHandle;
use crate::worker_table::WorkerTable;
use candidate::{Candidate, Items, PromptCoverage};
use encoders::Encoder;

pub(crate) use encoders::EncodeAssignment;
pub(crate) use stages::{Stages, choose_stages};

/// A chosen worker, what it holds of the request, and the work it will have to do.
pub(crate) struct Assignment {
    pub(crate) id: WorkerId,
    pub(crate) handle: WorkerHandle,
    /// The index of the worker's plan among those of the request.
    pub(crate) plan: usize,
    pub(crate) decision: Decision,
    pub(crate) block_size: BlockSize,
    pub(crate) knowledge: Knowledge,
    /// Prompt blocks on the worker, including a partial last one.
    pub(crate) blocks: u64,
    /// Leading blocks that the worker holds, as confirmed by its events.
    pub(crate) overlap: usize,
    pub(crate) pending: PendingWork,
    /// The index of the first item that the encoder is needed for, in the order of the items' ends.
    pub(crate) first_encoded: usize,
    /// `true` if other workers of the machine encode the items.
    pub(crate) encodes_elsewhere: bool,
}

/// The reusable buffers of a selection, so that nothing is allocated per worker.
#[derive(Default)]
pub(crate) struct Scratch {
    /// One entry per plan of the request that had the most plans so far.
    plans: Vec<PlanScratch>,
    candidates: Vec<Candidate>,
    /// The candidate of each index in the worker table, or [`NO_CANDIDATE`].
    candidate_at: Vec<u32>,
    /// The workers that could encode media items for the candidates.
    encoders: Vec<Encoder>,
    /// For each candidate, `true` if it has an item's embeddings itself.
    spared: Vec<bool>,
    /// The distinct overlaps of the candidates.
    depths: Vec<u32>,
    /// The number of workers that were too busy to be candidates.
    busy: usize,
    /// The number of workers that were not candidates only because they are suspect.
    suspect: usize,
    /// The number of workers that were not candidates because they drain. They count as busy.
    draining: usize,
}

/// The lookups for one plan of a request.
#[derive(Default)]
pub(crate) struct PlanScratch {
    pub(crate) overlaps: Overlaps,
    items: Items,
}

const NO_CANDIDATE: u32 = u32::MAX;

/// Picks a worker. Takes time proportional to the workers and to the held and promised blocks of
/// the request.
///
/// # Errors
/// [`RouteError::NoWorker`] without a plan, otherwise the reason why there is no candidate.
pub(crate) fn choose(
    config: &RouterConfig,
    table: &mut WorkerTable,
    scratch: &mut Scratch,
    plans: &[RouteRequest<'_>],
) -> Result<Assignment, RouteError> {
    let first = plans.first().ok_or(RouteError::NoWorker)?;
    scratch.encoders.clear();
    let busy = scratch.gather_candidates(config, table, plans, Role::can_answer);
    if scratch.candidates.is_empty() {
        return Err(scratch.no_candidate_error(busy));
    }
    scratch.fill_items(plans);
    let (chosen, decision) = match scratch.session_candidate(table, plans) {
        Some(chosen) => (chosen, Decision::Session),
        None => scratch.pick(config, table, plans),
    };
    let Candidate { id, handle, .. } = scratch.candidates[chosen];
    if let Some(session) = first.session {
        table.sessions.set_worker(session, handle);
    }
    table.last_answer = Some(id);
    table.use_admission(handle);
    scratch.busy = busy;
    scratch.assignment(config, table, plans, chosen, decision)
}

/// Returns the assignment of a request to a worker that another router has chosen. The worker may
/// be busy, suspect or too small.
///
/// # Errors
/// [`RouteError::NoWorker`] if there is no such worker, or the plan is not for its class.
pub(crate) fn assign_to(
    config: &RouterConfig,
    table: &mut WorkerTable,
    scratch: &mut Scratch,
    plan: &RouteRequest<'_>,
    worker: WorkerId,
) -> Result<Assignment, RouteError> {
    let plans = std::slice::from_ref(plan);
    scratch.encoders.clear();
    scratch.gather_one(table, plan, worker)?;
    scratch.plans[0].items.fill(plan.media);
    scratch.apply_promises(table, 0, plan.keys);
    if config.policy == Policy::KvMedia {
        scratch.apply_cached_media(table, 0);
    }
    scratch.assignment(config, table, plans, 0, Decision::Policy(config.policy))
}

impl Scratch {
    /// Returns the assignment of the request to a candidate.
    fn assignment(
        &self,
        config: &RouterConfig,
        table: &WorkerTable,
        plans: &[RouteRequest<'_>],
        chosen: usize,
        decision: Decision,
    ) -> Result<Assignment, RouteError> {
        let candidate = &self.candidates[chosen];
        let plan = candidate.plan as usize;
        let items = &self.plans[plan].items;
        let work = candidate.work(candidate.encode(items), &config.weights);
        let tokens = plans[plan].prompt_tokens.saturating_sub(candidate.covered_tokens()) as u64;
        let worker = table.worker(candidate.handle).ok_or(RouteError::NoWorker)?;
        Ok(Assignment {
            id: candidate.id,
            handle: candidate.handle,
            plan,
            decision,
            block_size: worker.info.block_size,
            knowledge: worker.knowledge(),
            blocks: candidate.blocks,
            overlap: candidate.overlap as usize,
            pending: PendingWork { tokens: tokens.max(1), work },
            first_encoded: items.first_encoded(candidate.covered_tokens()),
            encodes_elsewhere: candidate.encodes_elsewhere,
        })
    }

    /// Returns the comparison behind the last selection, which chose `assignment`.
    pub(crate) fn explain(
        &self,
        config: &RouterConfig,
        assignment: &Assignment,
        plans: &[RouteRequest<'_>],
    ) -> Explanation {
        let explain_candidate = |candidate: &Candidate| {
            let items = &self.plans[candidate.plan as usize].items;
            CandidateExplanation {
                worker: candidate.id,
                class: plans[candidate.plan as usize].class,
                block_size: candidate.block_size,
                blocks: candidate.blocks,
                overlap: candidate.overlap,
                expected: candidate.expected,
                loadable: candidate.loadable,
                terms: candidate.terms(candidate.encode(items), candidate.process(items)),
                cost: candidate.cost,
            }
        };
        Explanation {
            chosen: assignment.id,
            decision: assignment.decision,
            weights: config.weights,
            candidates: self.candidates.iter().map(explain_candidate).collect(),
            busy: self.busy,
        }
    }

    /// Fills in the media items of each plan.
    fn fill_items(&mut self, plans: &[RouteRequest<'_>]) {
        for (scratch, plan) in self.plans.iter_mut().zip(plans) {
            scratch.items.fill(plan.media);
        }
    }

    /// Returns the buffers for this number of plans.
    pub(crate) fn plans_mut(&mut self, count: usize) -> &mut [PlanScratch] {
        if self.plans.len() < count {
            self.plans.resize_with(count, PlanScratch::default);
        }
        &mut self.plans[..count]
    }

    /// Records that the chosen worker now gets the request's media items.
    pub(crate) fn record_media_use(&self, table: &mut WorkerTable, assignment: &Assignment) {
        let worker = table.worker(assignment.handle);
        let Some(mut caches) = worker.map(|worker| worker.media_caches) else { return };
        for (at, item) in self.plans[assignment.plan].items.sorted.iter().enumerate() {
            let item = ItemUse {
                hash: item.hash,
                elements: item.elements,
                embeds: (at >= assignment.first_encoded).then_some(item.embeds),
            };
            table.media.record_use(assignment.handle, &mut caches, item);
        }
        if let Some(worker) = table.worker_mut(assignment.handle) {
            worker.media_caches = caches;
        }
        table.sweep_media();
    }

    /// Returns the reason why [`gather_candidates`](Self::gather_candidates) found no candidate.
    fn no_candidate_error(&self, busy: usize) -> RouteError {
        match (busy, self.suspect) {
            (0, 0) => RouteError::NoWorker,
            (0, suspect) => RouteError::Suspect(suspect),
            (busy, 0) if busy == self.draining => RouteError::Drained,
            (busy, _) => RouteError::Busy(busy),
        }
    }

    /// Collects the workers that may get the request, in the order of their ids, with their
    /// overlaps and loads. Returns the number of workers that are too busy.
    ///
    /// `role_fits` returns `true` for the roles that are considered.
    fn gather_candidates(
        &mut self,
        config: &RouterConfig,
        table: &WorkerTable,
        plans: &[RouteRequest<'_>],
        role_fits: impl Fn(Role) -> bool + Copy,
    ) -> usize {
        self.candidates.clear();
        self.suspect = 0;
        self.draining = 0;
        let mut busy = 0;
        for (at, plan) in plans.iter().enumerate() {
            busy += self.gather_class(config, table, at, plan, role_fits);
        }
        if plans.len() > 1 {
            self.candidates.sort_unstable_by_key(|candidate| candidate.id);
        }
        self.candidate_at.clear();
        self.candidate_at.resize(table.index_count(), NO_CANDIDATE);
        for (at, candidate) in self.candidates.iter().enumerate() {
            self.candidate_at[candidate.handle.index as usize] = at as u32;
        }
        busy
    }

    /// Collects the workers of one plan's class and returns the number that are too busy. `at` is
    /// the index of the plan.
    fn gather_class(
        &mut self,
        config: &RouterConfig,
        table: &WorkerTable,
        at: usize,
        plan: &RouteRequest<'_>,
        role_fits: impl Fn(Role) -> bool,
    ) -> usize {
        let Self { plans, candidates, suspect, draining, .. } = self;
        let overlaps = &plans[at].overlaps;
        let mut found = overlaps.found().iter().peekable();
        let mut lower = overlaps.with_lower_tiers().iter().peekable();
        let mut busy = 0;
        // The number of blocks for the last block size; nearly all workers have the same.
        let mut block_size = 0;
        let mut blocks = 0;
        let mean_recent_work = table.mean_recent_work();
        for (id, worker) in table
            .workers()
            .filter(|(_, worker)| worker.info.class == plan.class && role_fits(worker.info.role))
        {
            while found.next_if(|(other, _)| *other < id).is_some() {}
            let overlap =
                found.next_if(|(other, _)| *other == id).map_or(0, |(_, overlap)| *overlap);
            while lower.next_if(|(other, _)| *other < id).is_some() {}
            let loadable =
                lower.next_if(|(other, _)| *other == id).map_or(0, |(_, overlap)| *overlap);
            if worker.admission == Admission::None
                || plan.exclude.contains(&id)
                || !fits(worker, plan)
            {
                continue;
            }
            if worker.suspect {
                *suspect += 1;
                continue;
            }
            if is_busy(&config.busy, worker) {
                busy += 1;
                *draining += usize::from(worker.engine.is_some_and(|engine| engine.draining));
                continue;
            }
            if worker.info.block_size.get() != block_size {
                block_size = worker.info.block_size.get();
                blocks = plan.prompt_tokens.div_ceil(block_size) as u64;
            }
            let coverage = PromptCoverage { overlap, loadable, blocks };
            candidates.push(Candidate::new(
                table,
                worker,
                &config.weights,
                mean_recent_work,
                at,
                coverage,
            ));
        }
        busy
    }

    /// Makes one worker the only candidate, even if it is busy.
    fn gather_one(
        &mut self,
        table: &WorkerTable,
        plan: &RouteRequest<'_>,
        id: WorkerId,
    ) -> Result<(), RouteError> {
        let Self { plans, candidates, candidate_at, .. } = self;
        let worker = table
            .by_id(id)
            .filter(|worker| worker.info.class == plan.class)
            .ok_or(RouteError::NoWorker)?;
        let overlaps = &plans.first().ok_or(RouteError::NoWorker)?.overlaps;
        let coverage = PromptCoverage {
            overlap: overlaps.get(id),
            loadable: overlaps.get_with_lower_tiers(id),
            blocks: plan.prompt_tokens.div_ceil(worker.info.block_size.get()) as u64,
        };
        // The mean recent work is only needed to compare workers.
        candidates.clear();
        candidates.push(Candidate::new(table, worker, &Weights::default(), 0.0, 0, coverage));
        candidate_at.clear();
        candidate_at.resize(table.index_count(), NO_CANDIDATE);
        candidate_at[worker.handle.index as usize] = 0;
        Ok(())
    }

    /// Returns the candidate that the last request of the same session went to.
    fn session_candidate(
        &self,
        table: &mut WorkerTable,
        plans: &[RouteRequest<'_>],
    ) -> Option<usize> {
        let session = plans.first()?.session?;
        let worker = table.sessions.worker(session)?;
        self.candidate_of(worker)
    }

    /// Returns the index of the candidate with this handle.
    fn candidate_of(&self, handle: WorkerHandle) -> Option<usize> {
        let at = *self.candidate_at.get(handle.index as usize)? as usize;
        self.candidates.get(at).filter(|candidate| candidate.handle == handle).map(|_| at)
    }

    /// Picks a candidate by the policy.
    fn pick(
        &mut self,
        config: &RouterConfig,
        table: &mut WorkerTable,
        plans: &[RouteRequest<'_>],
    ) -> (usize, Decision) {
        let policy = config.policy;
        let chosen = match policy {
            Policy::KvMedia | Policy::Kv => {
                for (at, plan) in plans.iter().enumerate() {
                    self.apply_promises(table, at as u32, plan.keys);
                    if policy == Policy::KvMedia {
                        self.apply_cached_media(table, at as u32);
                    }
                    self.apply_stored_embeddings(config, table, at as u32);
                }
                self.compute_costs(config);
                return (self.cheapest(&mut table.rng, config.temperature), Decision::Cost(policy));
            }
            Policy::LeastLoaded => {
                self.candidates.iter_mut().for_each(|candidate| candidate.cost = candidate.load);
                self.cheapest(&mut table.rng, 0.0)
            }
            Policy::PowerOfTwo => {
                let count = self.candidates.len();
                let one = table.rng.random_range(0..count);
                let other = (one + table.rng.random_range(1..count.max(2))) % count;
                if self.candidates[other].load < self.candidates[one].load { other } else { one }
            }
            Policy::Random => table.rng.random_range(0..self.candidates.len()),
            Policy::RoundRobin => {
                let next = table
                    .last_answer
                    .map_or(0, |last| self.candidates.partition_point(|other| other.id <= last));
                next % self.candidates.len()
            }
        };
        self.encode_all_elsewhere();
        (chosen, Decision::Policy(policy))
    }

    /// Extends the expected blocks of one plan's candidates by those that requests in flight
    /// promise.
    ///
    /// A worker's promises for this prompt begin where its overlap ends, so one lookup per distinct
    /// overlap finds them.
    fn apply_promises(&mut self, table: &WorkerTable, plan: u32, keys: &[BlockKey]) {
        if table.promises.is_empty() {
            return;
        }
        self.depths.clear();
        let of_plan = self.candidates.iter().filter(|candidate| candidate.plan == plan);
        self.depths.extend(of_plan.map(|candidate| candidate.overlap));
        self.depths.sort_unstable();
        self.depths.dedup();
        for &depth in &self.depths {
            let Some(key) = keys.get(depth as usize) else { break };
            for worker in table.promises.workers(*key) {
                let Some(at) = self.candidate_of(worker) else { continue };
                let candidate = &mut self.candidates[at];
                if candidate.overlap == depth && candidate.plan == plan {
                    let end = table.promises.run_end(worker, keys, depth as usize);
                    candidate.expected = end as u32;
                }
            }
        }
    }

    /// Subtracts the media work of one plan's candidates that have an item's tensors or embeddings
    /// in their own caches.
    fn apply_cached_media(&mut self, table: &WorkerTable, plan: u32) {
        for at in 0..self.plans[plan as usize].items.sorted.len() {
            let RouteItem { hash, end, embeds, elements } =
                self.plans[plan as usize].items.sorted[at];
            let caches = |handle| table.worker(handle).map(|worker| worker.media_caches);
            for (worker, reusable) in table.media.holders(hash, elements, embeds, caches) {
                let Some(at) = self.candidate_of(worker) else { continue };
                let candidate = &mut self.candidates[at];
                if candidate.plan != plan {
                    continue;
                }
                let blocks = in_blocks(embeds as f64);
                if reusable.embeddings && end > candidate.covered_tokens() {
                    candidate.encode_spared += blocks;
                }
                if reusable.tensors {
                    candidate.process_spared += blocks;
                }
            }
        }
    }

    /// Computes the cost of each candidate.
    fn compute_costs(&mut self, config: &RouterConfig) {
        let Self { candidates, plans, encoders, .. } = self;
        // The encode work is computed again only when its inputs change: they are the same for
        // nearly all candidates.
        let mut last_inputs = None;
        let mut encode = 0.0;
        for candidate in candidates {
            let items = &plans[candidate.plan as usize].items;
            let inputs = Some((candidate.plan, candidate.covered(), candidate.block_size));
            if last_inputs != inputs {
                last_inputs = inputs;
                encode = candidate.encode(items);
            }
            candidate.cost =
                candidate.terms(encode, candidate.process(items)).cost(&config.weights);
            candidate.cost += embedding_transfer_cost(config, candidate.embedded);
            candidate.encode_elsewhere_if_cheaper(encoders, encode, config);
        }
    }

    /// Returns the candidate with the lowest cost; ties are broken at random. With a temperature,
    /// other candidates are drawn too, by their costs.
    fn cheapest(&self, rng: &mut SmallRng, temperature: f64) -> usize {
        let mut best = 0;
        let mut ties = 0;
        for (at, candidate) in self.candidates.iter().enumerate() {
            let lowest = self.candidates[best].cost;
            if at > 0 && candidate.cost > lowest {
                continue;
            }
            ties = if candidate.cost < lowest { 1 } else { ties + 1 };
            // Reservoir sampling: the n-th of n ties is taken with probability 1/n, so that each
            // ends up with 1/n.
            if ties == 1 || rng.random_range(0..ties) == 0 {
                best = at;
            }
        }
        if temperature <= 0.0 {
            return best;
        }
        let lowest = self.candidates[best].cost;
        let probability = |candidate: &Candidate| (-(candidate.cost - lowest) / temperature).exp();
        let mut rest = rng.random::<f64>() * self.candidates.iter().map(probability).sum::<f64>();
        let drawn = self.candidates.iter().position(|candidate| {
            rest -= probability(candidate);
            rest < 0.0
        });
        drawn.unwrap_or(best)
    }
}

/// Returns `true` if the request is within the worker's limits.
fn fits(worker: &Worker, plan: &RouteRequest<'_>) -> bool {
    plan.prompt_tokens <= worker.info.max_prompt_tokens
        && plan.encoder_tokens <= worker.info.max_encoder_tokens
}

/// Returns `true` if the worker drains or has reached a threshold.
fn is_busy(busy: &BusyThresholds, worker: &Worker) -> bool {
    let engine = worker.engine.unwrap_or_default();
    let pending = worker.pending.tokens + engine.pending_tokens_of_others;
    engine.draining
        || busy.kv_usage.is_some_and(|limit| engine.kv_usage >= limit)
        || busy.pending_tokens.is_some_and(|limit| pending >= limit)
        || busy.waiting.is_some_and(|limit| engine.waiting >= limit)
}
