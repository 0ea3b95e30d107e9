//! What is known of one worker.

use chiasm_kv::WorkerIndexStats;
use chiasm_types::{BlockSize, PlanClassId, Role, WorkerId};

use crate::believed::Believed;
use crate::media_holders::Odometers;
use crate::seat::Seat;

/// What is fixed about a worker while its engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Blocks of the engine's KV cache.
    pub total_blocks: u64,
    /// Tokens per block, as in the engine's events.
    pub block_size: BlockSize,
    /// Whether the engine tells what happens to its cache. If not, the router goes by its own
    /// decisions, see [`Knowledge::Approximate`].
    pub publishes_events: bool,
    /// Embeddings that the engine's encoder cache holds, in tokens; 0 when it keeps none between
    /// requests.
    pub encoder_cache_tokens: u64,
    /// Elements of media items' tensors that the engine's receiver cache holds, in the form that
    /// the engine is sent; 0 for none.
    pub receiver_cache_elements: u64,
    /// The class whose plan of a request counts for the worker.
    pub class: PlanClassId,
    /// Which stages of requests it computes.
    pub role: Role,
    /// The machine that it runs on, as a number: workers of one machine find each other's
    /// embeddings.
    pub machine: u64,
    /// Bytes of embeddings that workers of its machine have encoded and all of them find there; 0
    /// where they leave none for each other.
    pub embedding_store_bytes: u64,
    /// Where prompts are handed over, as a number: workers that have the same hand prompts to each
    /// other. That of the machine, or that of a network, which is none of a machine's.
    pub hands_over_in: u64,
    /// Longest prompt that leaves room for an answer, in tokens.
    pub max_prompt_tokens: usize,
    /// Embeddings of one item that the engine can always encode at once, in tokens.
    pub max_encoder_tokens: usize,
}

/// How far the router's knowledge of a worker's KV cache can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Knowledge {
    /// Every event since the engine's cache was empty has been applied, but for those on their way.
    /// What the router says the engine holds, it holds.
    Exact,
    /// Events are being fetched: at the start, or after some were lost. What the router says may be
    /// out of date.
    CatchingUp,
    /// The engine publishes no events, or some are lost for good. The router believes that the
    /// engine keeps what it was given, for
    /// [`RouterConfig::believed_for`](crate::RouterConfig::believed_for) and as much as its cache
    /// has room for, beside what events tell.
    Approximate,
}

impl Knowledge {
    /// The name in metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::CatchingUp => "catching-up",
            Self::Approximate => "approximate",
        }
    }
}

/// The requests that a worker may get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// All.
    #[default]
    All,
    /// The next one that it is picked for, and none after that.
    One,
    /// None, as if it were not there.
    None,
}

/// What an engine last said about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests in its running batch.
    pub running: u64,
    /// Requests in its queue.
    pub waiting: u64,
    /// Part of its KV cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Prompt tokens that the engine has to compute for requests of other frontends before their
    /// first tokens.
    pub pending_tokens_of_others: u64,
    /// The engine finishes what it has, and is given nothing new.
    pub draining: bool,
}

/// One worker as the router sees it at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerSnapshot {
    /// The worker's id.
    pub id: WorkerId,
    /// What was said when it was added.
    pub info: WorkerInfo,
    /// How far `index` can be trusted.
    pub knowledge: Knowledge,
    /// Live reservations.
    pub requests: usize,
    /// Prompt blocks of the live reservations. Those that share blocks count each.
    pub blocks_in_use: u64,
    /// Prompt tokens that the worker has to compute before its requests in flight have their first
    /// tokens.
    pub pending_tokens: u64,
    /// Blocks that requests in flight will leave behind and events have not confirmed.
    pub promised_blocks: usize,
    /// What the prefix index knows.
    pub index: WorkerIndexStats,
    /// What the engine says; `None` before it said anything.
    pub engine: Option<EngineStats>,
}

/// The router's own state of one worker; the lock of the roster guards it.
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) info: WorkerInfo,
    /// The worker's place, in this life.
    pub(crate) seat: Seat,
    pub(crate) requests: usize,
    pub(crate) blocks_in_use: u64,
    /// What its requests without a token wait for.
    pub(crate) pending: Pending,
    /// Work that it did lately, in the unit of costs; see [`Lately`](crate::lately::Lately).
    pub(crate) lately: f64,
    pub(crate) odometers: Odometers,
    pub(crate) engine: Option<EngineStats>,
    /// Requests that waited in the engine when it last told, and were not this router's: such as
    /// another frontend's.
    pub(crate) waiting_of_others: u64,
    /// It does not answer.
    pub(crate) suspect: bool,
    /// The requests that it may get.
    pub(crate) admission: Admission,
    /// Whether no event is missing that could be had. Means nothing for a worker without events.
    pub(crate) caught_up: bool,
    /// What it is believed to hold, if its events don't tell all.
    pub(crate) believed: Option<Believed>,
    /// The count of batches of events when its last one was applied.
    pub(crate) events_at: u64,
}

/// What requests make engines do before their first tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pending {
    /// Prompt tokens to compute.
    pub(crate) tokens: u64,
    /// Cost of the work, in the unit of costs.
    pub(crate) work: f64,
}

impl Worker {
    /// Takes note of what the engine says about itself. Which of its requests are others' shows
    /// only now: it may say nothing more for a second, in which this router's own come and go.
    pub(crate) fn tell(&mut self, stats: EngineStats) {
        let of_others = (stats.running + stats.waiting).saturating_sub(self.requests as u64);
        self.waiting_of_others = stats.waiting.min(of_others);
        self.engine = Some(stats);
    }

    pub(crate) fn knowledge(&self) -> Knowledge {
        match (self.info.publishes_events && !self.caught_up, &self.believed) {
            (true, _) => Knowledge::CatchingUp,
            (false, Some(_)) => Knowledge::Approximate,
            (false, None) => Knowledge::Exact,
        }
    }
}
