//! Workers: where engines come from, who of them can take requests, and what the router knows of their KV caches.
//!
//! Each worker has a keeper, a task that starts its engine, joins it to the router once it is ready, feeds it KV
//! events, takes it out when it dies and starts the next one after a pause.

mod arena;
mod backoff;
mod events;
mod host;
mod keeper;
mod launch_host;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_engine::{ClientOptions, EngineClient};
use chiasm_router::{Router, RouterConfig, WorkerInfo};
use chiasm_types::{BlockSize, WorkerId};
use chiasm_vision::PixelFormat;
use events::Followed;
pub use events::KvEventCounts;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

pub use arena::ArenaPolicy;
pub use host::{AttachHost, EngineHost, HostError, RunningEngine};
pub use launch_host::LaunchHost;

use crate::error::ApiError;
use crate::metrics::Metrics;

/// Why a fleet can't start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// There would be nothing to send requests to.
    #[error("no engines were asked for; use --engines, --sim or --attach")]
    NoEngines,
    /// Arenas are demanded and could not be had.
    #[error(
        "/dev/shm has {free:.2} GiB free, {engines} engines may use {each:.2} GiB each; enlarge it (docker: --shm-size) or lower \
         --mm-arena-gb"
    )]
    ShmTooSmall {
        /// GiB that are free.
        free: f64,
        /// Number of engines.
        engines: usize,
        /// GiB for each.
        each: f64,
    },
}

/// How engines are talked to.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    /// Time that an engine may take from its start until it is ready.
    pub startup_timeout: Duration,
    /// What the engine is told and asked.
    pub client: ClientOptions,
    /// Which pixels it is sent.
    pub pixels: PixelPolicy,
    /// Whether they get shared memory.
    pub arena: ArenaPolicy,
}

/// Which pixels engines are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelPolicy {
    /// Raw: the engine normalises. Sending it floats would normalise them twice, silently.
    Raw,
    /// Normalised, in the element type that the engine reports.
    Float,
}

/// What all engines of a fleet must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Tokens of prompt and answer together.
    pub max_model_len: usize,
    /// Tokens that one step computes; an engine's encoder cache holds at least as many image embeddings.
    pub max_batched_tokens: usize,
}

/// A worker that can take requests.
pub struct Worker {
    /// Its name.
    pub id: WorkerId,
    /// Its engine.
    pub client: EngineClient,
    /// What its engine is sent.
    pub pixel_format: PixelFormat,
    /// Tokens of prompt and answer together.
    pub max_model_len: usize,
    /// Whether its engine was to have shared memory; see [`EngineClient::arena`] for whether it has.
    pub wants_arena: bool,
}

/// All workers.
pub struct Fleet {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
    ready: watch::Sender<usize>,
    shutdown: watch::Sender<bool>,
    keepers: Mutex<Option<JoinSet<()>>>,
    created: u64,
    /// Of each worker, over all its engines.
    followed: BTreeMap<WorkerId, Followed>,
}

#[derive(Default)]
struct State {
    workers: BTreeMap<WorkerId, Arc<Worker>>,
    shape: Option<Shape>,
}

impl Fleet {
    /// Starts one worker per host. Returns at once: see [`Fleet::wait_ready`].
    pub fn start(
        hosts: Vec<Box<dyn EngineHost>>,
        router: RouterConfig,
        options: FleetOptions,
    ) -> Result<Arc<Self>, FleetError> {
        if hosts.is_empty() {
            return Err(FleetError::NoEngines);
        }
        options.arena.check(hosts.len())?;
        // Engines come and go on threads that serve requests, too.
        let runtime = Handle::current();
        let fleet = Arc::new(Self {
            router: Arc::new(Router::in_background(router, move |chore| drop(runtime.spawn_blocking(chore)))),
            metrics: Arc::default(),
            state: Mutex::default(),
            ready: watch::Sender::new(0),
            shutdown: watch::Sender::new(false),
            keepers: Mutex::new(None),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            followed: (0..).map(WorkerId).zip(&hosts).map(|(id, _)| (id, Followed::default())).collect(),
        });
        let mut keepers = JoinSet::new();
        for (id, host) in (0..).map(WorkerId).zip(hosts) {
            keepers.spawn(keeper::keep(fleet.clone(), id, host, options.clone(), fleet.shutdown.subscribe()));
        }
        *fleet.keepers.lock().unwrap_or_else(PoisonError::into_inner) = Some(keepers);
        Ok(fleet)
    }

    /// Waits until so many workers can take requests. False if the fleet is shut down before that.
    pub async fn wait_ready(&self, workers: usize) -> bool {
        let mut ready = self.ready.subscribe();
        let mut shutdown = self.shutdown.subscribe();
        tokio::select! {
            ready = ready.wait_for(|&now| now >= workers) => ready.is_ok(),
            _ = shutdown.wait_for(|&down| down) => false,
        }
    }

    /// Stops all engines and waits until they are gone. Requests in flight end with an error: drain first.
    pub async fn shutdown(&self) {
        self.shutdown.send_replace(true);
        let keepers = self.keepers.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut keepers) = keepers {
            while keepers.join_next().await.is_some() {}
        }
    }

    /// Picks workers.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// The fleet's counters, which its frontend shares.
    pub fn metrics(&self) -> Arc<Metrics> {
        self.metrics.clone()
    }

    /// A worker, if it can take requests.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<Worker>> {
        self.state().workers.get(&id).cloned()
    }

    /// The workers that can take requests.
    pub fn workers(&self) -> Vec<Arc<Worker>> {
        self.state().workers.values().cloned().collect()
    }

    /// Number of workers that can take requests.
    pub fn ready_workers(&self) -> usize {
        *self.ready.borrow()
    }

    /// How the KV events of each worker have been followed, over all its engines so far.
    pub fn kv_events(&self) -> impl Iterator<Item = (WorkerId, KvEventCounts)> {
        self.followed.iter().map(|(id, followed)| (*id, followed.counts()))
    }

    /// What all engines agree on; known once the first is ready.
    pub fn shape(&self) -> Option<Shape> {
        self.state().shape
    }

    pub(crate) fn shape_or_unavailable(&self) -> Result<Shape, ApiError> {
        self.shape().ok_or_else(|| ApiError::unavailable("no engine is ready yet"))
    }

    /// When the fleet was started, in seconds since the epoch.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// Lets a worker take requests. `Err` says why it does not fit the others.
    fn join(&self, worker: Worker, shape: Shape, info: WorkerInfo) -> Result<(), String> {
        let mut state = self.state();
        let agreed = *state.shape.get_or_insert(shape);
        if agreed != shape {
            return Err(format!(
                "its block size {}, context {} and batched tokens {} differ from the others' {}, {} and {}",
                shape.block_size.get(),
                shape.max_model_len,
                shape.max_batched_tokens,
                agreed.block_size.get(),
                agreed.max_model_len,
                agreed.max_batched_tokens
            ));
        }
        self.router.add_worker(worker.id, info);
        state.workers.insert(worker.id, Arc::new(worker));
        self.ready.send_replace(state.workers.len());
        Ok(())
    }

    /// Takes a worker out: no new request goes to it, and its blocks are forgotten.
    fn leave(&self, id: WorkerId) {
        let mut state = self.state();
        self.router.remove_worker(id);
        state.workers.remove(&id);
        if state.workers.is_empty() {
            // Nobody is left to agree with: the next engine may differ.
            state.shape = None;
        }
        self.ready.send_replace(state.workers.len());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
