//! All workers, their shared state, and their membership in the router.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use chiasm_backend::{Backend, DeathReason, KvSource, Load, MediaForm, Supports, TensorFormat};
use chiasm_router::{Router, WorkerInfo};
use chiasm_types::{PlanClassId, WorkerId};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::adapters::Adapters;
use crate::followed::WorkerKvEvents;
use crate::keys::index_scheme;
use crate::loaded::LoadedAdapters;
use crate::worker_breaker::WorkerBreaker;
use crate::{
    Condition, FleetMetrics, KeptIndexes, KvEventCounts, KvSubscription, Patience, PresentClasses,
    classes, places,
};

/// The error of starting a fleet without workers.
#[derive(Debug, thiserror::Error)]
#[error("no engines are configured; use --engines, --sim or --attach")]
pub struct NoEngines;

/// A worker that can take requests.
#[derive(Debug)]
pub struct Worker {
    /// The worker's id, which is never reused.
    pub id: WorkerId,
    /// The connector's description, such as the address of a server. For logs alone: clients must
    /// not see it.
    pub description: String,
    /// The backend that executes the worker's requests.
    pub backend: Arc<dyn Backend>,
    /// The plan class of the worker.
    pub class: PlanClassId,
    /// A random number that identifies this connection to a backend. It changes when the worker
    /// reconnects.
    pub life: u64,
    pub(crate) condition: watch::Sender<Condition>,
    pub(crate) breaker: WorkerBreaker,
    /// The load that the backend last reported.
    pub(crate) load: watch::Sender<Load>,
    /// The LoRA adapters that were loaded into the backend.
    pub(crate) loaded: Arc<LoadedAdapters>,
}

impl Worker {
    /// Returns the worker's condition.
    pub fn condition(&self) -> Condition {
        *self.condition.borrow()
    }

    /// Returns the load that the backend last reported.
    pub fn load(&self) -> Load {
        *self.load.borrow()
    }

    /// Returns a receiver for the load that the backend reports.
    pub fn watch_load(&self) -> watch::Receiver<Load> {
        self.load.subscribe()
    }

    /// Waits until the worker is hung. Never completes once the worker has left.
    pub fn wait_hung(&self) -> impl Future<Output = ()> + Send + use<> {
        self.wait_condition(|condition| condition == Condition::Hung)
    }

    /// Waits until the worker is suspect or hung. Never completes once the worker has left.
    pub fn wait_suspect(&self) -> impl Future<Output = ()> + Send + use<> {
        self.wait_condition(|condition| condition != Condition::Answers)
    }

    fn wait_condition(
        &self,
        predicate: fn(Condition) -> bool,
    ) -> impl Future<Output = ()> + Send + use<> {
        let mut condition = self.condition.subscribe();
        async move {
            // The worker has left. Its jobs learn of that from the backend.
            if condition.wait_for(|&now| predicate(now)).await.is_err() {
                std::future::pending().await
            }
        }
    }
}

/// All workers and their shared state.
pub struct Fleet {
    pub(crate) router: Arc<Router>,
    pub(crate) metrics: FleetMetrics,
    /// The callback for each worker that is removed for good.
    pub(crate) on_departure: OnceLock<Box<dyn Fn(WorkerId) + Send + Sync>>,
    pub(crate) state: Mutex<State>,
    /// The number of available workers.
    pub(crate) ready: watch::Sender<usize>,
    /// The number of requests that the workers can run at once.
    pub(crate) max_running: AtomicUsize,
    pub(crate) shutdown: watch::Sender<bool>,
    /// The error of requests in flight at the shutdown.
    pub(crate) abort_reason: OnceLock<DeathReason>,
    /// The keepers' tasks; `None` after the shutdown.
    pub(crate) keepers: Mutex<Option<JoinSet<()>>>,
    /// The start of the fleet, in seconds since the epoch.
    pub(crate) created: u64,
    pub(crate) patience: Patience,
    /// The KV-event counters of each worker that was not removed, over all its backends.
    pub(crate) worker_kv_events: Mutex<BTreeMap<WorkerId, WorkerKvEvents>>,
    /// The stop signal of each worker's keeper.
    pub(crate) stops: Mutex<BTreeMap<WorkerId, watch::Sender<bool>>>,
    /// The number of workers that were added so far.
    pub(crate) added: AtomicU32,
    /// Running workers that no list or discovery names any more.
    pub(crate) unnamed: Mutex<BTreeSet<WorkerId>>,
    pub(crate) adapters: Arc<Adapters>,
    /// The files that save knowledge of KV caches for the next process.
    pub(crate) kept: OnceLock<KeptIndexes>,
}

/// The workers that can take requests, and their plan classes.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) workers: BTreeMap<WorkerId, Arc<Worker>>,
    pub(crate) classes: classes::Classes,
}

