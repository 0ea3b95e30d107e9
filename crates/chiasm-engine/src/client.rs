//! The frontend's side of the connection to one engine.

mod adoption;
mod connection;
mod delivery;
mod handshake;
mod liveness;
mod probe;
mod registry;
mod stream;
mod tasks;
mod validate;

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::inbox::MAX_UNREAD_BYTES_PER_JOB;
use chiasm_backend::unread::{UnreadBudget, UnreadShare};
use chiasm_transfer::Arena;
use tokio::sync::watch;

pub use self::delivery::{AttachError, ItemDelivery, Plugin};
pub use self::handshake::PendingEngine;
pub(crate) use self::handshake::SharedHandshake;
pub use self::stream::OutputStream;

use self::connection::{Connection, Outgoing};
use self::delivery::Delivery;
use crate::endpoints::EngineEndpoints;
use crate::error::{DeathCause, EngineError};
use crate::wire::{
    EngineCoreRequest, EngineReady, FailureMessage, SchedulerStats, Utility, Value, request,
};

/// The settings of a client, and the properties of its engine that the engine does not report.
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    /// The engine's data-parallel rank; 0 without data parallelism.
    pub rank: u16,
    /// Refuses versions of vLLM that are newer than the tested ones.
    pub strict_version: bool,
    /// The size of the model's vocabulary (embedding rows). Other token ids are refused.
    pub vocab_size: Option<u32>,
    /// Pairs of tensors whose sizes must agree. A mismatch would kill the engine, so the request is
    /// refused.
    pub counted_rows: Vec<CountedRows>,
    /// The exact capacity of the engine's receiver cache in bytes; `None` if it has none or the
    /// capacity is unknown, and then every media item is sent with its data. Assuming a cache for
    /// an engine that has none kills it.
    pub receiver_cache_bytes: Option<u64>,
    /// The time within which the engine must become ready.
    pub ready_timeout: Option<Duration>,
    /// The silence after which the engine is probed; `None` for no probes.
    pub probe_after: Option<Duration>,
}

/// Two tensors of an item whose sizes must agree: the first has as many rows as the product of the
/// second's three values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CountedRows {
    /// The name of the tensor with the rows.
    pub rows_of: Cow<'static, str>,
    /// The name of the tensor of three integers: time, height and width.
    pub grid: Cow<'static, str>,
}

/// One engine, from its handshake to its death. Clones share the connection, which closes when the
/// last one is dropped.
///
/// A client belongs to one start of an engine. When the engine dies, all open streams and all later
/// calls end with [`EngineError::Dead`]. Bind a new client for the engine's next start; it can use
/// the same TCP addresses. [`PendingEngine::or_adopt`] takes over an engine that survived its
/// frontend.
///
/// The engine counts as dead when it reports a fatal error, its connection closes, sending to it
/// fails or its message can't be decoded, or after [`mark_dead`](Self::mark_dead).
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
        self.connection.mark_dead(DeathCause::Closed);
    }
}

impl EngineClient {
    /// Binds the sockets for an engine.
    ///
    /// # Errors
    /// [`EngineError::Bind`]: the client can't listen on an address.
    pub async fn bind(
        endpoints: EngineEndpoints,
        options: ClientOptions,
    ) -> Result<PendingEngine, EngineError> {
        PendingEngine::bind(endpoints, options, None).await
    }

    /// Binds the sockets for an engine like [`bind`](Self::bind), but takes the handshake socket
    /// from `shared` if that is open, and leaves it open there. All callers with one `shared` pass
    /// the same handshake address, one after the other.
    pub(crate) async fn bind_shared(
        endpoints: EngineEndpoints,
        options: ClientOptions,
        shared: Option<&SharedHandshake>,
    ) -> Result<PendingEngine, EngineError> {
        PendingEngine::bind(endpoints, options, shared).await
    }

    /// Returns the properties that the engine reported when it became ready.
    pub fn info(&self) -> &EngineReady {
        &self.handle.ready
    }

    /// Returns the encoded ready report, which the engine sends only once. A restarted frontend
    /// needs it to take over the engine: see [`PendingEngine::or_adopt`].
    pub fn report(&self) -> &Bytes {
        &self.handle.report
    }

    /// Returns `true` if the engine was taken over from an earlier frontend.
    pub fn is_adopted(&self) -> bool {
        self.handle.connection.is_adopted()
    }

    /// Returns the bound addresses.
    pub fn endpoints(&self) -> &EngineEndpoints {
        &self.handle.addresses
    }

    /// Sends a request.
    ///
    /// Its id must not be in use and should be new. Outputs of an aborted request may still arrive
    /// when another request with the same id starts.
    ///
    /// Media items that the engine holds are sent without their data, and need none.
    ///
    /// # Errors
    /// [`EngineError::InvalidRequest`] if the request would break the engine,
    /// [`EngineError::NeedsData`] if items without data are not in the receiver cache,
    /// [`EngineError::NotSent`] if the engine is dead. Nothing was sent.
    pub fn submit(&self, request: EngineCoreRequest) -> Result<OutputStream, EngineError> {
        self.submit_shared(1, &UnreadBudget::global().new_share(), request)
    }

