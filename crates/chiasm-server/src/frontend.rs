//! The state that all requests share.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, StatusCode};
use chiasm_media::{EncodedMedia, MediaDoor, MediaHeader};
use chiasm_prompt::ChatTemplate;
use chiasm_types::Modality;

use crate::access::{self, ApiKeys, CurrentKeys};
use crate::connections::BulkThreads;
use crate::cors::Cors;
use crate::cpu::{CpuBudget, CpuPool};
use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::layers::Identity;
use crate::metrics::{Metrics, Objectives};
use crate::model::ServedModel;
use crate::owner::TrustedProxies;
use crate::page::{Entries, Page, PageOptions};
use crate::pipeline::{Attempts, Caller, Cause, Displaced, HelperOptions, Helpers, Images, RequestError, Retries};
use crate::root_path::RootPath;
use crate::slots::Slots;
use crate::traces::Traces;

/// Requests that may be in flight before however few workers, if nobody says how many.
const FEWEST_SLOTS: usize = 1024;

/// Bounds on what clients can ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// Time that a request body may take to arrive.
    pub body_timeout: Duration,
    /// Bytes per second of a request body that have to arrive, over any ten seconds; 0 for any.
    pub min_body_rate: u64,
    /// JSON values in one body, beside its messages and prompts.
    pub json_values: usize,
    /// Messages in one body.
    pub messages: usize,
    /// Parts of the content of all messages in one body.
    pub content_parts: usize,
    /// Media items in one prompt.
    pub items_per_prompt: ItemLimits,
    /// Bytes of processed media that are kept for other engines, where they travel in messages; 0 keeps none.
    pub processed_bytes: u64,
    /// Open connections of clients. For more, others whose clients are waited for are closed; if there are none, 1024 wait.
    pub connections: usize,
    /// Time that the head of a connection's next request may take to arrive, counted from when it could.
    pub head_timeout: Duration,
    /// Time after which a connection is closed that takes nothing of what there is to be written.
    pub write_timeout: Duration,
    /// Requests in flight; more are refused with 503. `None` for as many as the workers run at once and as many again, but at least
    /// 1024.
    pub requests: Option<usize>,
    /// The proxies that are believed about whom a request is from, for shares of connections and requests.
    pub trusted_proxies: TrustedProxies,
    /// Threads for CPU-heavy work of usual size. There is one more for short work, and half as many, rounded up, for heavy work.
    pub cpu_threads: usize,
    /// CPU time that one request may ask for, by estimate before the work is done.
    pub request_cost: Duration,
    /// Time from a request's arrival to its first token; `None` for any.
    pub first_token_timeout: Option<Duration>,
    /// Time from a request's arrival to its last token; `None` for any.
    pub request_timeout: Option<Duration>,
    /// The time for which a prompt is refused that was in several engines when they died.
    pub quarantine: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            body_timeout: Duration::from_secs(60),
            min_body_rate: 1024,
            json_values: 100_000,
            messages: 16_384,
            content_parts: 65_536,
            items_per_prompt: ItemLimits::default(),
            processed_bytes: 256 << 20,
            connections: 8192,
            head_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            requests: None,
            trusted_proxies: TrustedProxies::default(),
            // The async threads need a core too.
            cpu_threads: std::thread::available_parallelism().map_or(1, |cores| cores.get() - 1).max(1),
            request_cost: Duration::from_secs(10),
            first_token_timeout: Some(Duration::from_secs(600)),
            request_timeout: Some(Duration::from_secs(3600)),
            quarantine: Duration::from_secs(60),
        }
    }
}

/// The most media items of each modality in one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemLimits(BTreeMap<Modality, usize>);

impl ItemLimits {
    /// The most items of a modality; 0 for one that was not named.
    pub fn of(&self, modality: &Modality) -> usize {
        self.0.get(modality).copied().unwrap_or(0)
    }

    /// Sets the most items of a modality.
    pub fn set(&mut self, modality: Modality, items: usize) {
        self.0.insert(modality, items);
    }
}

impl Default for ItemLimits {
    fn default() -> Self {
        Self(BTreeMap::from([(Modality::Image, 64), (Modality::Video, 16), (Modality::Audio, 64)]))
    }
}

/// The options for the parts of routing that clients see.
#[derive(Clone, Debug)]
pub struct RoutingOptions {
    /// Requests that bear the same value in this header go to the same worker.
    pub session_header: Option<HeaderName>,
    /// The status when all workers are busy.
    pub busy_status: StatusCode,
}

