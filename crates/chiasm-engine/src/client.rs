//! The frontend's end of the connection to one engine.

mod adoption;
mod connection;
mod delivery;
mod handshake;
mod probe;
mod pulse;
mod registry;
mod stream;
mod tasks;
mod validate;

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::inbox::MOST_UNREAD_BYTES;
use chiasm_backend::unread::{Unread, UnreadJob};
use chiasm_transfer::Arena;
use tokio::sync::watch;

pub use self::delivery::{AttachError, Delivered, Plugin};
pub use self::handshake::PendingEngine;
pub use self::stream::OutputStream;

use self::connection::{Connection, Outgoing};
use self::delivery::Delivery;
use crate::endpoints::EngineEndpoints;
use crate::error::{DeathCause, EngineError};
use crate::wire::{
    EngineCoreRequest, EngineReady, FailureMessage, SchedulerStats, Utility, Value, request,
};

/// What a client has to know about its engine beyond what that reports.
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    /// The engine's data-parallel rank: 0 for an engine on its own.
    pub rank: u16,
    /// Refuse versions of vLLM that are newer than the tested one.
    pub strict_version: bool,
    /// Size of the model's vocabulary (embedding rows), to refuse token ids outside.
    pub vocab_size: Option<u32>,
    /// Tensors whose rows another one counts. A request where the two differ would kill the engine,
    /// so it is refused.
    pub counted_rows: Vec<CountedRows>,
    /// Capacity of the engine's receiver cache in bytes, exactly as it was started with; `None`
    /// when it has none or that is not known. Then every media item is sent with its data. Assuming
    /// a cache where there is none kills the engine.
    pub receiver_cache_bytes: Option<u64>,
    /// How long the engine may take to become ready.
    pub ready_timeout: Option<Duration>,
    /// How long the engine may say nothing before it is asked for a sign of life; `None` never
    /// asks.
    pub ask_after: Option<Duration>,
}

/// Two tensors of an item that belong together: the first has as many rows as the product of the
/// second's three extents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CountedRows {
    /// The tensor with the rows.
    pub rows_of: Cow<'static, str>,
    /// The tensor of three integers, along time, height and width.
    pub grid: Cow<'static, str>,
}

/// One engine, from its handshake to its death. Clones share the connection; it closes with the
/// last one.
///
/// A client belongs to one start of an engine. When that is gone every open stream ends with
/// [`EngineError::Dead`], and so does everything after. For its next start bind a new client, which
/// can be on the same TCP addresses. An engine that survives its frontend is taken over by
/// [`PendingEngine::or_return_of`].
///
/// The engine counts as gone when it says so, when its connection closes, when it can't be sent to,
/// when it says what can't be understood, or when [`mark_dead`](Self::mark_dead) is called.
#[derive(Clone, Debug)]
pub struct EngineClient {
    handle: Arc<ClientHandle>,
}

/// Closes the connection on drop.
#[derive(Debug)]
struct ClientHandle {
    connection: Arc<Connection>,
    report: Bytes,
    ready: EngineReady,
    options: ClientOptions,
    addresses: EngineEndpoints,
    peer: Option<IpAddr>,
    delivery: Delivery,
}

impl Drop for ClientHandle {
    fn drop(&mut self) {
        self.connection.die(DeathCause::Closed);
    }
}

impl EngineClient {
    /// Listens for an engine.
    pub async fn bind(
        endpoints: EngineEndpoints,
        options: ClientOptions,
    ) -> Result<PendingEngine, EngineError> {
        PendingEngine::bind(endpoints, options).await
    }

    /// What the engine became after its start.
    pub fn info(&self) -> &EngineReady {
        &self.handle.ready
    }

    /// What the engine said when it became ready, which it says only once. With it a frontend that
    /// is started again can take the engine over: see [`PendingEngine::or_return_of`].
    pub fn report(&self) -> &Bytes {
        &self.handle.report
    }

    /// Whether the engine was ready for a frontend before this one and has come back from it.
    pub fn is_adopted(&self) -> bool {
        self.handle.connection.is_adopted()
    }

    /// The addresses as bound.
    pub fn endpoints(&self) -> &EngineEndpoints {
        &self.handle.addresses
    }

    /// Sends a request.
    ///
    /// Its id must not be in use, and should not be used again: outputs of an aborted request may
    /// still be under way when another with its id starts. Nothing is sent when the request would
    /// break the engine; the error then names the field.
    ///
    /// Media items that the engine holds are sent without their data, and may be given without.
    /// Others that are given without make [`EngineError::NeedsData`]: nothing was sent, try again
    /// with their data.
    pub fn submit(&self, request: EngineCoreRequest) -> Result<OutputStream, EngineError> {
        self.submit_one_of(1, &Unread::of_process().job(), request)
    }

