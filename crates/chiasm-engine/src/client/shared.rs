//! What the client, its streams and its tasks have in common.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{mpsc, watch};

use super::registry::Registry;
use crate::error::{DeathCause, EngineError};
use crate::wire::{EngineCoreOutputs, SchedulerStats, request};

/// State of the connection to one engine.
pub(super) struct Shared {
    registry: Mutex<Registry>,
    /// Messages for the engine, without its identity. Unbounded, because streams abort in `drop`; what it holds
    /// is bounded by the number of requests, as each is one message.
    outbox: mpsc::UnboundedSender<Vec<Bytes>>,
    stats: watch::Sender<SchedulerStats>,
    dead: watch::Sender<bool>,
}

impl Shared {
    /// With the other end of its outbox.
    pub(super) fn new() -> (Arc<Self>, mpsc::UnboundedReceiver<Vec<Bytes>>) {
        let (outbox, messages) = mpsc::unbounded_channel();
        let shared = Self {
            registry: Mutex::default(),
            outbox,
            stats: watch::Sender::default(),
            dead: watch::Sender::new(false),
        };
        (Arc::new(shared), messages)
    }

    /// The registry is never left half-changed, so a panic elsewhere does not make it unusable.
    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message for the engine.
    pub(super) fn send(&self, message: Vec<Bytes>) -> Result<(), EngineError> {
        self.outbox.send(message).map_err(|_| EngineError::Dead { cause: self.cause() })
    }

    /// Aborts a request unless it has ended.
    pub(super) fn abort(&self, request_id: &str) {
        if self.registry().close(request_id) {
            // A dead engine needs no abort.
            let _ = self.outbox.send(request::encode_abort(&[request_id.to_owned()]));
        }
    }

    pub(super) fn dispatch(&self, mut outputs: EngineCoreOutputs) {
        if let Some(stats) = outputs.scheduler_stats.take() {
            self.stats.send_replace(stats);
        }
        self.registry().dispatch(outputs);
    }

    pub(super) fn stats(&self) -> watch::Receiver<SchedulerStats> {
        self.stats.subscribe()
    }

    /// Ends every stream and call, and stops the tasks. Only the first cause counts.
    pub(super) fn die(&self, cause: DeathCause) {
        if self.registry().die(cause) {
            self.dead.send_replace(true);
        }
    }

    /// How the engine went; `Closed` while it lives.
    pub(super) fn cause(&self) -> DeathCause {
        self.registry().death().cloned().unwrap_or(DeathCause::Closed)
    }

    /// Returns once the engine is gone.
    pub(super) async fn gone(&self) -> DeathCause {
        // The sender is `self`, so it can't be gone.
        let _ = self.dead.subscribe().wait_for(|&dead| dead).await;
        self.cause()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("open_requests", &self.registry().open_requests()).finish_non_exhaustive()
    }
}