    /// Sends one of `count` requests of one job, which share the limit of unread bytes per job.
    pub(crate) fn submit_shared(
        &self,
        count: usize,
        job: &UnreadShare,
        mut request: EngineCoreRequest,
    ) -> Result<OutputStream, EngineError> {
        validate::check(&request, &self.handle.ready, &self.handle.options)?;
        let connection = &self.handle.connection;
        // The lock is held until the request is queued, because the engine must receive requests in
        // the order in which the mirror applies them. The sending task encodes the request.
        let mut delivery = self.handle.delivery.lock();
        let keys = delivery.missing(&request.mm_features);
        if !keys.is_empty() {
            return Err(EngineError::NeedsData { keys });
        }
        let receiver = connection.registry().open_stream(
            &request.request_id,
            MAX_UNREAD_BYTES_PER_JOB / count.max(1),
            job,
        )?;
        let delivered = delivery.prepare(&mut request.mm_features);
        let stream =
            OutputStream::new(request.request_id.clone(), receiver, connection.clone(), delivered);
        connection.send(Outgoing::Add(Box::new(request)))?;
        Ok(stream)
    }

    /// Returns `true` if the engine's receiver cache holds a media item, so that it can be sent
    /// without its data.
    pub fn holds(&self, mm_hash: &str) -> bool {
        self.handle.delivery.lock().holds(mm_hash)
    }

    /// Removes media items from the mirror of the engine's receiver cache, because the engine
    /// reported them as missing.
    pub fn forget_media<'a>(&self, mm_hashes: impl IntoIterator<Item = &'a str>) {
        let mut delivery = self.handle.delivery.lock();
        mm_hashes.into_iter().for_each(|mm_hash| delivery.forget(mm_hash));
    }

    /// Creates an arena of shared memory for `bytes` of tensors and has the engine open it. Tensors
    /// in its slots are then sent as handles.
    ///
    /// # Errors
    /// The arena can't be created, or the engine can't open it; all tensors are then sent in
    /// messages.
    pub async fn attach_arena(&self, bytes: u64, timeout: Duration) -> Result<Plugin, AttachError> {
        delivery::attach(self, bytes, timeout).await
    }

    /// Returns the arena, once the engine has opened it.
    pub fn arena(&self) -> Option<&Arena> {
        self.handle.delivery.arena()
    }

    /// Calls a method of the engine, e.g. `reset_mm_cache`. The engine answers between two steps.
    ///
    /// # Errors
    /// [`EngineError::Utility`] if the method fails, [`EngineError::UtilityTimeout`] if it does not
    /// return within `timeout`, [`EngineError::Dead`] if the engine is dead.
    pub async fn utility(
        &self,
        method: &str,
        args: Vec<Value>,
        timeout: Duration,
    ) -> Result<Value, EngineError> {
        let connection = &self.handle.connection;
        let (call_id, result) = connection.registry().open_call()?;
        let call = Utility { client_index: 0, call_id, method: method.to_owned(), args };
        connection.send(Outgoing::Frames(request::encode_utility(&call)))?;
        match tokio::time::timeout(timeout, result).await {
            Ok(Ok(Ok(value))) => Ok(value),
            Ok(Ok(Err(FailureMessage(message)))) => {
                Err(EngineError::Utility { method: method.to_owned(), message })
            }
            Ok(Err(_)) => Err(EngineError::Dead { cause: connection.cause() }),
            Err(_) => {
                connection.registry().cancel_call(call_id);
                Err(EngineError::UtilityTimeout { method: method.to_owned(), after: timeout })
            }
        }
    }

    /// Returns a receiver of the scheduler's state after the last step; all zero before the first.
    pub fn stats(&self) -> watch::Receiver<SchedulerStats> {
        self.handle.connection.stats()
    }

    /// Calls `sink` with the scheduler's state after each step, in the receiving task. `sink` must
    /// be quick and must not call this client. A second call replaces the first sink.
    pub fn follow_stats(&self, sink: impl Fn(&SchedulerStats) + Send + Sync + 'static) {
        self.handle.connection.follow_stats(Box::new(sink));
    }

    /// Returns the address from which the engine connects: that of its machine, as seen from this
    /// one. `None` over Unix sockets.
    pub fn peer(&self) -> Option<IpAddr> {
        self.handle.peer
    }

    /// Returns the number of open streams.
    pub fn open_requests(&self) -> usize {
        self.handle.connection.registry().open_requests()
    }

    /// Returns `true` unless the engine is known to be dead.
    pub fn is_alive(&self) -> bool {
        self.handle.connection.registry().death().is_none()
    }

    /// Returns the time since the last probe if the engine has sent nothing since then, and zero
    /// otherwise. Engines answer between two steps, so a long step counts as silence.
    pub fn silent_for(&self) -> Duration {
        self.handle.connection.liveness().silent_for()
    }

    /// Waits until the engine is dead and returns the cause.
    pub async fn closed(&self) -> DeathCause {
        self.handle.connection.closed().await
    }

    /// Declares the engine dead, e.g. because its process has ended. Streams end with this cause
    /// unless the engine is known to be dead already.
    pub fn mark_dead(&self, cause: DeathCause) {
        self.handle.connection.mark_dead(cause);
    }
}
