//! The choice of workers where prompts and answers have workers of their own.

use chiasm_types::{MmHash, Role};
use rand::Rng;
use rand::rngs::SmallRng;

use super::candidate::Candidate;
use super::{Assignment, Encoding, Scratch, choose};
use crate::config::{Policy, RouterConfig, StageWeights};
use crate::error::RouteError;
use crate::explain::Decision;
use crate::request::{RouteRequest, Splitting};
use crate::roster::Roster;
use crate::worker::Pending;

/// Who does what for a request.
pub(crate) struct Stages {
    pub(crate) answers: Assignment,
    pub(crate) prefills: Option<Assignment>,
    pub(crate) encodes: Vec<Encoding>,
    /// Media items whose embeddings whoever computes the prompt finds.
    pub(crate) embedded: Vec<MmHash>,
}

impl Stages {
    fn new(answers: Assignment, prefills: Option<Assignment>) -> Self {
        Self { answers, prefills, encodes: Vec::new(), embedded: Vec::new() }
    }
}

/// Where a worker is: within what it hands over prompts, and its machine.
type Place = (u64, u64);

/// A worker for one stage, and what that costs.
struct Priced {
    assignment: Assignment,
    place: Place,
    cost: f64,
    /// The work there until the prompt is computed, with what waits before it, in the unit of
    /// costs.
    work_until_computed: f64,
}

/// Two workers for a request.
struct Pair {
    /// Which of those for the prompt.
    prefills: usize,
    /// Which of the candidates.
    answers: usize,
    /// What a block takes to be sent.
    transfer: f64,
    cost: f64,
}