impl Default for RoutingOptions {
    fn default() -> Self {
        Self {
            session_header: Some(HeaderName::from_static("x-session-id")),
            busy_status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// The fields of messages that have reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningFields {
    /// vLLM's name of it.
    pub reasoning: bool,
    /// The older name, which many clients read.
    pub reasoning_content: bool,
}

impl Default for ReasoningFields {
    fn default() -> Self {
        Self { reasoning: true, reasoning_content: true }
    }
}

/// Counts of the process's log: lines that were not written, by cause, and panics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounts {
    /// Too many were waiting.
    pub full: u64,
    /// Whoever should have read them was gone.
    pub unwritten: u64,
    /// Warnings of a kind that had just been written often enough.
    pub repeated: u64,
    /// Panics, on any thread.
    pub panics: u64,
}

/// The frontend: one model, its workers, and what is needed to bring requests to them.
pub struct Frontend {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// Opens media items.
    pub door: MediaDoor,
    /// Plans images and makes their tensors.
    pub images: Arc<Images>,
    /// vLLM's own processors; `None` if there are none.
    pub helpers: Option<Helpers>,
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// Bounds.
    pub limits: Limits,
    /// The parts of routing that clients see.
    pub routing: RoutingOptions,
    /// The keys of clients.
    pub keys: CurrentKeys,
    /// The fields in which clients find reasoning.
    pub reasoning_fields: ReasoningFields,
    /// Every chunk of every stream has its usage so far, and each stream ends with that of all of it.
    pub always_tells_usage: bool,
    /// Pages of which web sites may ask; `None` for none.
    pub cors: Option<Cors>,
    /// The prefix that paths may have; `None` for none.
    pub root_path: Option<RootPath>,
    /// Clients may load and unload LoRA adapters.
    pub adapters_may_change: bool,
    /// The live page; `None` if there is none.
    pub(crate) page: Option<Page>,
    /// Records traces, if any are.
    pub(crate) traces: Option<Traces>,
    /// Requests are passed on as they come: all workers take them so.
    pub(crate) forwards: bool,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Runs CPU-heavy work.
    pub cpu: CpuPool,
    pub(crate) bulk: BulkThreads,
    pub(crate) slots: Arc<Slots>,
    pub(crate) retries: Retries,
    /// Requests that wait for suspect workers.
    pub(crate) displaced: Displaced,
    /// Set when the process is about to end: requests are still taken, but none should be sent.
    draining: AtomicBool,
    /// Asks the log, which is the process's.
    pub(crate) log_counts: Box<dyn Fn() -> LogCounts + Send + Sync>,
    /// Makes numbers of session names that clients can't foresee.
    sessions: RandomState,
}

impl Frontend {
    /// Puts the parts together.
    pub fn new(model: Arc<ServedModel>, door: MediaDoor, fleet: Arc<Fleet>, limits: Limits) -> Self {
        let metrics = fleet.metrics();
        let cpu = CpuPool::new(limits.cpu_threads, &metrics.cpu);
        let budget = door.budget().clone();
        let images = Images::new(model.clone(), cpu.clone(), budget, metrics.clone(), limits.processed_bytes);
        let slots = Slots::new({
            let (fleet, requests) = (fleet.clone(), limits.requests);
            move || requests.unwrap_or_else(|| FEWEST_SLOTS.max(fleet.seats().saturating_mul(2)))
        });
        Self {
            model,
            door: door.with_workers(Arc::new(cpu.clone())),
            images: Arc::new(images),
            helpers: None,
            metrics,
            fleet,
            routing: RoutingOptions::default(),
            keys: CurrentKeys::default(),
            reasoning_fields: ReasoningFields::default(),
            always_tells_usage: false,
            cors: None,
            root_path: None,
            adapters_may_change: false,
            page: None,
            traces: None,
            forwards: false,
            cpu,
            bulk: BulkThreads::new(limits.cpu_threads.div_ceil(2)),
            slots,
            retries: Retries::new(limits.quarantine),
            displaced: Displaced::default(),
            draining: AtomicBool::new(false),
            log_counts: Box::new(LogCounts::default),
            limits,
            sessions: RandomState::new(),
        }
    }

    /// The same frontend with other routing options.
    #[must_use]
    pub fn with_routing(self, routing: RoutingOptions) -> Self {
        Self { routing, ..self }
    }

    /// The same frontend, which answers whoever has one of these keys.
    #[must_use]
    pub fn with_keys(self, keys: ApiKeys) -> Self {
        Self { keys: CurrentKeys::new(keys), ..self }
    }

    /// The same frontend, which tells reasoning in these fields.
    #[must_use]
    pub fn with_reasoning_fields(self, reasoning_fields: ReasoningFields) -> Self {
        Self { reasoning_fields, ..self }
    }

    /// The same frontend, which tells usage in all streams of chats and completions, or in those alone whose clients ask for it.
    #[must_use]
    pub fn with_usage_in_all_streams(self, always_tells_usage: bool) -> Self {
        Self { always_tells_usage, ..self }
    }

