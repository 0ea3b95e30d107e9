//! The state that all requests share.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderName, StatusCode};
use chiasm_api::openai::{BodyLimits, ReasoningFields};
use chiasm_pipeline::cpu::CpuBudget;
use chiasm_pipeline::{Attempts, Caller, Cause, Entries, Pipeline, RequestError};

use crate::access::{self, ApiKeys, CurrentKeys};
use crate::connections::BulkThreads;
use crate::cors::Cors;
use crate::error::HttpError;
use crate::layers::Identity;
use crate::metrics::Metrics;
use crate::page::Page;
use crate::proxies::TrustedProxies;
use crate::root_path::RootPath;
use crate::slots::Slots;
use crate::traces::Traces;

/// The bounds on connections and requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// The time that a request body may take to arrive.
    pub body_timeout: Duration,
    /// The least bytes per second of a request body, over any ten seconds; 0 for any rate.
    pub min_body_rate: u64,
    /// Open connections of clients. A connection beyond them takes the place of one whose client is
    /// waited for; if there is none, it waits, with at most 1024 others.
    pub connections: usize,
    /// The time that the head of a connection's next request may take to arrive, counted from when
    /// it could.
    pub head_timeout: Duration,
    /// The time after which a connection is closed whose client reads nothing of what waits for it.
    pub write_timeout: Duration,
    /// The proxies that are believed about the address that a request is from, for shares of
    /// connections and requests.
    pub trusted_proxies: TrustedProxies,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            body_timeout: Duration::from_secs(60),
            min_body_rate: 1024,
            connections: 8192,
            head_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            trusted_proxies: TrustedProxies::default(),
        }
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

/// The HTTP server's state: the pipeline, and all that stands between it and clients.
pub struct Frontend {
    /// The way of requests to engines.
    pub pipeline: Arc<Pipeline>,
    /// The bounds on connections and requests.
    pub(crate) http_limits: HttpLimits,
    /// The bounds on the content of a request body.
    pub(crate) body_limits: BodyLimits,
    /// The parts of routing that clients see.
    pub(crate) routing: RoutingOptions,
    /// The keys of clients.
    pub keys: CurrentKeys,
    /// The fields in which clients find reasoning.
    pub(crate) reasoning_fields: ReasoningFields,
    /// Every chunk of every stream has its usage so far, and each stream ends with that of all of it.
    pub(crate) always_tells_usage: bool,
    /// The web sites whose pages may send requests; `None` for none.
    pub(crate) cors: Option<Cors>,
    /// The prefix that paths may have; `None` for none.
    pub(crate) root_path: Option<RootPath>,
    /// Clients may load and unload LoRA adapters.
    pub(crate) adapters_may_change: bool,
    /// The live page; `None` if there is none.
    pub(crate) page: Option<Arc<Page>>,
    /// Records traces, if any are.
    pub(crate) traces: Option<Traces>,
    /// Requests are passed on as they come: all workers take them so.
    pub(crate) forwards: bool,
    /// Counts of requests and connections.
    pub(crate) metrics: Metrics,
    pub(crate) bulk: BulkThreads,
    pub(crate) slots: Arc<Slots>,
    /// Set when the process is about to end: requests are still taken, but none should be sent.
    draining: AtomicBool,
    /// Asks the log, which is the process's.
    pub(crate) log_counts: Box<dyn Fn() -> LogCounts + Send + Sync>,
    /// Makes numbers of session names that clients can't foresee.
    sessions: RandomState,
}

impl Frontend {
    /// Creates a server before a pipeline.
    pub fn new(pipeline: Arc<Pipeline>, http_limits: HttpLimits, body_limits: BodyLimits) -> Self {
        let slots = Slots::new({
            let pipeline = pipeline.clone();
            move || pipeline.in_flight_limit()
        });
        Self {
            metrics: Metrics::new(&pipeline),
            http_limits,
            body_limits,
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
            bulk: BulkThreads::new(pipeline.limits.cpu_threads.div_ceil(2)),
            slots,
            draining: AtomicBool::new(false),
            log_counts: Box::new(LogCounts::default),
            sessions: RandomState::new(),
            pipeline,
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

    /// The same server with a live page at `/ui/`, which has to be the observer of the pipeline, too.
    #[must_use]
    pub fn with_page(self, page: Option<Arc<Page>>) -> Self {
        Self { page, ..self }
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
            credentials: access::credentials(headers).map(|key| Bytes::copy_from_slice(key.as_bytes())),
            tried: Attempts::default(),
            entries,
        }
    }

    /// Why a request can't be answered, as it is told to the client.
    pub(crate) fn told(&self, error: RequestError) -> HttpError {
        let is_busy = matches!(error.cause, Cause::Busy(_));
        let error = HttpError::from(error);
        if !is_busy {
            return error;
        }
        self.metrics.all_busy();
        error.with_status(self.routing.busy_status)
    }
}
