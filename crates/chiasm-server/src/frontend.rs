//! What all requests share.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use chiasm_media::MediaDoor;
use chiasm_router::RouteError;
use tokio::sync::Semaphore;

use crate::cpu::CpuPool;
use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::pipeline::{Caller, Plans, ProcessedImages};

/// Bounds on what clients can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// Time that a request body may take to arrive.
    pub body_timeout: Duration,
    /// Images in one prompt.
    pub images_per_prompt: usize,
    /// Bytes of processed pixels that are kept for other engines, where they travel in messages; 0 keeps none.
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
            images_per_prompt: 64,
            processed_bytes: 256 << 20,
            connections: 8192,
            head_timeout: Duration::from_secs(60),
            requests: 1024,
            cpu_threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
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

/// The frontend: one model, its workers, and what is needed to bring requests to them.
pub struct Frontend {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// Opens media items.
    pub door: MediaDoor,
    /// Layouts of images that were seen before.
    pub plans: Plans,
    /// Pixels of images that were seen before.
    pub processed: ProcessedImages,
    /// The engines.
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
    /// Makes numbers of session names that clients can't foresee.
    sessions: RandomState,
}

impl Frontend {
    /// Puts the parts together.
    pub fn new(model: Arc<ServedModel>, door: MediaDoor, fleet: Arc<Fleet>, limits: Limits) -> Self {
        Self {
            model,
            door,
            plans: Plans::default(),
            processed: ProcessedImages::new(limits.processed_bytes),
            metrics: fleet.metrics(),
            fleet,
            limits,
            routing: RoutingOptions::default(),
            cpu: CpuPool::new(limits.cpu_threads),
            slots: Arc::new(Semaphore::new(limits.requests.max(1))),
            sessions: RandomState::new(),
        }
    }

    /// With other routing options.
    #[must_use]
    pub fn with_routing(self, routing: RoutingOptions) -> Self {
        Self { routing, ..self }
    }

    /// Who asks.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Caller {
        let session = self.routing.session_header.as_ref().and_then(|name| headers.get(name));
        Caller {
            session: session.map(|name| self.sessions.hash_one(name.as_bytes())),
            credentials: headers.get(header::AUTHORIZATION).cloned(),
        }
    }

    /// Why no worker was picked, as it is told to the client.
    pub(crate) fn not_routed(&self, error: RouteError) -> ApiError {
        if let RouteError::Busy(_) = error {
            self.metrics.all_busy();
            return ApiError { status: self.routing.busy_status, ..ApiError::busy(error.to_string()) };
        }
        ApiError::unavailable(error.to_string())
    }
}
