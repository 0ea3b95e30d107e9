//! The choice of a worker. `docs/routing.md` has the formula of the cost.

mod candidate;
mod encoders;
mod stages;

use chiasm_kv::{BlockKey, Overlaps};
use chiasm_types::{BlockSize, Role, WorkerId};
use rand::Rng;
use rand::rngs::SmallRng;

use crate::config::{BusyThresholds, Policy, RouterConfig, Weights};
use crate::cost::{embedding_transfer, in_blocks};
use crate::error::RouteError;
use crate::explain::{Considered, Decision, Explanation};
use crate::media_holders::ItemUse;
use crate::request::{RouteItem, RouteRequest};
use crate::roster::Roster;
use crate::seat::Seat;
use crate::worker::{Admission, Knowledge, Pending, Worker};
use candidate::{Candidate, Held, Items};
use encoders::Encoder;

pub(crate) use encoders::Encoding;
pub(crate) use stages::{Stages, choose_stages};

/// A worker, what it holds of the request, and what it will have to do for it.
pub(crate) struct Assignment {
    pub(crate) id: WorkerId,
    pub(crate) seat: Seat,
    /// The index of the worker's plan among the request's.
    pub(crate) plan: usize,
    pub(crate) decision: Decision,
    pub(crate) block_size: BlockSize,
    pub(crate) knowledge: Knowledge,
    /// Blocks of the prompt there, the last one possibly part full.
    pub(crate) blocks: u64,
    /// Leading blocks that it holds, as its events confirm.
    pub(crate) overlap: usize,
    pub(crate) pending: Pending,
    /// The first of the items, in the order of their ends, that the encoder is needed for.
    pub(crate) encodes_from: usize,
    /// Others of its machine encode what it would have to.
    pub(crate) encodes_elsewhere: bool,
}

/// Buffers of selections, to be used again: nothing is allocated per worker.
#[derive(Default)]
pub(crate) struct Scratch {
    /// One for each plan that a request ever had.
    plans: Vec<OfPlan>,
    candidates: Vec<Candidate>,
    /// The candidate in each place, or [`NONE`].
    candidate_at: Vec<u32>,
    /// Workers that encode media items for candidates.
    encoders: Vec<Encoder>,
    /// Candidates that have an item's embeddings themselves.
    spared: Vec<bool>,
    depths: Vec<u32>,
    /// Workers that were too busy to be candidates.
    busy: usize,
    /// Workers that were no candidates only because they are suspect.
    silent: usize,
}

/// What is found for one plan of a request.
#[derive(Default)]
pub(crate) struct OfPlan {
    pub(crate) overlaps: Overlaps,
    items: Items,
}

const NONE: u32 = u32::MAX;