    /// The same frontend, which lets pages of these web sites ask.
    #[must_use]
    pub fn with_cors(self, cors: Option<Cors>) -> Self {
        Self { cors, ..self }
    }

    /// The same frontend, whose paths may begin with this.
    #[must_use]
    pub fn with_root_path(self, root_path: Option<RootPath>) -> Self {
        Self { root_path, ..self }
    }

    /// The same frontend, whose clients may load and unload LoRA adapters or not.
    #[must_use]
    pub fn with_adapters_that_change(self, adapters_may_change: bool) -> Self {
        Self { adapters_may_change, ..self }
    }

    /// The same frontend, which passes requests on as they come, to workers that take them so.
    #[must_use]
    pub fn that_forwards(self) -> Self {
        Self { forwards: true, ..self }
    }

    /// The same frontend with a live page at `/ui/`.
    #[must_use]
    pub fn with_page(self, options: PageOptions) -> Self {
        Self { page: Some(Page::new(options)), ..self }
    }

    /// The same frontend, which counts what meets these objectives.
    #[must_use]
    pub fn with_objectives(self, objectives: Objectives) -> Self {
        self.metrics.set_objectives(objectives);
        self
    }

    /// The same frontend, which records traces.
    #[must_use]
    pub fn with_traces(self, traces: Traces) -> Self {
        Self { traces: Some(traces), ..self }
    }

    /// Sends the traces that wait to be sent, for `patience` at most.
    pub async fn finish_traces(&self, patience: Duration) {
        if let Some(traces) = &self.traces {
            traces.finish(patience).await;
        }
    }

    /// Returns `true` if there is a live page.
    pub fn has_page(&self) -> bool {
        self.page.is_some()
    }

    /// The same frontend, which asks vLLM's own processor for what it can't make itself.
    #[must_use]
    pub fn with_helper(self, options: HelperOptions) -> Self {
        let helpers = Helpers::new(options, &self.cpu, self.door.budget(), &self.metrics);
        Self { helpers: Some(helpers), ..self }
    }

    /// Returns `true` if items of this modality are taken at all.
    pub(crate) fn takes(&self, modality: &Modality) -> bool {
        self.helpers.is_some() || (*modality == Modality::Image && self.model.vision.is_some())
    }

    /// Returns `true` if vLLM's own processor has to make an item.
    pub(crate) fn needs_help(&self, item: &EncodedMedia) -> bool {
        let is_native = self.model.vision.is_some() && matches!(item.header, MediaHeader::Image(_));
        self.helpers.is_some() && !is_native
    }

    /// Returns vLLM's processors if a conversation needs them: for items that can't be made here,
    /// or to write all of it.
    pub(crate) async fn helped_with(&self, items: &[EncodedMedia]) -> Result<Option<&Helpers>, RequestError> {
        let Some(helpers) = &self.helpers else { return Ok(None) };
        let is_needed = items.iter().any(|item| self.needs_help(item)) || helpers.writes_conversations().await?;
        Ok(is_needed.then_some(helpers))
    }

    /// Returns `true` if the model's conversations may have a system message at their head only.
    /// vLLM's own code is taken to demand that.
    pub(crate) async fn takes_system_first_alone(&self) -> Result<bool, RequestError> {
        if let Some(helpers) = &self.helpers
            && helpers.writes_conversations().await?
        {
            return Ok(true);
        }
        Ok(self.model.template.as_ref().is_some_and(ChatTemplate::takes_system_first_alone))
    }

    /// The same frontend, which tells in its metrics what the log has counted so far.
    #[must_use]
    pub fn with_log(self, counts: impl Fn() -> LogCounts + Send + Sync + 'static) -> Self {
        Self { log_counts: Box::new(counts), ..self }
    }

    /// Says at `/ready` from now on that requests should go elsewhere.
    pub fn begin_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Returns the caller of a request.
    pub(crate) fn caller(&self, identity: Identity, cpu: CpuBudget, headers: &HeaderMap, entries: Entries) -> Caller {
        let Identity { id, trace, arrived, .. } = identity;
        let session = self.routing.session_header.as_ref().and_then(|name| headers.get(name));
        Caller {
            id,
            trace,
            arrived,
            cpu,
            session: session.map(|name| self.sessions.hash_one(name.as_bytes())),
            credentials: access::credentials(headers).cloned(),
            tried: Attempts::default(),
            entries,
        }
    }

    /// Why a request can't be answered, as it is told to the client.
    pub(crate) fn told(&self, error: RequestError) -> ApiError {
        let is_busy = matches!(error.cause, Cause::Busy(_));
        let told = ApiError::from(error);
        if !is_busy {
            return told;
        }
        self.metrics.all_busy();
        ApiError { status: self.routing.busy_status, ..told }
    }
}
