//! The router's state of one worker.

use chiasm_kv::WorkerIndexStats;
use chiasm_types::{BlockSize, PlanClassId, Role, WorkerId};

use crate::approximate_cache::ApproximateCache;
use crate::media_holders::MediaCaches;
use crate::worker_handle::WorkerHandle;

/// The properties of a worker that don't change while its engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Blocks of the engine's KV cache.
    pub total_blocks: u64,
    /// Tokens per block, as in the engine's events.
    pub block_size: BlockSize,
    /// `true` if the engine publishes the changes of its cache. If not, the router infers them from
    /// its own decisions, see [`Knowledge::Approximate`].
    pub publishes_events: bool,
    /// The capacity of the engine's encoder cache, in tokens of embeddings; 0 if the engine keeps
    /// none between requests.
    pub encoder_cache_tokens: u64,
    /// The capacity of the engine's receiver cache; 0 for none. It counts elements of media items'
    /// tensors, in the form in which they are sent to the engine.
    pub receiver_cache_elements: u64,
    /// The plan class of the worker: requests are judged by the plan of this class.
    pub class: PlanClassId,
    /// The stages of requests that the worker computes.
    pub role: Role,
    /// The number of the worker's machine. Workers of one machine find each other's embeddings.
    pub machine: u64,
    /// The size of the store in which workers of the machine share encoded embeddings, in bytes; 0
    /// if there is none.
    pub embedding_store_bytes: u64,
    /// The number of the domain in which the worker hands over prompts: workers of one domain hand
    /// prompts to each other. Either the number of the machine, or that of a network, which differs
    /// from all machines' numbers.
    pub handover_domain: u64,
    /// The maximum prompt length that leaves room for an answer, in tokens.
    pub max_prompt_tokens: usize,
    /// The maximum number of embeddings of one item that the engine can always encode at once, in
    /// tokens.
    pub max_encoder_tokens: usize,
}

/// The reliability of the router's knowledge of a worker's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Knowledge {
    /// Every event since the engine's cache was empty has been applied, except for those in flight.
    /// The engine holds exactly what the router reports.
    Exact,
    /// Events are being fetched: at the start, or after some were lost. The router's view may be
    /// out of date.
    CatchingUp,
    /// The engine publishes no events, or some are lost for good. In addition to the known events,
    /// the router assumes that the engine keeps the prompts it was given, for
    /// [`RouterConfig::approximate_ttl`](crate::RouterConfig::approximate_ttl) and as far as they
    /// fit into its cache.
    Approximate,
}

impl Knowledge {
    /// Returns the name in metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::CatchingUp => "catching-up",
            Self::Approximate => "approximate",
        }
    }
}

/// The number of further requests that a worker may get: all, one, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// All requests.
    #[default]
    All,
    /// The next request that the worker is picked for, and none after that.
    One,
    /// No requests, as if the worker were not there.
    None,
}

/// The last statistics that an engine reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests in the running batch.
    pub running: u64,
    /// Requests in the queue.
    pub waiting: u64,
    /// The fraction of the KV cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Prompt tokens that the engine has to compute for requests of other frontends before their
    /// first tokens.
    pub pending_tokens_of_others: u64,
    /// `true` if the engine finishes its requests and accepts no new ones.
    pub draining: bool,
}

/// The router's view of one worker at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerSnapshot {
    /// The worker's id.
    pub id: WorkerId,
    /// The properties that the worker was added with.
    pub info: WorkerInfo,
    /// The reliability of `index`.
    pub knowledge: Knowledge,
    /// Live reservations.
    pub requests: usize,
    /// Prompt blocks of the live reservations. Blocks shared by several reservations count once
    /// for each.
    pub blocks_in_use: u64,
    /// Prompt tokens that the worker has to compute before its requests in flight have their first
    /// tokens.
    pub pending_tokens: u64,
    /// Blocks that requests in flight will leave behind and events have not confirmed.
    pub promised_blocks: usize,
    /// The worker's statistics in the prefix index.
    pub index: WorkerIndexStats,
    /// The engine's last statistics; `None` before the first report.
    pub engine: Option<EngineStats>,
}

/// The router's own state of one worker; the lock of the worker table guards it.
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) info: WorkerInfo,
    pub(crate) handle: WorkerHandle,
    pub(crate) requests: usize,
    pub(crate) blocks_in_use: u64,
    /// The work of the requests that have no token yet.
    pub(crate) pending: PendingWork,
    /// The decayed sum of the worker's past work, in the unit of costs; see
    /// [`RecentWork`](crate::recent_work::RecentWork).
    pub(crate) recent_work: f64,
    pub(crate) media_caches: MediaCaches,
    pub(crate) engine: Option<EngineStats>,
    /// Requests that waited in the engine at its last report and were not this router's, such as
    /// those of another frontend.
    pub(crate) waiting_of_others: u64,
    /// `true` if the worker does not answer.
    pub(crate) suspect: bool,
    /// The number of further requests that the worker may get.
    pub(crate) admission: Admission,
    /// `true` if no recoverable event is missing. Meaningless for a worker without events.
    pub(crate) caught_up: bool,
    /// The expected cache contents, if the worker's events are missing or incomplete.
    pub(crate) approximate_cache: Option<ApproximateCache>,
    /// The number of the worker's last event batch, among all batches applied by the router.
    pub(crate) last_event_batch: u64,
}

/// The work that requests cause before their first tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PendingWork {
    /// Prompt tokens to compute.
    pub(crate) tokens: u64,
    /// The cost of the work, in the unit of costs.
    pub(crate) work: f64,
}

impl Worker {
    /// Records the engine's statistics, and the number of its waiting requests that belong to
    /// other frontends.
    ///
    /// The number of other frontends' requests can only be computed now: the next report may be a
    /// second away, and this router's own requests come and go in between.
    pub(crate) fn set_stats(&mut self, stats: EngineStats) {
        let others = (stats.running + stats.waiting).saturating_sub(self.requests as u64);
        self.waiting_of_others = stats.waiting.min(others);
        self.engine = Some(stats);
    }

    /// Returns the reliability of the router's knowledge of the worker's cache.
    pub(crate) fn knowledge(&self) -> Knowledge {
        if self.info.publishes_events && !self.caught_up {
            Knowledge::CatchingUp
        } else if self.approximate_cache.is_some() {
            Knowledge::Approximate
        } else {
            Knowledge::Exact
        }
    }
}
