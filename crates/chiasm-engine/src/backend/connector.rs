//! The connector of one worker: starts an engine and connects to it as a backend.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_backend::{
    Activity, BackendLifecycle, ConnectError, Connected, Connector, DeathReason, LargestItem,
    MediaObserver, Network,
};
use chiasm_types::{Role, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, OptionFuture};
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::arena_policy::ArenaPolicy;
use super::capabilities::{self, EngineContext};
use super::embedding_store::EmbeddingStore;
use super::engine_record::{BoundSockets, EngineRecord};
use super::format_policy::FormatPolicy;
use super::host::{EngineHost, RunningEngine};
use super::{Engine, EngineBackend};
use crate::client::SharedHandshake;
use crate::launch::LastLines;
use crate::state::{Launched, StateDir};
use crate::{ClientOptions, EngineClient, EngineEndpoints, EngineError, SocketDir};

/// The time within which an engine that an earlier frontend launched, and that was ready, must
/// reconnect. After it the engine is ended and another one launched. Engines reconnect within a
/// second, and answer between two steps.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// The settings for the engines of one worker.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The time within which an engine must become ready.
    pub startup_timeout: Duration,
    /// The settings of the engine's client.
    pub client: ClientOptions,
    /// The policy for the values of tensors.
    pub format: FormatPolicy,
    /// The policy for shared memory.
    pub arena: ArenaPolicy,
    /// The processor that makes the engine's tensors, with all settings: a part of its plan class.
    pub processor: Arc<[u8]>,
    /// The largest media item of the model. It gives the size of the encoder cache unless the
    /// engine's plugin reports it.
    pub largest_item: LargestItem,
    /// The role with which the engine was started: the stages of requests that it computes.
    pub role: Role,
    /// The store through which engines of the engine's machine exchange embeddings, if any.
    pub embeddings: Option<Arc<EmbeddingStore>>,
    /// The network through which engines of several machines exchange keys and values; `None` if
    /// they stay on one machine.
    pub private_network: Option<Network>,
    /// The lock that an engine holds while it starts; `None` if engines may start at the same time.
    /// Engines on one GPU may not: each would count the memory that the others allocate meanwhile.
    pub starts: Option<Arc<Mutex<()>>>,
}

/// A connector to the engines of one worker, one after the other.
pub struct EngineConnector {
    host: Box<dyn EngineHost>,
    options: EngineOptions,
    /// The handshake socket, if the host's engines share one.
    handshake: Option<SharedHandshake>,
    /// The record of an engine that outlives this process; `None` for engines that end with it.
    record: Option<EngineRecord>,
}

impl EngineConnector {
    /// Creates a connector to the engines of this host.
    pub fn new(host: impl EngineHost, options: EngineOptions) -> Self {
        let handshake = host.shares_handshake().then(SharedHandshake::default);
        Self { host: Box::new(host), options, handshake, record: None }
    }

    /// Records the engine in `state`, so that a later frontend can take it over, and takes over the
    /// engine recorded there. `model` is the name under which it is listed. Has no effect on
    /// engines that end with this process.
    pub fn with_state(mut self, state: &StateDir, model: &str) -> Self {
        let name = self.host.record_name();
        self.record = name.map(|name| EngineRecord::new(state.clone(), name, model));
        self
    }

    /// Binds the sockets for the worker's next engine: those of the earlier frontend, if its engine
    /// may still run.
    async fn bind(&self, worker: WorkerId) -> Result<BoundSockets, EngineError> {
        let options = &self.options.client;
        let Some(record) = &self.record else {
            return self.bind_new(SocketDir::new()?).await;
        };
        let bound = match record.rebind(worker, options, self.handshake.as_ref()).await? {
            Some(bound) => bound,
            None => self.bind_new(SocketDir::new()?.keep()).await?,
        };
        let stored = record.store_endpoints(bound.pending.endpoints(), &bound.sockets).await;
        warn_unless_stored(worker, stored);
        Ok(bound)
    }

    async fn bind_new(&self, sockets: SocketDir) -> Result<BoundSockets, EngineError> {
        let endpoints = self.host.endpoints(&sockets);
        let options = self.options.client.clone();
        let pending =
            EngineClient::bind_shared(endpoints, options, self.handshake.as_ref()).await?;
        Ok(BoundSockets { pending, sockets, may_reconnect: false, launched: None })
    }

    /// Takes over the engine that an earlier frontend detached, or starts a new one. A new engine
    /// comes with the lock on `starts`, if engines start one after the other.
    async fn start(
        &self,
        worker: WorkerId,
        launched: Option<Launched>,
        endpoints: &EngineEndpoints,
        sockets: &SocketDir,
    ) -> Result<(Box<dyn RunningEngine>, Option<OwnedMutexGuard<()>>), ConnectError> {
        let taken_over = match launched {
            Some(launched) => self.host.take_over(worker, launched, sockets)?,
            None => None,
        };
        let (engine, start_lock) = match taken_over {
            Some(engine) => (engine, None),
            None => {
                let start_lock =
                    OptionFuture::from(self.options.starts.clone().map(Mutex::lock_owned)).await;
                (self.host.start(worker, endpoints, sockets).await?, start_lock)
            }
        };
        if let (Some(record), Some(launched)) = (&self.record, engine.surviving_processes()) {
            warn_unless_stored(worker, record.store_processes(launched).await);
        }
        Ok((engine, start_lock))
    }

