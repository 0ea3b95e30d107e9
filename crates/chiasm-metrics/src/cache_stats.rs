//! Sums over requests with a first token: cached tokens as engines report them, and latencies.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use chiasm_request::RouteOutcome;
use chiasm_router::WorkerSnapshot;
use chiasm_types::WorkerId;

/// Counts of prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptTokens {
    /// The number of prompt tokens.
    pub prompt: u64,
    /// The number of prompt tokens that engines found in their caches.
    pub cached: u64,
}

impl PromptTokens {
    /// Returns the tokens that were counted after `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            prompt: self.prompt.saturating_sub(before.prompt),
            cached: self.cached.saturating_sub(before.cached),
        }
    }

    /// Returns the share of cached tokens; `None` without tokens.
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

/// Sums over the requests to which one worker gave a first token.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerCacheStats {
    pub tokens: PromptTokens,
    pub requests: u64,
    /// The times from arrival to first token.
    pub first_token: Duration,
    /// The waiting times in the engine, if it reports them.
    pub queued: Duration,
}

/// Sums over the requests with a first token.
#[derive(Clone, Debug, Default)]
pub struct CacheStats {
    /// The tokens of all workers, including removed ones.
    pub total: PromptTokens,
    /// The sums of each present worker.
    workers: BTreeMap<WorkerId, WorkerCacheStats>,
}

impl CacheStats {
    /// Adds a request that has its first token.
    pub fn add(&mut self, route: &RouteOutcome) {
        let tokens = PromptTokens {
            prompt: route.prompt_tokens as u64,
            cached: route.prefill.cached_tokens as u64,
        };
        self.total += tokens;
        let worker = self.workers.entry(route.worker).or_default();
        worker.tokens += tokens;
        worker.requests += 1;
        worker.first_token += route.first_token.unwrap_or_default();
        worker.queued += route.prefill.queued.unwrap_or_default();
    }

    /// Adds the cached tokens of a request that were reported after its first token.
    pub fn add_late_prefill(&mut self, route: &RouteOutcome) {
        let later = PromptTokens { prompt: 0, cached: route.prefill.cached_tokens as u64 };
        self.total += later;
        self.workers.entry(route.worker).or_default().tokens += later;
    }

    /// Removes all workers except `workers`, which must be ordered by id.
    pub fn retain(&mut self, workers: &[WorkerSnapshot]) {
        let is_present =
            |id: &WorkerId| workers.binary_search_by_key(id, |worker| worker.id).is_ok();
        self.workers.retain(|id, _| is_present(id));
    }

    /// Returns the sums of a worker.
    pub fn worker(&self, worker: WorkerId) -> WorkerCacheStats {
        self.workers.get(&worker).copied().unwrap_or_default()
    }
}
