//! The state of the connection to one engine, shared by the client, its streams and its tasks.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use bytes::Bytes;
use tokio::sync::{mpsc, watch};

use super::liveness::Liveness;
use super::registry::Registry;
use crate::error::{DeathCause, EngineError};
use crate::group::Generation;
use crate::wire::output::ReceivedOutput;
use crate::wire::{EngineCoreOutputs, EngineCoreRequest, SchedulerStats, request};

/// A message to the engine, without its identity.
pub(super) enum Outgoing {
    /// A request that the sending task encodes. Only its position in the queue must be fixed under
    /// the lock of [`Delivery`](super::delivery::Delivery); encoding takes much longer.
    Add(Box<EngineCoreRequest>),
    /// An encoded message.
    Frames(Vec<Bytes>),
}

/// A callback for the engine's statistics, which runs in the receiving task.
pub(super) type StatsSink = Box<dyn Fn(&SchedulerStats) + Send + Sync>;

/// The state of the connection to one engine.
pub(super) struct Connection {
    registry: Mutex<Registry>,
    /// The queue of messages to the engine. It is unbounded because streams abort in `drop`; the
    /// number of requests bounds it, as each is one message.
    outbox: mpsc::UnboundedSender<Outgoing>,
    stats: watch::Sender<SchedulerStats>,
    /// Called in the receiving task: a task that waits for the statistics would wake another thread
    /// at every step of the engine.
    stats_sink: RwLock<Option<StatsSink>>,
    dead: watch::Sender<bool>,
    liveness: Liveness,
    /// `true` if the engine was taken over and may still have requests of its earlier frontend.
    adopted: bool,
    /// The engine's rank and the generation of its group, if it is in one.
    membership: Option<(u16, Arc<Generation>)>,
}

impl Connection {
    /// Creates a connection without requests. Returns it with its queue of messages, which a task
    /// must send. `membership` is the engine's rank and the generation of its group.
    pub(super) fn new(
        adopted: bool,
        membership: Option<(u16, Arc<Generation>)>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Outgoing>) {
        let (outbox, messages) = mpsc::unbounded_channel();
        let connection = Self {
            registry: Mutex::default(),
            outbox,
            stats: watch::Sender::default(),
            stats_sink: RwLock::default(),
            dead: watch::Sender::new(false),
            liveness: Liveness::new(),
            adopted,
            membership,
        };
        let connection = Arc::new(connection);
        if let Some((rank, generation)) = &connection.membership {
            let member = Arc::downgrade(&connection);
            let end = move |reason: &Arc<str>| {
                if let Some(connection) = member.upgrade() {
                    connection.mark_dead(DeathCause::Group(reason.clone()));
                }
            };
            generation.add_connection(*rank, Box::new(end));
        }
        (connection, messages)
    }

    /// Locks the registry. No panic leaves it half-changed, so a poisoned lock is usable.
    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message to the engine.
    pub(super) fn send(&self, message: Outgoing) -> Result<(), EngineError> {
        self.outbox.send(message).map_err(|_| EngineError::Dead { cause: self.cause() })
    }

    /// Aborts a request unless it has ended.
    pub(super) fn abort(&self, request_id: &str) {
        if self.registry().close_stream(request_id) {
            // Sending fails only if the engine is dead, which then needs no abort.
            let _ =
                self.outbox.send(Outgoing::Frames(request::encode_abort(&[request_id.to_owned()])));
        }
    }

    /// Returns the state of the engine's probe.
    pub(super) fn liveness(&self) -> &Liveness {
        &self.liveness
    }

    /// Passes the outputs of one step to their streams and calls, and aborts requests without a
    /// reader.
    pub(super) fn dispatch(&self, mut outputs: EngineCoreOutputs<ReceivedOutput>) {
        if let Some(stats) = outputs.scheduler_stats.take() {
            if let Some(sink) = &*self.stats_sink.read().unwrap_or_else(PoisonError::into_inner) {
                sink(&stats);
            }
            self.stats.send_replace(stats);
        }
        let to_abort = self.registry().dispatch(outputs, self.adopted);
        if !to_abort.is_empty() {
            let _ = self.outbox.send(Outgoing::Frames(request::encode_abort(&to_abort)));
        }
    }

    pub(super) fn is_adopted(&self) -> bool {
        self.adopted
    }

    pub(super) fn stats(&self) -> watch::Receiver<SchedulerStats> {
        self.stats.subscribe()
    }

    /// Calls `sink` with the statistics of every later step.
    pub(super) fn follow_stats(&self, sink: StatsSink) {
        *self.stats_sink.write().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    }

    /// Ends all streams and calls, and stops the tasks. Only the first cause counts.
    ///
    /// The connections to the other engines of a group end first, so that no request moves from one
    /// to another of them.
    pub(super) fn mark_dead(&self, cause: DeathCause) {
        if let Some((rank, generation)) = &self.membership {
            generation.dissolve(*rank, &cause.first_line());
        }
        if self.registry().mark_dead(cause) {
            self.dead.send_replace(true);
        }
    }

    /// Returns the cause of the engine's death; `Closed` while it is alive.
    pub(super) fn cause(&self) -> DeathCause {
        self.registry().death().cloned().unwrap_or(DeathCause::Closed)
    }

    /// Waits until the engine is dead and returns the cause.
    pub(super) async fn closed(&self) -> DeathCause {
        // `self` owns the sender, so waiting can't fail.
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
