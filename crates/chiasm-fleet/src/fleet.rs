//! Workers: which backends can take requests, what each can do, and what the router knows of their
//! KV caches.
//!
//! Each worker has a keeper, a task that connects to its backend, joins it to the router, feeds the
//! router its KV events and load, takes it out when it ends and connects to the next one after a
//! pause.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use chiasm_backend::{Backend, Death, KvSource, Load, MediaForm, Supports, TensorFormat};
use chiasm_router::{Router, WorkerInfo};
use chiasm_types::{PlanClassId, WorkerId};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::adapters::Adapters;
use crate::followed::Followed;
use crate::keys::index_scheme;
use crate::loaded::Loaded;
use crate::worker_breaker::WorkerBreaker;
use crate::{
    Condition, FleetMetrics, KeptIndexes, KvEventCounts, KvKnown, Patience, PresentClasses,
    classes, places,
};

/// A fleet needs at least one worker.
#[derive(Debug, thiserror::Error)]
#[error("no engines were asked for; use --engines, --sim or --attach")]
pub struct NoEngines;

/// A worker that can take requests.
#[derive(Debug)]
pub struct Worker {
    /// The worker's name.
    pub id: WorkerId,
    /// The connector's description, such as the address of a server. For logs alone: clients must
    /// not see it.
    pub what: String,
    /// Executes its requests.
    pub backend: Arc<dyn Backend>,
    /// How prompts are planned for it.
    pub class: PlanClassId,
    /// Tells this start of its engine from others.
    pub life: u64,
    pub(crate) condition: watch::Sender<Condition>,
    pub(crate) breaker: WorkerBreaker,
    /// What its backend last said of itself.
    pub(crate) load: watch::Sender<Load>,
    /// Its LoRA adapters.
    pub(crate) loaded: Arc<Loaded>,
}

impl Worker {
    /// Whether it answers.
    pub fn condition(&self) -> Condition {
        *self.condition.borrow()
    }

    /// What its backend last said of itself.
    pub fn load(&self) -> Load {
        *self.load.borrow()
    }

    /// What its backend says of itself, from now on.
    pub fn follow_load(&self) -> watch::Receiver<Load> {
        self.load.subscribe()
    }

    /// Returns when the worker is found to be hung, at once if it is.
    pub fn hung(&self) -> impl Future<Output = ()> + Send + use<> {
        self.becomes(|condition| condition == Condition::Hung)
    }

    /// Returns when the worker is found to be suspect or hung, at once if it is.
    pub fn suspected(&self) -> impl Future<Output = ()> + Send + use<> {
        self.becomes(|condition| condition != Condition::Answers)
    }

    fn becomes(&self, is_so: fn(Condition) -> bool) -> impl Future<Output = ()> + Send + use<> {
        let mut condition = self.condition.subscribe();
        async move {
            // A worker that has left is neither: its jobs learn of that by themselves.
            if condition.wait_for(|&now| is_so(now)).await.is_err() {
                std::future::pending().await
            }
        }
    }
}

/// All workers.
pub struct Fleet {
    pub(crate) router: Arc<Router>,
    pub(crate) metrics: FleetMetrics,
    /// Called with each worker that is let go for good.
    pub(crate) on_departure: OnceLock<Box<dyn Fn(WorkerId) + Send + Sync>>,
    pub(crate) state: Mutex<State>,
    pub(crate) ready: watch::Sender<usize>,
    pub(crate) seats: AtomicUsize,
    pub(crate) shutdown: watch::Sender<bool>,
    /// The reason for which requests in flight end at the shutdown.
    pub(crate) cut: OnceLock<Death>,
    /// `None` after the shutdown.
    pub(crate) keepers: Mutex<Option<JoinSet<()>>>,
    pub(crate) created: u64,
    pub(crate) patience: Patience,
    /// What was counted for each worker that was not removed, over all its backends.
    pub(crate) followed: Mutex<BTreeMap<WorkerId, Followed>>,
    /// Ends each worker's keeper.
    pub(crate) ends: Mutex<BTreeMap<WorkerId, watch::Sender<bool>>>,
    /// Workers that were added so far.
    pub(crate) added: AtomicU32,
    /// Workers that nothing names any more, though they answer.
    pub(crate) unnamed: Mutex<BTreeSet<WorkerId>>,
    pub(crate) adapters: Arc<Adapters>,
    /// The files in which knowledge of KV caches outlives this process.
    pub(crate) kept: OnceLock<KeptIndexes>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) workers: BTreeMap<WorkerId, Arc<Worker>>,
    pub(crate) classes: classes::Classes,
}