impl State {
    /// Publishes the number of available workers.
    pub(crate) fn notify(&self, ready: &watch::Sender<usize>) {
        ready.send_replace(self.workers.values().filter(|worker| worker.is_available()).count());
    }

    /// Returns the number of requests that the workers can run at once.
    pub(crate) fn max_running(&self) -> usize {
        let capabilities = self.workers.values().map(|worker| worker.backend.capabilities());
        capabilities.filter(|can| can.role.can_answer()).map(|can| can.max_running).sum()
    }
}

impl Fleet {
    /// Saves knowledge of KV caches in `kept` at the shutdown. Must be called before workers are
    /// added.
    pub fn keep_indexes(&self, kept: KeptIndexes) {
        // Only the first call has an effect.
        let _ = self.kept.set(kept);
    }

    pub(crate) fn keepers(&self) -> MutexGuard<'_, Option<JoinSet<()>>> {
        lock(&self.keepers)
    }

    pub(crate) fn worker_kv_events(&self) -> MutexGuard<'_, BTreeMap<WorkerId, WorkerKvEvents>> {
        lock(&self.worker_kv_events)
    }

    /// Waits until `workers` workers are available. Returns `false` if the fleet is shut down
    /// first.
    pub async fn wait_ready(&self, workers: usize) -> bool {
        let mut ready = self.ready.subscribe();
        let mut shutdown = self.shutdown.subscribe();
        tokio::select! {
            ready = ready.wait_for(|&now| now >= workers) => ready.is_ok(),
            _ = shutdown.wait_for(|&down| down) => false,
        }
    }

    /// Returns the router, which picks workers.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// Returns the fleet's metrics.
    pub fn metrics(&self) -> &FleetMetrics {
        &self.metrics
    }

    /// Sets the callback for workers that are removed for good. Only the first call has an effect.
    pub fn on_departure(&self, callback: impl Fn(WorkerId) + Send + Sync + 'static) {
        let _ = self.on_departure.set(Box::new(callback));
    }

    /// Returns a worker if it has joined.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<Worker>> {
        self.state().workers.get(&id).cloned()
    }

    /// Returns the workers that do not support all of `needs`.
    pub fn workers_lacking(&self, needs: Supports) -> Vec<WorkerId> {
        // The common cases: no optional parts, or only parts that every worker supports.
        if needs == Supports::default() {
            return Vec::new();
        }
        let state = self.state();
        if state.classes.supported_by_all().covers(needs) {
            return Vec::new();
        }
        let lacks = |worker: &&Arc<Worker>| !worker.backend.capabilities().supports.covers(needs);
        state.workers.values().filter(lacks).map(|worker| worker.id).collect()
    }

    /// Returns the workers that have joined, ordered by id.
    pub fn workers(&self) -> Vec<Arc<Worker>> {
        self.state().workers.values().cloned().collect()
    }

    /// Returns the number of available workers.
    pub fn ready_workers(&self) -> usize {
        *self.ready.borrow()
    }

    /// Returns `true` if an available worker can answer requests. Some workers can only encode.
    pub fn can_answer(&self) -> bool {
        let answers = |worker: &Arc<Worker>| {
            worker.is_available() && worker.backend.capabilities().role.can_answer()
        };
        self.state().workers.values().any(answers)
    }

    /// Returns `true` if a worker is suspect. Such a worker may respond again at any time.
    pub fn has_suspect(&self) -> bool {
        self.state().workers.values().any(|worker| worker.condition() == Condition::Suspect)
    }

    /// Returns the number of available workers that accept new requests. Workers of draining agents
    /// do not. Returns `None` if all workers that accept requests can only encode.
    pub fn accepting_workers(&self) -> Option<usize> {
        let state = self.state();
        let accepting = || {
            let workers = state.workers.values();
            workers.filter(|worker| worker.is_available() && !worker.load().draining)
        };
        accepting()
            .any(|worker| worker.backend.capabilities().role.can_answer())
            .then(|| accepting().count())
    }

    /// Returns the number of requests that all workers together can run at once.
    pub fn max_running(&self) -> usize {
        self.max_running.load(Ordering::Relaxed)
    }

    /// Returns the KV-event counts of each worker, over all its backends so far.
    pub fn kv_event_counts(&self) -> Vec<(WorkerId, KvEventCounts)> {
        self.worker_kv_events().iter().map(|(id, kv_events)| (*id, kv_events.counts())).collect()
    }

    /// Waits until a worker has joined, and returns it.
    pub async fn wait_for_worker(&self, id: WorkerId) -> Arc<Worker> {
        let mut ready = self.ready.subscribe();
        loop {
            if let Some(worker) = self.worker(id) {
                return worker;
            }
            // Never fails: the fleet holds the sender.
            let _ = ready.changed().await;
        }
    }

    /// Returns a snapshot of a worker's KV cache and a stream of its updates. Returns `None` if the
    /// fleet or the router does not have the worker.
    ///
    /// Takes about 80 ns per block that the worker holds, so it must not run on async threads.
    pub fn subscribe_kv(&self, id: WorkerId) -> Option<KvSubscription> {
        let tap = self.worker_kv_events().get(&id)?.tap();
        tap.subscribe(&self.router, id)
    }

    /// Returns the plan classes of the workers that have joined.
    pub fn classes(&self) -> PresentClasses {
        self.state().classes.present()
    }

    /// Returns the largest context of the workers that have joined, in tokens of prompt and answer
    /// together. Returns `None` without workers.
    pub fn max_model_len(&self) -> Option<usize> {
        self.classes().iter().map(|class| class.max_model_len).max()
    }

    /// Returns the start of the fleet, in seconds since the epoch.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// Adds a connected worker to the fleet and to the router.
    pub(crate) fn join(
        &self,
        id: WorkerId,
        description: String,
        backend: Arc<dyn Backend>,
        loaded: Arc<LoadedAdapters>,
    ) -> Arc<Worker> {
        let capabilities = backend.capabilities().clone();
        let worker = {
            let mut state = self.state();
            let class = state.classes.join(id, &capabilities);
            let worker = Worker {
                id,
                description,
                backend,
                class,
                life: rand::random(),
                condition: watch::Sender::default(),
                breaker: WorkerBreaker::new(),
                load: watch::Sender::default(),
                loaded,
            };
            let worker = Arc::new(worker);
            state.workers.insert(id, worker.clone());
            self.max_running.store(state.max_running(), Ordering::Relaxed);
            worker
        };
        // The router comes last: every worker that it picks must be found in the state.
        let info = WorkerInfo {
            total_blocks: capabilities.total_blocks,
            block_size: capabilities.class.block_size,
            publishes_events: !matches!(capabilities.kv, KvSource::Unknown { .. }),
            encoder_cache_tokens: capabilities.encoder_cache_tokens,
            receiver_cache_elements: element_bytes(capabilities.media)
                .map_or(0, |bytes| capabilities.receiver_cache_bytes / bytes),
            class: worker.class,
            role: capabilities.role,
            machine: places::machine(&capabilities.locality, id),
            handover_domain: places::handover_domain(&capabilities, id),
            embedding_store_bytes: capabilities.embedding_store_bytes,
            // An engine never answers a prompt that fills the context completely.
            max_prompt_tokens: capabilities.max_model_len.saturating_sub(1),
            max_encoder_tokens: capabilities.max_batched_tokens,
        };
        self.router.add_worker_with(id, info, index_scheme(capabilities.class.keys));
        self.state().notify(&self.ready);
        worker
    }

    /// Sets a worker's condition. Has no effect if the worker has left.
    pub(crate) fn set_condition(&self, id: WorkerId, condition: Condition) {
        let state = self.state();
        let Some(worker) = state.workers.get(&id).filter(|worker| worker.condition() != condition)
        else {
            return;
        };
        match condition {
            Condition::Answers => tracing::info!(worker = %id, "the engine responds again"),
            Condition::Suspect => {
                tracing::warn!(worker = %id, "the engine does not respond and gets no new requests")
            }
            Condition::Hung => {
                tracing::error!(
                    worker = %id,
                    "the engine hangs; requests that have no token yet move to another worker"
                )
            }
        }
        worker.condition.send_replace(condition);
        self.router.set_suspect(id, condition != Condition::Answers);
        state.notify(&self.ready);
    }

    /// Removes a worker from the fleet and the router, which forgets its blocks.
    pub(crate) fn leave(&self, id: WorkerId) {
        let removed = {
            let mut state = self.state();
            state.classes.leave(id);
            let removed = state.workers.remove(&id);
            self.max_running.store(state.max_running(), Ordering::Relaxed);
            state.notify(&self.ready);
            removed
        };
        // A request that is routed to the worker now does not find it, and tries another one.
        self.router.remove_worker(id);
        // Dropped after the lock of the state is released.
        drop(removed);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Locks a mutex, ignoring poison: critical sections never leave a value half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the bytes per element of a large tensor on its way to a worker. Returns `None` for
/// workers that accept no tensors.
fn element_bytes(media: MediaForm) -> Option<u64> {
    match media {
        MediaForm::Tensors(TensorFormat::Raw) => Some(1),
        MediaForm::Tensors(TensorFormat::Normalized(dtype)) => Some(dtype.size() as u64),
        MediaForm::Encoded | MediaForm::None => None,
    }
}

#[cfg(test)]
mod tests;