    /// Attaches an arena to an engine that is ready, and makes a backend of it.
    async fn make_backend(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
        client: &EngineClient,
        log: Option<LastLines>,
    ) -> Result<EngineBackend, ConnectError> {
        let EngineOptions {
            client: options,
            format,
            arena,
            processor,
            largest_item,
            role,
            private_network,
            embeddings,
            ..
        } = &self.options;
        let ready = client.info();
        let format = capabilities::format(ready, *format).map_err(unsuitable)?;
        let plugin = arena.attach(worker, client).await.map_err(unsuitable)?;
        let over_unix_sockets = client.endpoints().input.starts_with("ipc://");
        let context = EngineContext {
            processor: processor.clone(),
            format,
            locality: capabilities::locality(over_unix_sockets, client.peer()),
            has_arena: client.arena().is_some(),
            largest_item: largest_item.clone(),
            encoder_cache_tokens: plugin.and_then(|plugin| plugin.encoder_cache_tokens),
            receiver_cache_bytes: options.receiver_cache_bytes.unwrap_or(0),
            role: *role,
            private_network: *private_network,
            embedding_store_bytes: embeddings.as_ref().map_or(0, |store| store.guaranteed_bytes()),
        };
        let capabilities = capabilities::build(ready, context).map_err(unsuitable)?;
        let wants_arena = arena.bytes().is_some();
        let engine = Arc::new(Engine {
            client: client.clone(),
            format,
            model_dtype: capabilities::model_dtype(ready),
            private_network: *private_network,
            is_in_group: ready.data_parallel_size > 1,
            wants_arena,
            observer,
            embeddings: embeddings.clone(),
            log,
        });
        Ok(EngineBackend { engine, capabilities })
    }
}

impl Connector for EngineConnector {
    fn connect(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let started = Instant::now();
            let BoundSockets { pending, sockets, may_reconnect, launched } =
                self.bind(worker).await.map_err(ConnectError::new)?;
            let endpoints = pending.endpoints().clone();
            // The lock is held until the engine is ready or has ended.
            let (mut engine, _start_lock) =
                self.start(worker, launched, &endpoints, &sockets).await?;
            let pending = pending.in_generation(engine.generation());
            let log = engine.log();
            let timeout = if may_reconnect && launched.is_some() {
                RECONNECT_TIMEOUT.min(self.options.startup_timeout)
            } else {
                self.options.startup_timeout
            };
            let connecting = async {
                let client = tokio::select! {
                    client = pending.ready() => client.map_err(ConnectError::new)?,
                    end = engine.exited() => return Err(ConnectError::new(end)),
                    () = tokio::time::sleep(timeout) => {
                        let seconds = timeout.as_secs();
                        return Err(ConnectError::new(format!(
                            "it was not ready after {seconds} s (--startup-timeout)"
                        )));
                    }
                };
                if client.is_adopted() {
                    tracing::info!(%worker, "took over an engine from an earlier frontend");
                }
                if let Some(record) = &self.record {
                    let stored = record.store_report(&client, &self.options.client).await;
                    warn_unless_stored(worker, stored);
                }
                self.make_backend(worker, observer, &client, log).await
            };
            match connecting.await {
                Ok(backend) => {
                    tracing::debug!(%worker, elapsed = ?started.elapsed(), "engine connected");
                    let lifecycle = EngineLifecycle {
                        engine,
                        survives_detach: self.record.is_some(),
                        _sockets: sockets,
                    };
                    Ok(Connected { backend: Arc::new(backend), lifecycle: Box::new(lifecycle) })
                }
                Err(error) => {
                    engine.fail(&error.to_string());
                    engine.stop().await;
                    Err(error)
                }
            }
        }
        .boxed()
    }

    fn describe(&self) -> String {
        self.host.describe()
    }

    fn max_retry_pause(&self) -> Duration {
        self.host.max_retry_pause()
    }
}

/// Logs that a record could not be stored. The engine is used without it.
fn warn_unless_stored(worker: WorkerId, stored: Result<(), EngineError>) {
    if let Err(error) = stored {
        tracing::warn!(%worker, %error, "a later frontend can't take over the engine");
    }
}

struct EngineLifecycle {
    engine: Box<dyn RunningEngine>,
    /// `true` if the engine can outlive this process, for a later frontend to take over.
    survives_detach: bool,
    /// The folder of the engine's sockets.
    _sockets: SocketDir,
}

impl BackendLifecycle for EngineLifecycle {
    fn ended(&mut self) -> BoxFuture<'_, DeathReason> {
        self.engine.exited().map(DeathReason::new).boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        self.engine.activity()
    }

    fn max_silence(&self) -> Option<Duration> {
        self.engine.max_silence()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async move {
            self.engine.stop().await;
            drop(self._sockets);
        }
        .boxed()
    }

    fn survives_detach(&self) -> bool {
        self.survives_detach
    }

    fn detach(self: Box<Self>) -> BoxFuture<'static, ()> {
        async move {
            self.engine.detach().await;
            drop(self._sockets);
        }
        .boxed()
    }
}

/// Creates the error for an engine that is ready but can't be used.
fn unsuitable(why: impl fmt::Display) -> ConnectError {
    ConnectError::new(format!("it does not fit: {why}"))
}