    /// Sends one of so many requests that have one reader, who leaves no more of all their outputs
    /// unread than of one.
    pub(crate) fn submit_one_of(
        &self,
        count: usize,
        job: &UnreadJob,
        mut request: EngineCoreRequest,
    ) -> Result<OutputStream, EngineError> {
        validate::check(&request, &self.handle.ready, &self.handle.options)?;
        let connection = &self.handle.connection;
        // Held until the request is queued: the engine must see requests in the order in which the
        // mirror does. The task that sends encodes it.
        let mut order = self.handle.delivery.order();
        let keys = order.missing(&request.mm_features);
        if !keys.is_empty() {
            return Err(EngineError::NeedsData { keys });
        }
        let arrivals = connection.registry().open(
            &request.request_id,
            MOST_UNREAD_BYTES / count.max(1),
            job,
        )?;
        let delivered = order.hand_over(&mut request.mm_features);
        let stream =
            OutputStream::new(request.request_id.clone(), arrivals, connection.clone(), delivered);
        connection.send(Outgoing::Add(Box::new(request)))?;
        Ok(stream)
    }

    /// Whether the engine's receiver cache holds a media item, so that it can be sent without its
    /// data.
    pub fn holds(&self, mm_hash: &str) -> bool {
        self.handle.delivery.order().holds(mm_hash)
    }

    /// Takes note that the engine does not hold these media items after all.
    pub fn forget_media<'a>(&self, mm_hashes: impl IntoIterator<Item = &'a str>) {
        let mut order = self.handle.delivery.order();
        mm_hashes.into_iter().for_each(|mm_hash| order.forget(mm_hash));
    }

    /// Makes shared memory for so many bytes of tensors and lets the engine open it. Tensors in its
    /// slots are then sent as handles.
    ///
    /// # Errors
    /// [`AttachError`] says why not; everything is sent in messages then.
    pub async fn attach_arena(&self, bytes: u64, timeout: Duration) -> Result<Plugin, AttachError> {
        delivery::attach(self, bytes, timeout).await
    }

    /// The shared memory, once the engine has opened it.
    pub fn arena(&self) -> Option<&Arena> {
        self.handle.delivery.arena()
    }

    /// Calls a method of the engine, e.g. `reset_mm_cache`. The engine answers between two steps.
    pub async fn utility(
        &self,
        method: &str,
        args: Vec<Value>,
        timeout: Duration,
    ) -> Result<Value, EngineError> {
        let connection = &self.handle.connection;
        let (call_id, answer) = connection.registry().call()?;
        let call = Utility { client_index: 0, call_id, method: method.to_owned(), args };
        connection.send(Outgoing::Frames(request::encode_utility(&call)))?;
        match tokio::time::timeout(timeout, answer).await {
            Ok(Ok(Ok(result))) => Ok(result),
            Ok(Ok(Err(FailureMessage(message)))) => {
                Err(EngineError::Utility { method: method.to_owned(), message })
            }
            Ok(Err(_)) => Err(EngineError::Dead { cause: connection.cause() }),
            Err(_) => {
                connection.registry().hang_up(call_id);
                Err(EngineError::UtilityTimeout { method: method.to_owned(), after: timeout })
            }
        }
    }

    /// State of the engine's scheduler after its last step; all zero before the first.
    pub fn stats(&self) -> watch::Receiver<SchedulerStats> {
        self.handle.connection.stats()
    }

    /// Calls `sink` with the state of the engine's scheduler after each of its steps, in the task
    /// that receives it: so it must be quick, and must not call this client. A second call replaces
    /// the first sink.
    pub fn follow_stats(&self, sink: impl Fn(&SchedulerStats) + Send + Sync + 'static) {
        self.handle.connection.follow_stats(Box::new(sink));
    }

    /// The address that the engine's requests are sent to: that of the machine where it runs, as
    /// far as this one sees. `None` over Unix sockets.
    pub fn peer(&self) -> Option<IpAddr> {
        self.handle.peer
    }

    /// Number of requests whose streams are open.
    pub fn open_requests(&self) -> usize {
        self.handle.connection.registry().open_requests()
    }

    /// Whether the engine is not known to be gone.
    pub fn is_alive(&self) -> bool {
        self.handle.connection.registry().death().is_none()
    }

    /// How long the engine has said nothing since it was asked for a sign of life; zero while it
    /// answers. Engines answer between two steps, so a long step is a silence too.
    pub fn silent_for(&self) -> Duration {
        self.handle.connection.pulse().silent_for()
    }

    /// Returns once the engine is gone, and how.
    pub async fn closed(&self) -> DeathCause {
        self.handle.connection.gone().await
    }

    /// Declares the engine gone, e.g. because its process has ended. Streams end with this cause if
    /// it is the first one known.
    pub fn mark_dead(&self, cause: DeathCause) {
        self.handle.connection.die(cause);
    }
}
