//! What all requests share.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use chiasm_media::MediaDoor;
use chiasm_types::Modality;
use tokio::sync::Semaphore;

use crate::cpu::CpuPool;
use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::layers::Identity;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::pipeline::{Caller, Cause, Images, RequestError};

/// Bounds on what clients can ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// Time that a request body may take to arrive.
    pub body_timeout: Duration,
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
    /// Open connections of clients; more wait until one is closed.
    pub connections: usize,
    /// Time that the head of a connection's next request may take to arrive, counted from when it could.
    pub head_timeout: Duration,
    /// Requests in flight; more are refused with 503.
    pub requests: usize,
    /// Threads for CPU-heavy work.
    pub cpu_threads: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            body_timeout: Duration::from_secs(60),
            json_values: 100_000,
            messages: 16_384,
            content_parts: 65_536,
            items_per_prompt: ItemLimits::default(),
            processed_bytes: 256 << 20,
            connections: 8192,
            head_timeout: Duration::from_secs(60),
            requests: 1024,
            cpu_threads: std::thread::available_parallelism().map_or(1, usize::from),
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
        Self(BTreeMap::from([(Modality::Image, 64)]))
    }
}

/// What clients see of routing.
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

/// Lines of the log that were not written, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DroppedLines {
    /// Too many were waiting.
    pub full: u64,
    /// Whoever should have read them was gone.
    pub unwritten: u64,
    /// Warnings of a kind that had just been written often enough.
    pub repeated: u64,
}

/// The frontend: one model, its workers, and what is needed to bring requests to them.
pub struct Frontend {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// Opens media items.
    pub door: MediaDoor,
    /// Plans images and makes their tensors.
    pub images: Arc<Images>,
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// Bounds.
    pub limits: Limits,
    /// What clients see of routing.
    pub routing: RoutingOptions,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Runs CPU-heavy work.
    pub cpu: CpuPool,
    pub(crate) slots: Arc<Semaphore>,
    /// Asks the log, which is the process's.
    pub(crate) dropped_lines: Box<dyn Fn() -> DroppedLines + Send + Sync>,
    /// Makes numbers of session names that clients can't foresee.
    sessions: RandomState,
}

impl Frontend {
    /// Puts the parts together.
    pub fn new(model: Arc<ServedModel>, door: MediaDoor, fleet: Arc<Fleet>, limits: Limits) -> Self {
        let (cpu, metrics) = (CpuPool::new(limits.cpu_threads), fleet.metrics());
        let budget = door.budget().clone();
        let images = Images::new(model.clone(), cpu.clone(), budget, metrics.clone(), limits.processed_bytes);
        Self {
            model,
            door,
            images: Arc::new(images),
            metrics,
            fleet,
            routing: RoutingOptions::default(),
            cpu,
            slots: Arc::new(Semaphore::new(limits.requests.max(1))),
            dropped_lines: Box::new(DroppedLines::default),
            limits,
            sessions: RandomState::new(),
        }
    }

    /// The same frontend with other routing options.
    #[must_use]
    pub fn with_routing(self, routing: RoutingOptions) -> Self {
        Self { routing, ..self }
    }

    /// The same frontend, which tells in its metrics how many lines the log has dropped so far.
    #[must_use]
    pub fn with_log(self, dropped: impl Fn() -> DroppedLines + Send + Sync + 'static) -> Self {
        Self { dropped_lines: Box::new(dropped), ..self }
    }

    /// Who asks.
    pub(crate) fn caller(&self, identity: Identity, headers: &HeaderMap) -> Caller {
        let Identity { id, trace } = identity;
        let session = self.routing.session_header.as_ref().and_then(|name| headers.get(name));
        Caller {
            id,
            trace,
            session: session.map(|name| self.sessions.hash_one(name.as_bytes())),
            credentials: headers.get(header::AUTHORIZATION).cloned(),
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