impl State {
    /// Tells whoever waits how many workers can take requests and answer.
    pub(crate) fn tell(&self, ready: &watch::Sender<usize>) {
        ready.send_replace(self.workers.values().filter(|worker| worker.can_be_asked()).count());
    }

    pub(crate) fn seats(&self) -> usize {
        let can = self.workers.values().map(|worker| worker.backend.capabilities());
        can.filter(|can| can.role.answers()).map(|can| can.max_running).sum()
    }
}

impl Fleet {
    /// Lets knowledge of KV caches outlive this process. To be called before workers are added.
    pub fn keep_indexes(&self, kept: KeptIndexes) {
        // Only the first call has an effect.
        let _ = self.kept.set(kept);
    }

    pub(crate) fn keepers(&self) -> MutexGuard<'_, Option<JoinSet<()>>> {
        lock(&self.keepers)
    }

    pub(crate) fn followed(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Followed>> {
        lock(&self.followed)
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

    /// The router, which picks workers.
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// The fleet's metrics.
    pub fn metrics(&self) -> &FleetMetrics {
        &self.metrics
    }

    /// Calls `forget` with each worker that is let go for good, from now on. Only the first call
    /// has an effect.
    pub fn on_departure(&self, forget: impl Fn(WorkerId) + Send + Sync + 'static) {
        let _ = self.on_departure.set(Box::new(forget));
    }

    /// A worker, if it can take requests.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<Worker>> {
        self.state().workers.get(&id).cloned()
    }

    /// Returns the workers that do not support every part that a request has.
    pub fn workers_lacking(&self, needs: Supports) -> Vec<WorkerId> {
        // Most requests have no such part, or none that any worker lacks.
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

    /// The workers that can take requests, by their ids.
    pub fn workers(&self) -> Vec<Arc<Worker>> {
        self.state().workers.values().cloned().collect()
    }

    /// Number of workers that can take requests and answer.
    pub fn ready_workers(&self) -> usize {
        *self.ready.borrow()
    }

    /// Whether some worker can answer requests, and not only encode their media items.
    pub fn can_answer(&self) -> bool {
        let answers = |worker: &Arc<Worker>| {
            worker.can_be_asked() && worker.backend.capabilities().role.answers()
        };
        self.state().workers.values().any(answers)
    }

    /// Returns `true` if some worker is suspect, and so may answer again at any time.
    pub fn has_suspect(&self) -> bool {
        self.state().workers.values().any(|worker| worker.condition() == Condition::Suspect)
    }

    /// Number of workers that answer and take new requests, as those of drained agents don't.
    /// `None` if none of them can answer requests, and not only encode their media items.
    pub fn taking_workers(&self) -> Option<usize> {
        let state = self.state();
        let taking = || {
            let workers = state.workers.values();
            workers.filter(|worker| worker.can_be_asked() && !worker.load().draining)
        };
        taking()
            .any(|worker| worker.backend.capabilities().role.answers())
            .then(|| taking().count())
    }

    /// Requests that the workers run at once, all together; 0 while there is none.
    pub fn seats(&self) -> usize {
        self.seats.load(Ordering::Relaxed)
    }

    /// How the KV events of each worker have been followed, over all its backends so far.
    pub fn kv_events(&self) -> Vec<(WorkerId, KvEventCounts)> {
        self.followed().iter().map(|(id, followed)| (*id, followed.counts())).collect()
    }

    /// A worker, once it can take requests.
    pub async fn when_ready(&self, id: WorkerId) -> Arc<Worker> {
        let mut ready = self.ready.subscribe();
        loop {
            if let Some(worker) = self.worker(id) {
                return worker;
            }
            // The fleet, and so the sender, is here.
            let _ = ready.changed().await;
        }
    }

    /// What is known of a worker's KV cache, and what will be heard of it from then on. `None` when
    /// it is not there, or when nothing is known.
    ///
    /// Takes some 80 ns for each block that it holds: not for async threads.
    pub fn follow_kv(&self, id: WorkerId) -> Option<KvKnown> {
        let tap = self.followed().get(&id)?.tap();
        tap.follow(&self.router, id)
    }

    /// The plan classes of the workers that can take requests; empty while there is none.
    pub fn classes(&self) -> PresentClasses {
        self.state().classes.present()
    }

    /// The largest context of any worker that can take requests, in tokens of prompt and answer
    /// together.
    pub fn max_model_len(&self) -> Option<usize> {
        self.classes().iter().map(|class| class.max_model_len).max()
    }

    /// When the fleet was started, in seconds since the epoch.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// Lets a worker take requests.
    pub(crate) fn join(
        &self,
        id: WorkerId,
        what: String,
        backend: Arc<dyn Backend>,
        loaded: Arc<Loaded>,
    ) -> Arc<Worker> {
        let can = backend.capabilities().clone();
        let worker = {
            let mut state = self.state();
            let class = state.classes.join(id, &can);
            let worker = Worker {
                id,
                what,
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
            self.seats.store(state.seats(), Ordering::Relaxed);
            worker
        };
        // Last: whatever the router picks has to be found above.
        let info = WorkerInfo {
            total_blocks: can.total_blocks,
            block_size: can.class.block_size,
            publishes_events: !matches!(can.kv, KvSource::Unknown { .. }),
            encoder_cache_tokens: can.encoder_cache_tokens,
            receiver_cache_elements: element_bytes(can.media)
                .map_or(0, |bytes| can.receiver_cache_bytes / bytes),
            class: worker.class,
            role: can.role,
            machine: places::machine(&can.locality, id),
            hands_over_in: places::hands_over_in(&can, id),
            embedding_store_bytes: can.embedding_store_bytes,
            // At exactly the context's length an engine never answers.
            max_prompt_tokens: can.max_model_len.saturating_sub(1),
            max_encoder_tokens: can.max_batched_tokens,
        };
        self.router.add_worker_with(id, info, index_scheme(can.class.keys));
        self.state().tell(&self.ready);
        worker
    }

    /// Takes note of whether a worker answers.
    pub(crate) fn set_condition(&self, id: WorkerId, condition: Condition) {
        let state = self.state();
        let Some(worker) = state.workers.get(&id).filter(|worker| worker.condition() != condition)
        else {
            return;
        };
        match condition {
            Condition::Answers => tracing::info!(worker = %id, "the engine answers again"),
            Condition::Suspect => {
                tracing::warn!(worker = %id, "the engine says nothing: it gets no new requests")
            }
            Condition::Hung => {
                tracing::error!(worker = %id, "the engine hangs: requests without a token move")
            }
        }
        worker.condition.send_replace(condition);
        self.router.set_suspect(id, condition != Condition::Answers);
        state.tell(&self.ready);
    }

    /// Takes a worker out: no new request goes to it, and its blocks are forgotten.
    pub(crate) fn leave(&self, id: WorkerId) {
        let left = {
            let mut state = self.state();
            state.classes.leave(id);
            let left = state.workers.remove(&id);
            self.seats.store(state.seats(), Ordering::Relaxed);
            state.tell(&self.ready);
            left
        };
        // A request that is routed to it meanwhile finds no such worker, and tries another one.
        self.router.remove_worker(id);
        drop(left);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// What is locked here is never left half-changed, so a panic elsewhere does not make it unusable.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that a worker is sent per element of a large tensor; `None` where it is sent no tensors.
fn element_bytes(media: MediaForm) -> Option<u64> {
    match media {
        MediaForm::Tensors(TensorFormat::Raw) => Some(1),
        MediaForm::Tensors(TensorFormat::Normalized(dtype)) => Some(dtype.size() as u64),
        MediaForm::Encoded | MediaForm::None => None,
    }
}

#[cfg(test)]
mod tests;