/// Picks a worker. Takes time proportional to the workers and to what is held and promised of the
/// request.
pub(crate) fn choose(
    config: &RouterConfig,
    roster: &mut Roster,
    scratch: &mut Scratch,
    plans: &[RouteRequest<'_>],
) -> Result<Assignment, RouteError> {
    let first = plans.first().ok_or(RouteError::NoWorker)?;
    scratch.encoders.clear();
    let busy = scratch.gather(config, roster, plans, Role::answers);
    if scratch.candidates.is_empty() {
        return Err(scratch.no_candidate(busy));
    }
    scratch.fill_items(plans);
    let by_session = first.session.and_then(|session| scratch.of_session(roster, session));
    let (chosen, decision) = match by_session {
        Some(chosen) => (chosen, Decision::Session),
        None => scratch.pick(config, roster, plans),
    };
    let candidate = &scratch.candidates[chosen];
    let (id, seat) = (candidate.id, candidate.seat);
    if let Some(session) = first.session {
        roster.sessions.went_to(session, seat);
    }
    roster.last = Some(id);
    roster.use_admission(seat);
    scratch.busy = busy;
    scratch.assignment(config, roster, plans, chosen, decision)
}

/// What it means that a worker gets a request whose choice was somebody else's: it may be busy,
/// suspect or too small.
///
/// # Errors
/// [`RouteError::NoWorker`] when it is not there, or there is no plan for it.
pub(crate) fn chosen_elsewhere(
    config: &RouterConfig,
    roster: &mut Roster,
    scratch: &mut Scratch,
    plan: &RouteRequest<'_>,
    worker: WorkerId,
) -> Result<Assignment, RouteError> {
    let plans = std::slice::from_ref(plan);
    scratch.encoders.clear();
    scratch.gather_one(roster, plan, worker)?;
    scratch.plans[0].items.fill(plan.media);
    scratch.expect_promised(roster, 0, plan.keys);
    if config.policy == Policy::KvMedia {
        scratch.spare_media(roster, 0);
    }
    scratch.assignment(config, roster, plans, 0, Decision::Policy(config.policy))
}

impl Scratch {
    /// What a candidate will have to do for its plan.
    fn assignment(
        &self,
        config: &RouterConfig,
        roster: &Roster,
        plans: &[RouteRequest<'_>],
        chosen: usize,
        decision: Decision,
    ) -> Result<Assignment, RouteError> {
        let candidate = &self.candidates[chosen];
        let plan = candidate.plan as usize;
        let items = &self.plans[plan].items;
        let work = candidate.work(candidate.encode(items), &config.weights);
        let tokens = plans[plan].prompt_tokens.saturating_sub(candidate.covered_tokens()) as u64;
        let worker = roster.at(candidate.seat).ok_or(RouteError::NoWorker)?;
        Ok(Assignment {
            id: candidate.id,
            seat: candidate.seat,
            plan,
            decision,
            block_size: worker.info.block_size,
            knowledge: worker.knowledge(),
            blocks: candidate.blocks,
            overlap: candidate.overlap as usize,
            pending: Pending { tokens: tokens.max(1), work },
            encodes_from: items.encoded_from(candidate.covered_tokens()),
            encodes_elsewhere: candidate.encodes_elsewhere,
        })
    }

    /// What was compared when this worker was chosen, which was the last thing done.
    pub(crate) fn explain(
        &self,
        config: &RouterConfig,
        assignment: &Assignment,
        plans: &[RouteRequest<'_>],
    ) -> Explanation {
        let considered = |candidate: &Candidate| {
            let items = &self.plans[candidate.plan as usize].items;
            Considered {
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
            candidates: self.candidates.iter().map(considered).collect(),
            busy: self.busy,
        }
    }

    /// Finds the media items of each plan.
    fn fill_items(&mut self, plans: &[RouteRequest<'_>]) {
        self.plans.iter_mut().zip(plans).for_each(|(of_plan, plan)| of_plan.items.fill(plan.media));
    }

    /// Room for so many plans.
    pub(crate) fn for_plans(&mut self, plans: usize) -> &mut [OfPlan] {
        if self.plans.len() < plans {
            self.plans.resize_with(plans, OfPlan::default);
        }
        &mut self.plans[..plans]
    }

    /// Notes that the chosen worker now gets the request's items.
    pub(crate) fn note_media(&self, roster: &mut Roster, assignment: &Assignment) {
        let Some(mut odometers) = roster.at(assignment.seat).map(|worker| worker.odometers) else {
            return;
        };
        for (at, item) in self.plans[assignment.plan].items.sorted.iter().enumerate() {
            let embeds = (at >= assignment.encodes_from).then_some(item.embeds);
            let (hash, elements) = (item.hash, item.elements);
            roster.media.note(assignment.seat, &mut odometers, ItemUse { hash, elements, embeds });
        }
        if let Some(worker) = roster.at_mut(assignment.seat) {
            worker.odometers = odometers;
        }
        roster.sweep_media();
    }

    /// Returns why there is no candidate, after [`gather`](Self::gather).
    fn no_candidate(&self, busy: usize) -> RouteError {
        match (busy, self.silent) {
            (0, 0) => RouteError::NoWorker,
            (0, silent) => RouteError::Silent(silent),
            (busy, _) => RouteError::Busy(busy),
        }
    }

    /// The workers of some roles that may get the request, in the order of their ids, with their
    /// overlaps and loads. Returns how many are too busy.
    fn gather(
        &mut self,
        config: &RouterConfig,
        roster: &Roster,
        plans: &[RouteRequest<'_>],
        takes: impl Fn(Role) -> bool + Copy,
    ) -> usize {
        self.candidates.clear();
        self.silent = 0;
        let mut busy = 0;
        for (at, plan) in plans.iter().enumerate() {
            busy += self.gather_for(config, roster, at, plan, takes);
        }
        if plans.len() > 1 {
            self.candidates.sort_unstable_by_key(|candidate| candidate.id);
        }
        self.candidate_at.clear();
        self.candidate_at.resize(roster.places(), NONE);
        for (at, candidate) in self.candidates.iter().enumerate() {
            self.candidate_at[candidate.seat.place as usize] = at as u32;
        }
        busy
    }

    /// The workers of one plan's class.
    fn gather_for(
        &mut self,
        config: &RouterConfig,
        roster: &Roster,
        at: usize,
        plan: &RouteRequest<'_>,
        takes: impl Fn(Role) -> bool,
    ) -> usize {
        let Self { plans, candidates, silent, .. } = self;
        let overlaps = &plans[at].overlaps;
        let mut found = overlaps.found().iter().peekable();
        let mut lower = overlaps.with_lower_tiers().iter().peekable();
        let mut busy = 0;
        // The block size of nearly all.
        let (mut size, mut blocks) = (0, 0);
        let mean_lately = roster.mean_lately();
        for (id, worker) in roster
            .workers()
            .filter(|(_, worker)| worker.info.class == plan.class && takes(worker.info.role))
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
                *silent += 1;
                continue;
            }
            if is_busy(&config.busy, worker) {
                busy += 1;
                continue;
            }
            if worker.info.block_size.get() != size {
                size = worker.info.block_size.get();
                blocks = plan.prompt_tokens.div_ceil(size) as u64;
            }
            let held = Held { overlap, loadable, blocks };
            candidates.push(Candidate::new(roster, worker, &config.weights, mean_lately, at, held));
        }
        busy
    }

    /// One worker alone, whatever it is busy with.
    fn gather_one(
        &mut self,
        roster: &Roster,
        plan: &RouteRequest<'_>,
        id: WorkerId,
    ) -> Result<(), RouteError> {
        let Self { plans, candidates, candidate_at, .. } = self;
        let worker = roster
            .get(id)
            .filter(|worker| worker.info.class == plan.class)
            .ok_or(RouteError::NoWorker)?;
        let overlaps = &plans.first().ok_or(RouteError::NoWorker)?.overlaps;
        let blocks = plan.prompt_tokens.div_ceil(worker.info.block_size.get()) as u64;
        let held = Held { overlap: overlaps.of(id), loadable: overlaps.of_lower_tiers(id), blocks };
        // What it did lately beyond the mean decides between workers alone.
        candidates.clear();
        candidates.push(Candidate::new(roster, worker, &Weights::default(), 0.0, 0, held));
        candidate_at.clear();
        candidate_at.resize(roster.places(), NONE);
        candidate_at[worker.seat.place as usize] = 0;
        Ok(())
    }

    /// The worker of a session, if it may get the request.
    fn of_session(&self, roster: &mut Roster, session: u64) -> Option<usize> {
        let seat = roster.sessions.worker(session)?;
        self.candidate_of(seat)
    }

    fn candidate_of(&self, seat: Seat) -> Option<usize> {
        let at = *self.candidate_at.get(seat.place as usize)? as usize;
        self.candidates.get(at).filter(|candidate| candidate.seat == seat).map(|_| at)
    }

    fn pick(
        &mut self,
        config: &RouterConfig,
        roster: &mut Roster,
        plans: &[RouteRequest<'_>],
    ) -> (usize, Decision) {
        let policy = config.policy;
        let chosen = match policy {
            Policy::KvMedia | Policy::Kv => {
                for (at, plan) in plans.iter().enumerate() {
                    self.expect_promised(roster, at as u32, plan.keys);
                    if policy == Policy::KvMedia {
                        self.spare_media(roster, at as u32);
                    }
                    self.find_embeddings(config, roster, at as u32);
                }
                self.cost(config);
                return (
                    self.cheapest(&mut roster.rng, config.temperature),
                    Decision::Cost(policy),
                );
            }
            Policy::LeastLoaded => {
                self.candidates.iter_mut().for_each(|candidate| candidate.cost = candidate.load);
                self.cheapest(&mut roster.rng, 0.0)
            }
            Policy::PowerOfTwo => {
                let count = self.candidates.len();
                let one = roster.rng.random_range(0..count);
                let other = (one + roster.rng.random_range(1..count.max(2))) % count;
                if self.candidates[other].load < self.candidates[one].load { other } else { one }
            }
            Policy::Random => roster.rng.random_range(0..self.candidates.len()),
            Policy::RoundRobin => {
                let after = roster
                    .last
                    .map_or(0, |last| self.candidates.partition_point(|other| other.id <= last));
                after % self.candidates.len()
            }
        };
        self.encode_elsewhere();
        (chosen, Decision::Policy(policy))
    }

    /// What requests in flight promise counts as held. A worker's promises for this prompt begin
    /// where its overlap ends, so that one look per distinct overlap finds them.
    fn expect_promised(&mut self, roster: &Roster, plan: u32, keys: &[BlockKey]) {
        if roster.promises.is_empty() {
            return;
        }
        self.depths.clear();
        let of_plan = self.candidates.iter().filter(|candidate| candidate.plan == plan);
        self.depths.extend(of_plan.map(|candidate| candidate.overlap));
        self.depths.sort_unstable();
        self.depths.dedup();
        for &depth in &self.depths {
            let Some(key) = keys.get(depth as usize) else { break };
            for seat in roster.promises.of(*key) {
                let Some(at) = self.candidate_of(seat) else { continue };
                let candidate = &mut self.candidates[at];
                if candidate.overlap == depth && candidate.plan == plan {
                    candidate.expected = roster.promises.run_end(seat, keys, depth as usize) as u32;
                }
            }
        }
    }

    /// Media work that workers are spared because they have an item's tensors or embeddings.
    fn spare_media(&mut self, roster: &Roster, plan: u32) {
        for at in 0..self.plans[plan as usize].items.sorted.len() {
            let RouteItem { hash, end, embeds, elements } =
                self.plans[plan as usize].items.sorted[at];
            let odometers = |seat| roster.at(seat).map(|worker| worker.odometers);
            for (seat, held) in roster.media.of(hash, elements, embeds, odometers) {
                let Some(at) = self.candidate_of(seat) else { continue };
                let candidate = &mut self.candidates[at];
                if candidate.plan != plan {
                    continue;
                }
                let blocks = in_blocks(embeds as f64);
                if held.embeddings && end > candidate.covered_tokens() {
                    candidate.encode_spared += blocks;
                }
                if held.tensors {
                    candidate.process_spared += blocks;
                }
            }
        }
    }

    fn cost(&mut self, config: &RouterConfig) {
        let Self { candidates, plans, encoders, .. } = self;
        // Nearly all candidates expect the same.
        let (mut known, mut encode) = (None, 0.0);
        for candidate in candidates {
            let items = &plans[candidate.plan as usize].items;
            let expects = Some((candidate.plan, candidate.covered(), candidate.block_size));
            if known != expects {
                known = expects;
                encode = candidate.encode(items);
            }
            candidate.cost =
                candidate.terms(encode, candidate.process(items)).cost(&config.weights);
            candidate.cost += embedding_transfer(config, candidate.embedded);
            candidate.offer(encoders, encode, config);
        }
    }

    /// The one with the lowest cost, each of several with equal chance; with a temperature, others
    /// too.
    fn cheapest(&self, rng: &mut SmallRng, temperature: f64) -> usize {
        let mut best = 0;
        let mut ties = 0;
        for (at, candidate) in self.candidates.iter().enumerate() {
            let lowest = self.candidates[best].cost;
            if at > 0 && candidate.cost > lowest {
                continue;
            }
            ties = if candidate.cost < lowest { 1 } else { ties + 1 };
            // The n-th of n equals takes over with chance 1/n: each is left with 1/n in the end.
            if ties == 1 || rng.random_range(0..ties) == 0 {
                best = at;
            }
        }
        if temperature <= 0.0 {
            return best;
        }
        let lowest = self.candidates[best].cost;
        let chance = |candidate: &Candidate| (-(candidate.cost - lowest) / temperature).exp();
        let mut rest = rng.random::<f64>() * self.candidates.iter().map(chance).sum::<f64>();
        let drawn = self.candidates.iter().position(|candidate| {
            rest -= chance(candidate);
            rest < 0.0
        });
        drawn.unwrap_or(best)
    }
}

/// Whether the worker can be given such a request at all.
fn fits(worker: &Worker, plan: &RouteRequest<'_>) -> bool {
    plan.prompt_tokens <= worker.info.max_prompt_tokens
        && plan.encoder_tokens <= worker.info.max_encoder_tokens
}

fn is_busy(busy: &BusyThresholds, worker: &Worker) -> bool {
    let engine = worker.engine.unwrap_or_default();
    let pending = worker.pending.tokens + engine.pending_tokens_of_others;
    engine.draining
        || busy.kv_usage.is_some_and(|most| engine.kv_usage >= most)
        || busy.pending_tokens.is_some_and(|most| pending >= most)
        || busy.waiting.is_some_and(|most| engine.waiting >= most)
}
