//! The last requests, with the router's comparison for each.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_backend::RequestId;
use chiasm_pipeline::ExplainedPlan;
use chiasm_router::{CandidateExplanation, CostTerms, Decision, Explanation, Weights};
use serde::Serialize;
use tokio::time::Instant;

use super::lock;

/// The number of requests that are kept.
const MAX_REQUESTS: usize = 100;
/// The maximum number of requests kept at once after a pause.
const MAX_BURST: u64 = 32;
/// The mean interval between two kept requests while a page is open.
const PAUSE_OPEN: Duration = Duration::from_millis(100);
/// The mean interval between two kept requests while no page is open.
const PAUSE: Duration = Duration::from_secs(1);

/// The last requests that were explained. Not all requests are, as explaining a choice in a large
/// fleet takes longer than making it.
pub(crate) struct Requests {
    started: Instant,
    /// The time at which the next request is due at an even pace, in nanoseconds from `started`.
    due: AtomicU64,
    is_watched: AtomicBool,
    kept: Mutex<KeptRequests>,
}

#[derive(Default)]
struct KeptRequests {
    /// The number of the first request in `last`.
    first: u64,
    last: VecDeque<Request>,
    /// The numbers of the requests that have changed since the last event for pages.
    changed: Vec<u64>,
}

/// A request as pages list it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    number: u64,
    /// The request's id.
    id: String,
    /// The time at which a worker was picked, in milliseconds since the epoch.
    at: u64,
    worker: String,
    candidates: usize,
    overlap: u32,
    blocks: u64,
    items: usize,
    prompt_tokens: usize,
    /// `true` if the request moved to another worker, because this one refused it or died.
    moved: bool,
    outcome: Option<Outcome>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Outcome {
    pub(crate) endpoint: &'static str,
    pub(crate) status: u16,
    /// The end of the stream, for a streamed answer.
    pub(crate) stream: Option<&'static str>,
    /// The token counts of the prompt and the answer; `None` if they were not counted.
    pub(crate) found: Option<TokenCounts>,
    /// Seconds from the request's arrival to its first token.
    pub(crate) ttft: Option<f64>,
    /// Seconds from the request's arrival to its end.
    pub(crate) total: f64,
}

/// The token counts of a prompt and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct TokenCounts {
    /// Prompt tokens that the engine found in its cache.
    pub(crate) cached_tokens: usize,
    pub(crate) completion_tokens: usize,
}

struct Request {
    summary: Summary,
    explanation: Explanation,
    plans: Vec<Plan>,
}

/// A request's prompt for workers of one class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Plan {
    class: u32,
    prompt_tokens: usize,
    items: Vec<Item>,
}

/// A media item's place in a prompt, in tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Item {
    hash: String,
    modality: String,
    offset: usize,
    length: usize,
}

/// The explanation of a request's route, as pages show it on demand.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct RouteExplanation {
    request: Summary,
    decision: &'static str,
    policy: Option<&'static str>,
    weights: [f64; 7],
    busy: usize,
    plans: Vec<Plan>,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Candidate {
    worker: String,
    class: u32,
    block_size: u32,
    blocks: u64,
    overlap: u32,
    expected: u32,
    loadable: u32,
    /// The cost terms M, F, E, P, W, B and X.
    terms: [f64; 7],
    cost: f64,
}

impl Default for Requests {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            due: AtomicU64::new(0),
            is_watched: AtomicBool::new(false),
            kept: Mutex::default(),
        }
    }
}

impl Requests {
    /// Returns `true` if the next request is to be explained. Called for each request, so it must
    /// be cheap.
    pub(crate) fn should_explain(&self) -> bool {
        let pause = if self.is_watched.load(Ordering::Relaxed) { PAUSE_OPEN } else { PAUSE };
        self.should_explain_at(self.started.elapsed(), pause)
    }

