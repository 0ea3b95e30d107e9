//! What all requests share.

use std::sync::Arc;
use std::time::Duration;

use chiasm_media::MediaDoor;
use tokio::sync::Semaphore;

use crate::cpu::CpuPool;
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::model::ServedModel;

/// Bounds on what clients can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// Time that a request body may take to arrive.
    pub body_timeout: Duration,
    /// Images in one request.
    pub images_per_request: usize,
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
            images_per_request: 64,
            requests: 1024,
            cpu_threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// The frontend: one model, its workers, and what is needed to bring requests to them.
pub struct Frontend {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// Opens media items.
    pub door: MediaDoor,
    /// The engines.
    pub fleet: Arc<Fleet>,
    /// Bounds.
    pub limits: Limits,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Runs CPU-heavy work.
    pub cpu: CpuPool,
    pub(crate) slots: Arc<Semaphore>,
}

impl Frontend {
    /// Puts the parts together.
    pub fn new(model: Arc<ServedModel>, door: MediaDoor, fleet: Arc<Fleet>, limits: Limits) -> Self {
        Self {
            model,
            door,
            metrics: fleet.metrics(),
            fleet,
            limits,
            cpu: CpuPool::new(limits.cpu_threads),
            slots: Arc::new(Semaphore::new(limits.requests.max(1))),
        }
    }
}
