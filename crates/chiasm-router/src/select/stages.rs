//! The choice of workers where prompts and answers have workers of their own.

use chiasm_types::Role;

use super::{Assignment, Scratch, choose};
use crate::config::{Policy, RouterConfig};
use crate::error::RouteError;
use crate::explain::Decision;
use crate::roster::{Pending, Roster};
use crate::route::Splitting;
use crate::router::RouteRequest;

/// Who does what for a request.
pub(crate) struct Stages {
    pub(crate) answers: Assignment,
    pub(crate) prefills: Option<Assignment>,
}

/// A worker for one stage, and what that costs.
struct Priced {
    assignment: Assignment,
    cost: f64,
}

/// Picks the worker that answers, and if it is cheaper, and allowed, another one that computes the prompt.
pub(crate) fn choose_stages(
    config: &RouterConfig,
    roster: &mut Roster,
    scratch: &mut Scratch,
    plans: &[RouteRequest<'_>],
    splitting: Splitting,
) -> Result<Stages, RouteError> {
    if !roster.has_roles() {
        return choose(config, roster, scratch, plans).map(|answers| Stages { answers, prefills: None });
    }
    // First, as what is compared in the end is told: the workers that answer.
    let prefill = match splitting {
        Splitting::Allowed => scratch.for_prompt(config, roster, plans)?,
        Splitting::Forbidden => None,
    };
    let whole = scratch.for_all(config, roster, plans);
    let decode = match &prefill {
        Some(_) => scratch.for_answer(config, roster, plans)?,
        None => None,
    };
    let is_cheaper = |split: f64| match (&whole, config.policy) {
        (Ok(whole), Policy::KvMedia | Policy::Kv) => split < whole.cost,
        // A policy that knows no costs takes each worker for what it is there for.
        (Ok(_) | Err(_), _) => true,
    };
    let stages = match (prefill, decode) {
        (Some(prefill), Some(decode)) if is_cheaper(prefill.cost + decode.cost + config.stages.hop) => {
            Stages { answers: decode.assignment, prefills: Some(prefill.assignment) }
        }
        _ => Stages { answers: whole?.assignment, prefills: None },
    };
    let first = plans.first().ok_or(RouteError::NoWorker)?;
    if let Some(session) = first.session {
        roster.sessions.went_to(session, stages.answers.seat);
    }
    roster.last = Some(stages.answers.id);
    Ok(stages)
}

impl Scratch {
    /// The worker for the prompt alone. `None` if there is none, or all are busy.
    fn for_prompt(
        &mut self,
        config: &RouterConfig,
        roster: &mut Roster,
        plans: &[RouteRequest<'_>],
    ) -> Result<Option<Priced>, RouteError> {
        self.gather(config, roster, plans, |role| role == Role::Prefill);
        if self.candidates.is_empty() {
            return Ok(None);
        }
        self.fill_items(plans);
        let (chosen, decision) = self.pick(config, roster, plans);
        let assignment = self.assignment(config, roster, plans, chosen, decision)?;
        Ok(Some(Priced { assignment, cost: self.candidates[chosen].cost }))
    }

    /// The worker for everything: one whose role is to prefill only if there is no other. Leaves the candidates that
    /// [`Scratch::for_answer`] goes by.
    fn for_all(
        &mut self,
        config: &RouterConfig,
        roster: &mut Roster,
        plans: &[RouteRequest<'_>],
    ) -> Result<Priced, RouteError> {
        let mut busy = self.gather(config, roster, plans, |role| role != Role::Prefill);
        if self.candidates.is_empty() && busy == 0 {
            busy = self.gather(config, roster, plans, |_| true);
        }
        self.busy = busy;
        if self.candidates.is_empty() {
            return Err(if busy > 0 { RouteError::Busy(busy) } else { RouteError::NoWorker });
        }
        self.fill_items(plans);
        let session = plans.first().and_then(|plan| plan.session);
        let by_session = session.and_then(|session| self.of_session(roster, session));
        let (mut chosen, mut decision) = self.pick(config, roster, plans);
        if let Decision::Cost(_) = decision {
            self.disturb(config);
            chosen = self.cheapest(&mut roster.rng, config.temperature);
        }
        if let Some(by_session) = by_session {
            (chosen, decision) = (by_session, Decision::Session);
        }
        let assignment = self.assignment(config, roster, plans, chosen, decision)?;
        Ok(Priced { assignment, cost: self.candidates[chosen].cost })
    }

    /// A worker that decodes has answers waiting for each prompt that it computes.
    fn disturb(&mut self, config: &RouterConfig) {
        let Self { candidates, plans, .. } = self;
        for candidate in candidates.iter_mut().filter(|candidate| candidate.role == Role::Decode) {
            let encode = candidate.encode(&plans[candidate.plan as usize].items);
            let waiting = (candidate.requests + 1) as f64;
            candidate.cost += config.stages.disturb * waiting * candidate.work(encode, &config.weights);
        }
    }

    /// The worker for the answer behind a prompt that another one computes: that of the session, or the one with the least to do, what it
    /// has to be sent being a part of that.
    fn for_answer(
        &self,
        config: &RouterConfig,
        roster: &mut Roster,
        plans: &[RouteRequest<'_>],
    ) -> Result<Option<Priced>, RouteError> {
        let session = plans.first().and_then(|plan| plan.session);
        let by_session = session.and_then(|session| self.of_session(roster, session));
        let decodes = |at: &usize| self.candidates[*at].role == Role::Decode;
        let cost = |at: usize| self.candidates[at].cost_behind(config);
        let cheapest =
            || (0..self.candidates.len()).filter(decodes).min_by(|one, other| cost(*one).total_cmp(&cost(*other)));
        let Some(chosen) = by_session.filter(decodes).or_else(cheapest) else { return Ok(None) };
        let candidate = &self.candidates[chosen];
        let decision = Decision::Cost(config.policy);
        let assignment = self.assignment(config, roster, plans, chosen, decision)?;
        // It computes nothing but the last token.
        let work = config.stages.transfer * candidate.missing();
        let assignment = Assignment { pending: Pending { tokens: 1, work }, encodes_from: usize::MAX, ..assignment };
        Ok(Some(Priced { assignment, cost: cost(chosen) }))
    }
}