    fn should_explain_at(&self, now: Duration, pause: Duration) -> bool {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let now = nanoseconds(now);
        let pause = nanoseconds(pause);
        let due = self.due.load(Ordering::Relaxed);
        let next = due.max(now).saturating_add(pause);
        // Only one of several concurrent requests is explained.
        next - now <= MAX_BURST * pause
            && self.due.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Sets whether a page is open.
    pub(super) fn set_watched(&self, is_watched: bool) {
        if self.is_watched.swap(is_watched, Ordering::Relaxed) != is_watched {
            // Requests kept at the other pace do not count.
            self.due.store(0, Ordering::Relaxed);
        }
    }

    /// Adds a request that was sent to a worker. Returns its number.
    pub(crate) fn add(
        &self,
        id: &RequestId,
        plans: Vec<Plan>,
        explanation: Explanation,
    ) -> Option<u64> {
        let chosen = explanation
            .candidates
            .iter()
            .find(|candidate| candidate.worker == explanation.chosen)?;
        let plan = plans.iter().find(|plan| plan.class == chosen.class.0)?;
        let mut summary = Summary {
            number: 0,
            id: id.as_str().to_owned(),
            at: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64),
            worker: chosen.worker.to_string(),
            candidates: explanation.candidates.len(),
            overlap: chosen.overlap,
            blocks: chosen.blocks,
            items: plan.items.len(),
            prompt_tokens: plan.prompt_tokens,
            moved: false,
            outcome: None,
        };
        let mut kept = lock(&self.kept);
        if kept.last.len() == MAX_REQUESTS {
            kept.last.pop_front();
            kept.first += 1;
        }
        let number = kept.first + kept.last.len() as u64;
        summary.number = number;
        kept.last.push_back(Request { summary, explanation, plans });
        kept.changed.push(number);
        Some(number)
    }

    /// Records the end of a kept request.
    pub(crate) fn finish(&self, number: u64, outcome: Outcome) {
        let mut kept = lock(&self.kept);
        if let Some(request) = kept.get_mut(number) {
            request.summary.outcome = Some(outcome);
            kept.changed.push(number);
        }
    }

    /// Marks the entry of an attempt that another attempt follows.
    pub(super) fn mark_moved(&self, number: u64) {
        let mut kept = lock(&self.kept);
        if let Some(request) = kept.get_mut(number) {
            request.summary.moved = true;
            kept.changed.push(number);
        }
    }

    /// Returns all kept requests, oldest first.
    pub(super) fn all(&self) -> Vec<Summary> {
        lock(&self.kept).last.iter().map(|request| request.summary.clone()).collect()
    }

    /// Takes the requests that have changed since the last call.
    pub(super) fn take_changed(&self) -> Vec<Summary> {
        let mut kept = lock(&self.kept);
        let mut changed = std::mem::take(&mut kept.changed);
        changed.sort_unstable();
        changed.dedup();
        changed
            .into_iter()
            .filter_map(|number| kept.get_mut(number).map(|request| request.summary.clone()))
            .collect()
    }

    /// Returns the explanation of a request's route; `None` if the request is no longer kept.
    pub(super) fn explain(&self, number: u64) -> Option<RouteExplanation> {
        lock(&self.kept).get_mut(number).map(|request| RouteExplanation::from(&*request))
    }
}

impl KeptRequests {
    fn get_mut(&mut self, number: u64) -> Option<&mut Request> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.last.get_mut(index)
    }
}

impl From<&ExplainedPlan<'_>> for Plan {
    fn from(plan: &ExplainedPlan<'_>) -> Self {
        let item = |item: &chiasm_backend::JobItem| Item {
            hash: item.hash.to_string(),
            modality: item.modality.to_string(),
            offset: item.placeholder.offset,
            length: item.placeholder.length,
        };
        Self {
            class: plan.class.0,
            prompt_tokens: plan.prompt_tokens,
            items: plan.items.iter().map(item).collect(),
        }
    }
}

impl From<&Request> for RouteExplanation {
    fn from(request: &Request) -> Self {
        let Request { summary, explanation, plans } = request;
        let (decision, policy) = match explanation.decision {
            Decision::Cost(policy) => ("cost", Some(policy.name())),
            Decision::Session => ("session", None),
            Decision::Policy(policy) => ("policy", Some(policy.name())),
        };
        let Weights { prefill, fetch, encode, process, queue, load, balance } = explanation.weights;
        Self {
            request: summary.clone(),
            decision,
            policy,
            weights: [prefill, fetch, encode, process, queue, load, balance],
            busy: explanation.busy,
            plans: plans.clone(),
            candidates: explanation.candidates.iter().map(Candidate::from).collect(),
        }
    }
}

impl From<&CandidateExplanation> for Candidate {
    fn from(candidate: &CandidateExplanation) -> Self {
        let CostTerms { compute, fetch, encode, process, waiting, load, excess } = candidate.terms;
        Self {
            worker: candidate.worker.to_string(),
            class: candidate.class.0,
            block_size: candidate.block_size,
            blocks: candidate.blocks,
            overlap: candidate.overlap,
            expected: candidate.expected,
            loadable: candidate.loadable,
            terms: [compute, fetch, encode, process, waiting, load, excess],
            cost: candidate.cost,
        }
    }
}

#[cfg(test)]
mod tests;
