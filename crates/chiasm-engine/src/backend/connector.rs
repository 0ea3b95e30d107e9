//! The way from an engine's start to a backend that takes jobs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_backend::{Activity, ConnectError, Connected, Connector, Death, Life, MediaObserver};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt};

use super::arena_policy::ArenaPolicy;
use super::capabilities::{self, Beyond};
use super::host::{EngineHost, RunningEngine};
use super::{Engine, EngineBackend};
use crate::{ClientOptions, EngineClient, SocketDir};

/// The kind of values that an engine is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatPolicy {
    /// Raw ones: the engine normalises. Sending it floats would normalise them twice, silently.
    Raw,
    /// Normalised ones, in the element type that the engine reports.
    Float,
}

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
}

/// Connects to the engines of one worker, one after the other.
pub struct EngineConnector {
    host: Box<dyn EngineHost>,
    options: EngineOptions,
}

impl EngineConnector {
    /// A connector for the engines of this host.
    pub fn new(host: impl EngineHost, options: EngineOptions) -> Self {
        Self { host: Box::new(host), options }
    }

    async fn ready(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
        client: &EngineClient,
    ) -> Result<EngineBackend, ConnectError> {
        let EngineOptions { client: options, format, arena, processor, .. } = &self.options;
        let ready = client.info();
        let unsuitable = |why: String| ConnectError::new(format!("it does not fit: {why}"));
        let format = capabilities::format(ready, *format).map_err(unsuitable)?;
        arena.attach(worker, client).await.map_err(|error| unsuitable(error.to_string()))?;
        let over_unix_sockets = client.endpoints().input.starts_with("ipc://");
        let beyond = Beyond {
            processor: processor.clone(),
            format,
            locality: capabilities::locality(over_unix_sockets, client.peer()),
            has_arena: client.arena().is_some(),
            receiver_cache_bytes: options.receiver_cache_bytes.unwrap_or(0),
        };
        let capabilities = capabilities::of(ready, beyond).map_err(unsuitable)?;
        let wants_arena = arena.bytes().is_some();
        let engine = Arc::new(Engine { client: client.clone(), format, wants_arena, observer });
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
            let sockets = SocketDir::new().map_err(ConnectError::new)?;
            let endpoints = self.host.endpoints(&sockets);
            let pending = EngineClient::bind(endpoints, self.options.client.clone()).await.map_err(ConnectError::new)?;
            let mut engine = self.host.start(worker, pending.endpoints(), &sockets).await?;
            let patience = self.options.startup_timeout;
            let connecting = async {
                let client = tokio::select! {
                    client = pending.ready() => client.map_err(ConnectError::new)?,
                    how = engine.exited() => return Err(ConnectError::new(how)),
                    () = tokio::time::sleep(patience) => {
                        let seconds = patience.as_secs();
                        return Err(ConnectError::new(format!("it was not ready after {seconds} s (--startup-timeout)")));
                    }
                };
                self.ready(worker, observer, &client).await
            };
            match connecting.await {
                Ok(backend) => {
                    tracing::debug!(%worker, elapsed = ?started.elapsed(), "engine connected");
                    let life = EngineLife { engine, _sockets: sockets };
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

struct EngineLife {
    engine: Box<dyn RunningEngine>,
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
}
