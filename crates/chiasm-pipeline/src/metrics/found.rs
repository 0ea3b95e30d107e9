//! What engines found in their caches, by their own account, and how soon they answered.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use chiasm_request::RouteOutcome;
use chiasm_router::WorkerSnapshot;
use chiasm_types::WorkerId;

/// Tokens of prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptTokens {
    /// All of them.
    pub prompt: u64,
    /// Those that engines found in their caches.
    pub cached: u64,
}

impl PromptTokens {
    /// What came after `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            prompt: self.prompt.saturating_sub(before.prompt),
            cached: self.cached.saturating_sub(before.cached),
        }
    }

    /// The part that was found; `None` without any.
    pub fn hit_rate(self) -> Option<f64> {
        (self.prompt > 0).then(|| self.cached as f64 / self.prompt as f64)
    }
}

impl AddAssign for PromptTokens {
    fn add_assign(&mut self, other: Self) {
        self.prompt += other.prompt;
        self.cached += other.cached;
    }
}

/// Sums over the requests to which a worker gave a first token.
#[derive(Clone, Copy, Debug, Default)]
pub struct OfWorker {
    pub tokens: PromptTokens,
    pub requests: u64,
    /// Time from their arrivals to their first tokens.
    pub first_token: Duration,
    /// Time that they waited in the engine, where it tells.
    pub queued: Duration,
}

/// What is known of the requests that have their first tokens.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The tokens of all workers that there ever were.
    pub total: PromptTokens,
    /// The sums of each worker that is there.
    workers: BTreeMap<WorkerId, OfWorker>,
}

impl Found {
    /// A request has its first token.
    pub fn add(&mut self, attempted: &RouteOutcome) {
        let (prompt, cached) =
            (attempted.prompt_tokens as u64, attempted.prefill.cached_tokens as u64);
        let tokens = PromptTokens { prompt, cached };
        self.total += tokens;
        let worker = self.workers.entry(attempted.worker).or_default();
        worker.tokens += tokens;
        worker.requests += 1;
        worker.first_token += attempted.first_token.unwrap_or_default();
        worker.queued += attempted.prefill.queued.unwrap_or_default();
    }

    /// What the engine found in its cache for a request has become known, behind its first token.
    pub fn add_later(&mut self, attempted: &RouteOutcome) {
        let later = PromptTokens { prompt: 0, cached: attempted.prefill.cached_tokens as u64 };
        self.total += later;
        self.workers.entry(attempted.worker).or_default().tokens += later;
    }

    /// Forgets workers that are not among these, which are in the order of their ids.
    pub fn keep(&mut self, workers: &[WorkerSnapshot]) {
        let is_there = |id: &WorkerId| workers.binary_search_by_key(id, |worker| worker.id).is_ok();
        self.workers.retain(|id, _| is_there(id));
    }

    /// Returns the sums of a worker.
    pub fn of_worker(&self, worker: WorkerId) -> OfWorker {
        self.workers.get(&worker).copied().unwrap_or_default()
    }
}
