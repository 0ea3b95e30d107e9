//! The last requests, with what the router compared for each.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_backend::RequestId;
use chiasm_pipeline::ExplainedPlan;
use chiasm_router::{Considered, Decision, Explanation, Terms, Weights};
use serde::Serialize;
use tokio::time::Instant;

use super::lock;

/// Requests that are kept.
const KEPT: usize = 100;
/// Requests that may be kept at once, after a pause.
const BURST: u64 = 32;
/// Between two requests that are kept, on the average: while a page is open, and else.
const PAUSE_OPEN: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_secs(1);

/// The last requests that were explained: not all, as an explanation of a large fleet takes longer
/// than a choice.
pub(crate) struct Requests {
    started: Instant,
    /// The earliest time of the next one at an even pace, in nanoseconds from `started`.
    due: AtomicU64,
    is_watched: AtomicBool,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// The number of the first of `last`.
    first: u64,
    last: VecDeque<Request>,
    /// Numbers of those that have changed since pages were told.
    changed: Vec<u64>,
}

/// A request as pages are told of it at first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    number: u64,
    /// The request's identity.
    id: String,
    /// The time at which a worker was picked, in milliseconds since the epoch.
    at: u64,
    worker: String,
    candidates: usize,
    overlap: u32,
    blocks: u64,
    items: usize,
    prompt_tokens: usize,
    /// The request went on to another worker: this one had not taken it, or was lost with it.
    moved: bool,
    outcome: Option<Outcome>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Outcome {
    pub(crate) endpoint: &'static str,
    pub(crate) status: u16,
    /// The end of its stream, for a streamed answer.
    pub(crate) stream: Option<&'static str>,
    /// The counts of its prompt and answer; `None` if nobody has counted.
    pub(crate) found: Option<Found>,
    /// Seconds from its arrival to its first token.
    pub(crate) ttft: Option<f64>,
    /// Seconds from its arrival to its end.
    pub(crate) total: f64,
}

/// The token counts of a prompt and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Found {
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

/// Why a request went where it went, as pages are told of it when they ask.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Why {
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
    /// M, F, E, P, W, B and X.
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
    /// cost next to nothing.
    pub(crate) fn wants_next(&self) -> bool {
        let pause = if self.is_watched.load(Ordering::Relaxed) { PAUSE_OPEN } else { PAUSE };
        self.wants_at(self.started.elapsed(), pause)
    }

    fn wants_at(&self, now: Duration, pause: Duration) -> bool {
        let [now, pause] =
            [now, pause].map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let due = self.due.load(Ordering::Relaxed);
        let next = due.max(now).saturating_add(pause);
        // Of several at once one is enough.
        next - now <= BURST * pause
            && self.due.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Sets whether a page is open.
    pub(super) fn set_watched(&self, is_watched: bool) {
        if self.is_watched.swap(is_watched, Ordering::Relaxed) != is_watched {
            // What was kept at another pace does not count.
            self.due.store(0, Ordering::Relaxed);
        }
    }

    /// Keeps a request that was sent to a worker. Returns its number.
    pub(crate) fn sent(
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
        if kept.last.len() == KEPT {
            kept.last.pop_front();
            kept.first += 1;
        }
        let number = kept.first + kept.last.len() as u64;
        summary.number = number;
        kept.last.push_back(Request { summary, explanation, plans });
        kept.changed.push(number);
        Some(number)
    }

    /// A request that was kept has ended.
    pub(crate) fn ended(&self, number: u64, outcome: Outcome) {
        let mut kept = lock(&self.kept);
        if let Some(request) = kept.get_mut(number) {
            request.summary.outcome = Some(outcome);
            kept.changed.push(number);
        }
    }

    /// Marks the entry of an attempt that another one follows.
    pub(super) fn moved(&self, number: u64) {
        let mut kept = lock(&self.kept);
        if let Some(request) = kept.get_mut(number) {
            request.summary.moved = true;
            kept.changed.push(number);
        }
    }

    /// All that are kept, the oldest first.
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

    /// Why a request went where it went. `None` if it is not kept any more.
    pub(super) fn why(&self, number: u64) -> Option<Why> {
        lock(&self.kept).get_mut(number).map(|request| Why::of(request))
    }
}

impl Kept {
    fn get_mut(&mut self, number: u64) -> Option<&mut Request> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.last.get_mut(at)
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

impl Why {
    fn of(request: &Request) -> Self {
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
            candidates: explanation.candidates.iter().map(Candidate::of).collect(),
        }
    }
}

impl Candidate {
    fn of(considered: &Considered) -> Self {
        let Terms { compute, fetch, encode, process, waiting, load, excess } = considered.terms;
        Self {
            worker: considered.worker.to_string(),
            class: considered.class.0,
            block_size: considered.block_size,
            blocks: considered.blocks,
            overlap: considered.overlap,
            expected: considered.expected,
            loadable: considered.loadable,
            terms: [compute, fetch, encode, process, waiting, load, excess],
            cost: considered.cost,
        }
    }
}

#[cfg(test)]
mod tests;
