//! The state of the connection to one engine, which the client, its streams and its tasks have in
//! common.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use bytes::Bytes;
use tokio::sync::{mpsc, watch};

use super::pulse::Pulse;
use super::registry::Registry;
use crate::error::{DeathCause, EngineError};
use crate::wire::output::ReceivedOutput;
use crate::wire::{EngineCoreOutputs, EngineCoreRequest, SchedulerStats, request};

/// What is to be sent to the engine, without its identity.
pub(super) enum Outgoing {
    /// Encoded by the task that sends it: its place in the queue is what has to be decided under
    /// the lock of [`Delivery`](super::delivery::Delivery), and encoding takes much longer than
    /// that.
    Add(Box<EngineCoreRequest>),
    /// Encoded already.
    Frames(Vec<Bytes>),
}

/// Is called with the engine's statistics, in the task that receives them.
pub(super) type StatsSink = Box<dyn Fn(&SchedulerStats) + Send + Sync>;

/// State of the connection to one engine.
pub(super) struct Connection {
    registry: Mutex<Registry>,
    /// Messages for the engine. Unbounded, because streams abort in `drop`; what it holds is
    /// bounded by the number of requests, as each is one message.
    outbox: mpsc::UnboundedSender<Outgoing>,
    stats: watch::Sender<SchedulerStats>,
    /// Called in place: a task that waits for the statistics would wake another thread at every
    /// step of the engine.
    stats_sink: RwLock<Option<StatsSink>>,
    dead: watch::Sender<bool>,
    pulse: Pulse,
    /// The engine was ready for a frontend before this one, and may still have requests of that.
    adopted: bool,
}

impl Connection {
    /// A connection without requests, and the messages that it queues, which a task has to send.
    pub(super) fn new(adopted: bool) -> (Arc<Self>, mpsc::UnboundedReceiver<Outgoing>) {
        let (outbox, messages) = mpsc::unbounded_channel();
        let connection = Self {
            registry: Mutex::default(),
            outbox,
            stats: watch::Sender::default(),
            stats_sink: RwLock::default(),
            dead: watch::Sender::new(false),
            pulse: Pulse::new(),
            adopted,
        };
        (Arc::new(connection), messages)
    }

    /// The registry is never left half-changed, so a panic elsewhere does not make it unusable.
    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message for the engine.
    pub(super) fn send(&self, message: Outgoing) -> Result<(), EngineError> {
        self.outbox.send(message).map_err(|_| EngineError::Dead { cause: self.cause() })
    }

    /// Aborts a request unless it has ended.
    pub(super) fn abort(&self, request_id: &str) {
        if self.registry().close(request_id) {
            // A dead engine needs no abort.
            let _ =
                self.outbox.send(Outgoing::Frames(request::encode_abort(&[request_id.to_owned()])));
        }
    }

    /// Whether the engine answers.
    pub(super) fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    pub(super) fn dispatch(&self, mut outputs: EngineCoreOutputs<ReceivedOutput>) {
        if let Some(stats) = outputs.scheduler_stats.take() {
            if let Some(sink) = &*self.stats_sink.read().unwrap_or_else(PoisonError::into_inner) {
                sink(&stats);
            }
            self.stats.send_replace(stats);
        }
        let nobodys = self.registry().dispatch(outputs, self.adopted);
        if !nobodys.is_empty() {
            let _ = self.outbox.send(Outgoing::Frames(request::encode_abort(&nobodys)));
        }
    }

    pub(super) fn is_adopted(&self) -> bool {
        self.adopted
    }

    pub(super) fn stats(&self) -> watch::Receiver<SchedulerStats> {
        self.stats.subscribe()
    }

    /// Hands the statistics of every step to `sink` from now on.
    pub(super) fn follow_stats(&self, sink: StatsSink) {
        *self.stats_sink.write().unwrap_or_else(PoisonError::into_inner) = Some(sink);
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

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("open_requests", &self.registry().open_requests())
            .finish_non_exhaustive()
    }
}
