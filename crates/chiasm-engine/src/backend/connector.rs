//! The way from an engine's start to a backend that takes jobs.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_backend::{
    Activity, ConnectError, Connected, Connector, Death, LargestItem, Life, MediaObserver, Network,
};
use chiasm_types::{Role, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, OptionFuture};
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::arena_policy::ArenaPolicy;
use super::capabilities::{self, Beyond};
use super::embedding_store::EmbeddingStore;
use super::format_policy::FormatPolicy;
use super::host::{EngineHost, RunningEngine};
use super::memory::{Bound, Memory};
use super::{Engine, EngineBackend};
use crate::launch::LastLines;
use crate::state::{Launched, StateDir};
use crate::{ClientOptions, EngineClient, EngineEndpoints, EngineError, SocketDir};

/// How long a launched engine that was ready may take to come back to its next frontend, before it
/// is ended and another one launched. It comes within a second, and answers between two steps.
const RETURN_PATIENCE: Duration = Duration::from_secs(60);

/// How the engines of one worker are talked to.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Time that an engine may take from its start until it is ready.
    pub startup_timeout: Duration,
    /// What an engine is told and asked.
    pub client: ClientOptions,
    /// The kind of values that it is sent.
    pub format: FormatPolicy,
    /// Whether it gets shared memory.
    pub arena: ArenaPolicy,
    /// The processor that makes its tensors, with all settings: a part of its plan class.
    pub processor: Arc<[u8]>,
    /// The largest item that it takes, for its encoder cache, of which only its plugin tells.
    pub largest_item: LargestItem,
    /// Which stages of requests it is given; whoever starts it has told it so.
    pub role: Role,
    /// Where engines of its machine leave embeddings for each other; `None` if they don't.
    pub embeddings: Option<Arc<EmbeddingStore>>,
    /// The network on which engines of other machines find it, and it them; `None` if prompts stay
    /// on its machine.
    pub private_network: Option<Network>,
    /// Held by whichever engine starts, where they have to one after the other: those on one GPU
    /// would each count what the others take meanwhile. `None` if they may start at once.
    pub starts: Option<Arc<Mutex<()>>>,
}

/// Connects to the engines of one worker, one after the other.
pub struct EngineConnector {
    host: Box<dyn EngineHost>,
    options: EngineOptions,
    /// What outlives this process; `None` where nothing does.
    memory: Option<Memory>,
}

impl EngineConnector {
    /// A connector for the engines of this host.
    pub fn new(host: impl EngineHost, options: EngineOptions) -> Self {
        Self { host: Box::new(host), options, memory: None }
    }

    /// Writes down in `state` what a later frontend needs to take over the engine, and takes over
    /// the one that is written down there. `model` is the name under which it is listed. Without
    /// effect on engines that end with this process.
    pub fn remembering(mut self, state: &StateDir, model: &str) -> Self {
        self.memory = self.host.kept_as().map(|name| Memory::new(state.clone(), name, model));
        self
    }

    /// Listens for the worker's next engine: where the frontend before this one did, if that may
    /// still have an engine.
    async fn bind(&self, worker: WorkerId) -> Result<Bound, EngineError> {
        let options = &self.options.client;
        let Some(memory) = &self.memory else {
            return self.bind_anew(SocketDir::new()?).await;
        };
        let bound = match memory.bind_again(worker, options).await? {
            Some(bound) => bound,
            None => self.bind_anew(SocketDir::new()?.keep()).await?,
        };
        warn_unless_written(worker, memory.waits(bound.pending.endpoints(), &bound.sockets).await);
        Ok(bound)
    }

    async fn bind_anew(&self, sockets: SocketDir) -> Result<Bound, EngineError> {
        let endpoints = self.host.endpoints(&sockets);
        let pending = EngineClient::bind(endpoints, self.options.client.clone()).await?;
        Ok(Bound { pending, sockets, may_return: false, launched: None })
    }