/// Picks the worker that answers, and if it is cheaper, and allowed, another one that computes the
/// prompt and can hand it over.
pub(crate) fn choose_stages(
    config: &RouterConfig,
    roster: &mut Roster,
    scratch: &mut Scratch,
    plans: &[RouteRequest<'_>],
    splitting: Splitting,
) -> Result<Stages, RouteError> {
    if !roster.has_roles() {
        return choose(config, roster, scratch, plans).map(|answers| Stages::new(answers, None));
    }
    scratch.gather_encoders(config, roster, plans);
    // First, as what is compared in the end is told: the workers that answer.
    let prefills = match splitting {
        Splitting::Allowed => scratch.for_prompt(config, roster, plans)?,
        Splitting::Forbidden => Vec::new(),
    };
    let whole = scratch.for_all(config, roster, plans);
    let split = match prefills.is_empty() {
        true => None,
        false => scratch.cheapest_pair(config, roster, plans, prefills)?,
    };
    let is_cheaper = |cost: f64| match (&whole, config.policy) {
        (Ok(whole), Policy::KvMedia | Policy::Kv) => cost < whole.cost,
        // A policy that knows no costs takes each worker for what it is there for.
        (Ok(_) | Err(_), _) => true,
    };
    let mut stages = match split {
        Some((stages, cost)) if is_cheaper(cost + config.stages.hop) => stages,
        _ => Stages::new(whole?.assignment, None),
    };
    let computes = stages.prefills.as_ref().unwrap_or(&stages.answers);
    (stages.embedded, stages.encodes) = scratch.embeddings_for(config, roster, computes)?;
    let first = plans.first().ok_or(RouteError::NoWorker)?;
    if let Some(session) = first.session {
        roster.sessions.went_to(session, stages.answers.seat);
    }
    roster.last = Some(stages.answers.id);
    roster.last_prefill =
        stages.prefills.as_ref().map(|prefills| prefills.id).or(roster.last_prefill);
    Ok(stages)
}

impl Scratch {
    /// The workers for the prompt alone: by cost the cheapest of each place, else the one that the
    /// policy picks. None if there are none, or all are busy.
    fn for_prompt(
        &mut self,
        config: &RouterConfig,
        roster: &mut Roster,
        plans: &[RouteRequest<'_>],
    ) -> Result<Vec<Priced>, RouteError> {
        self.gather(config, roster, plans, |role| role == Role::Prefill);
        if self.candidates.is_empty() {
            return Ok(Vec::new());
        }
        self.fill_items(plans);
        // Whoever answers comes after others that answer, not after these.
        let last_answer = std::mem::replace(&mut roster.last, roster.last_prefill);
        let (chosen, decision) = self.pick(config, roster, plans);
        roster.last = last_answer;
        let of_each = match decision {
            // The one that was drawn goes before others that cost the same.
            Decision::Cost(_) => self.of_each(place, 0..self.candidates.len(), |at| {
                (self.candidates[at].cost, u32::from(at != chosen))
            }),
            Decision::Session | Decision::Policy(_) => vec![chosen],
        };
        let priced = of_each.into_iter().map(|at| self.priced(config, roster, plans, at, decision));
        priced.collect()
    }

    /// The worker for everything: one whose role is to prefill only if there is no other. Leaves
    /// the candidates that [`Scratch::cheapest_pair`] goes by.
    fn for_all(
        &mut self,
        config: &RouterConfig,
        roster: &mut Roster,
        plans: &[RouteRequest<'_>],
    ) -> Result<Priced, RouteError> {
        let mut busy = self
            .gather(config, roster, plans, |role| matches!(role, Role::Aggregated | Role::Decode));
        if self.candidates.is_empty() && busy == 0 {
            busy = self.gather(config, roster, plans, Role::answers);
        }
        self.busy = busy;
        if self.candidates.is_empty() {
            return Err(self.no_candidate(busy));
        }
        self.fill_items(plans);
        let (mut chosen, mut decision) = self.pick(config, roster, plans);
        if let Decision::Cost(_) = decision {
            self.disturb(config);
            chosen = self.cheapest(&mut roster.rng, config.temperature);
        }
        if let Some(by_session) = self.by_session(roster, plans) {
            (chosen, decision) = (by_session, Decision::Session);
        }
        self.priced(config, roster, plans, chosen, decision)
    }

    /// Returns the assignment of a candidate, with its cost.
    fn priced(
        &self,
        config: &RouterConfig,
        roster: &Roster,
        plans: &[RouteRequest<'_>],
        at: usize,
        decision: Decision,
    ) -> Result<Priced, RouteError> {
        let candidate = &self.candidates[at];
        let assignment = self.assignment(config, roster, plans, at, decision)?;
        let work_until_computed = candidate.waiting_work + assignment.pending.work;
        Ok(Priced {
            assignment,
            place: place(candidate),
            cost: candidate.cost,
            work_until_computed,
        })
    }

    /// A worker that decodes has answers waiting for each prompt that it computes.
    fn disturb(&mut self, config: &RouterConfig) {
        let Self { candidates, plans, .. } = self;
        for candidate in candidates.iter_mut().filter(|candidate| candidate.role == Role::Decode) {
            let encode = candidate.encode(&plans[candidate.plan as usize].items);
            let waiting = (candidate.requests + 1) as f64;
            candidate.cost +=
                config.stages.disturb * waiting * candidate.work(encode, &config.weights);
        }
    }

    /// Of the workers for the prompt and those for the answer behind it the two that cost the least
    /// together, of those that hand over prompts to each other: the latter by what they have to do
    /// and to be sent, or that of the session. `None` if there are no two.
    fn cheapest_pair(
        &self,
        config: &RouterConfig,
        roster: &mut Roster,
        plans: &[RouteRequest<'_>],
        prefills: Vec<Priced>,
    ) -> Result<Option<(Stages, f64)>, RouteError> {
        let decodes = |at: &usize| self.candidates[*at].role == Role::Decode;
        let by_session = self.by_session(roster, plans).filter(decodes);
        let decoding = (0..self.candidates.len())
            .filter(|at| decodes(at) && by_session.is_none_or(|only| only == *at));
        let StageWeights { transfer, network_transfer, .. } = config.stages;
        let near = self.pairs(
            config,
            &prefills,
            decoding.clone(),
            transfer,
            |place| place,
            &mut roster.rng,
        );
        // The two that are cheapest within a network may be of one machine: then they are priced
        // above, and lower.
        let networked =
            decoding.filter(|&at| self.candidates[at].hands_over_in != self.candidates[at].machine);
        let far = self.pairs(
            config,
            &prefills,
            networked,
            network_transfer,
            |(network, _)| network,
            &mut roster.rng,
        );
        let cheapest =
            near.into_iter().chain(far).min_by(|one, other| one.cost.total_cmp(&other.cost));
        let Some(Pair { prefills: nth, answers: at, transfer, cost }) = cheapest else {
            return Ok(None);
        };
        let Some(Priced { assignment: prefill, .. }) = prefills.into_iter().nth(nth) else {
            return Ok(None);
        };
        let candidate = &self.candidates[at];
        let assignment =
            self.assignment(config, roster, plans, at, Decision::Cost(config.policy))?;
        // It computes nothing but the last token.
        let work = transfer * candidate.missing();
        let answers = Assignment {
            pending: Pending { tokens: 1, work },
            encodes_from: usize::MAX,
            ..assignment
        };
        Ok(Some((Stages::new(answers, Some(prefill)), cost)))
    }

    /// Each worker for the prompt, and of these for the answer behind it the cheapest that has the
    /// same key, with what a block takes to be sent from the one to the other.
    fn pairs<K: Ord>(
        &self,
        config: &RouterConfig,
        prefills: &[Priced],
        decoding: impl Iterator<Item = usize>,
        transfer: f64,
        key: impl Fn(Place) -> K,
        rng: &mut SmallRng,
    ) -> Vec<Pair> {
        let key_of = |candidate: &Candidate| key(place(candidate));
        let cost = |at: usize, work_before: f64| {
            self.candidates[at].cost_behind(config, transfer, work_before)
        };
        // Equals with equal chance, so that idle workers all get something to hold.
        let of_each = self.of_each(key_of, decoding, |at| (cost(at, 0.0), rng.random()));
        let pair = |(nth, prefill): (usize, &Priced)| {
            let at = of_each
                .iter()
                .copied()
                .find(|&at| key_of(&self.candidates[at]) == key(prefill.place))?;
            let cost = prefill.cost + cost(at, prefill.work_until_computed);
            Some(Pair { prefills: nth, answers: at, transfer, cost })
        };
        prefills.iter().enumerate().filter_map(pair).collect()
    }

    /// The worker that the request's session went to, if it may get the request.
    fn by_session(&self, roster: &mut Roster, plans: &[RouteRequest<'_>]) -> Option<usize> {
        let session = plans.first()?.session?;
        self.of_session(roster, session)
    }

    /// Of these candidates the first with each key, in the order of `rank`.
    fn of_each<K: Ord>(
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

fn place(candidate: &Candidate) -> Place {
    (candidate.hands_over_in, candidate.machine)
}