    /// The engine that is waited for: the one that a frontend before this one has left, or a new
    /// one, with its turn if engines start one after the other.
    async fn start(
        &self,
        worker: WorkerId,
        left: Option<Launched>,
        endpoints: &EngineEndpoints,
        sockets: &SocketDir,
    ) -> Result<(Box<dyn RunningEngine>, Option<OwnedMutexGuard<()>>), ConnectError> {
        let left = match left {
            Some(launched) => self.host.take_over(worker, launched, sockets)?,
            None => None,
        };
        let (engine, turn) = match left {
            Some(engine) => (engine, None),
            None => {
                let turn =
                    OptionFuture::from(self.options.starts.clone().map(Mutex::lock_owned)).await;
                (self.host.start(worker, endpoints, sockets).await?, turn)
            }
        };
        if let (Some(memory), Some(launched)) = (&self.memory, engine.outlives()) {
            warn_unless_written(worker, memory.runs(launched).await);
        }
        Ok((engine, turn))
    }

    async fn ready(
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
        let beyond = Beyond {
            processor: processor.clone(),
            format,
            locality: capabilities::locality(over_unix_sockets, client.peer()),
            has_arena: client.arena().is_some(),
            largest_item: largest_item.clone(),
            encoder_cache_tokens: plugin.and_then(|plugin| plugin.encoder_cache_tokens),
            receiver_cache_bytes: options.receiver_cache_bytes.unwrap_or(0),
            role: *role,
            private_network: *private_network,
            embedding_store_bytes: embeddings.as_ref().map_or(0, |store| store.kept_bytes()),
        };
        let capabilities = capabilities::of(ready, beyond).map_err(unsuitable)?;
        let wants_arena = arena.bytes().is_some();
        let engine = Arc::new(Engine {
            client: client.clone(),
            format,
            private_network: *private_network,
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
            let Bound { pending, sockets, may_return, launched } = self.bind(worker).await.map_err(ConnectError::new)?;
            let endpoints = pending.endpoints().clone();
            // Others have their turn when it is ready, or has ended.
            let (mut engine, _turn) = self.start(worker, launched, &endpoints, &sockets).await?;
            let log = engine.log();
            let patience = match may_return && launched.is_some() {
                true => RETURN_PATIENCE.min(self.options.startup_timeout),
                false => self.options.startup_timeout,
            };
            let connecting = async {
                let client = tokio::select! {
                    client = pending.ready() => client.map_err(ConnectError::new)?,
                    how = engine.exited() => return Err(ConnectError::new(how)),
                    () = tokio::time::sleep(patience) => {
                        let seconds = patience.as_secs();
                        return Err(ConnectError::new(format!("it was not ready after {seconds} s (--startup-timeout)")));
                    }
                };
                if client.is_adopted() {
                    tracing::info!(%worker, "took over an engine from the frontend before this one");
                }
                if let Some(memory) = &self.memory {
                    warn_unless_written(worker, memory.is_ready(&client, &self.options.client).await);
                }
                self.ready(worker, observer, &client, log).await
            };
            match connecting.await {
                Ok(backend) => {
                    tracing::debug!(%worker, elapsed = ?started.elapsed(), "engine connected");
                    let life = EngineLife { engine, outlives: self.memory.is_some(), _sockets: sockets };
                    Ok(Connected { backend: Arc::new(backend), life: Box::new(life) })
                }
                Err(error) => {
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

    fn longest_pause(&self) -> Duration {
        self.host.longest_pause()
    }
}

/// An engine that can't be written down can be served all the same.
fn warn_unless_written(worker: WorkerId, written: Result<(), EngineError>) {
    if let Err(error) = written {
        tracing::warn!(%worker, %error, "a later frontend can't take over the engine");
    }
}

struct EngineLife {
    engine: Box<dyn RunningEngine>,
    /// The engine outlives this process: a later frontend can take it over.
    outlives: bool,
    /// The engine's sockets are in it.
    _sockets: SocketDir,
}

impl Life for EngineLife {
    fn ended(&mut self) -> BoxFuture<'_, Death> {
        self.engine.exited().map(Death::new).boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        self.engine.activity()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async move {
            self.engine.stop().await;
            drop(self._sockets);
        }
        .boxed()
    }

    fn outlives(&self) -> bool {
        self.outlives
    }

    fn leave(self: Box<Self>) -> BoxFuture<'static, ()> {
        async move {
            self.engine.leave().await;
            drop(self._sockets);
        }
        .boxed()
    }
}

/// An error of an engine that is ready and can't be used.
fn unsuitable(why: impl fmt::Display) -> ConnectError {
    ConnectError::new(format!("it does not fit: {why}"))
}
