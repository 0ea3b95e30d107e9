//! The router's public face, and its locks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use chiasm_kv::event::KvEventBatch;
use chiasm_kv::{BlockKey, IndexStats, PrefixIndex};
use chiasm_types::WorkerId;

use crate::config::RouterConfig;
use crate::error::RouteError;
use crate::fleet::{EngineStats, Fleet, Hold, WorkerInfo, WorkerSnapshot};
use crate::reservation::Reservation;
use crate::select::{self, prompt_blocks};

/// What decides where a request goes.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    /// Keys of the prompt's full blocks, in prompt order.
    pub keys: &'a [BlockKey],
    /// Tokens of the expanded prompt.
    pub prompt_tokens: usize,
    /// Workers that must not get it, such as those that have failed it.
    pub exclude: &'a [WorkerId],
}

/// Picks workers. Cheap to clone; all clones are the same router.
///
/// All methods are short and never wait for anything but each other: fine to call from async code.
#[derive(Clone)]
pub struct Router {
    shared: Arc<Shared>,
}

/// The locks are taken in the order of the fields. No lock is held longer than a call.
pub(crate) struct Shared {
    config: RouterConfig,
    index: RwLock<PrefixIndex>,
    fleet: Mutex<Fleet>,
}

impl Router {
    /// A router without workers.
    pub fn new(config: RouterConfig) -> Self {
        let fleet = Mutex::new(Fleet::new(config.seed));
        let index = config.index_max_bytes.map_or_else(PrefixIndex::new, PrefixIndex::with_max_bytes);
        Self { shared: Arc::new(Shared { config, index: RwLock::new(index), fleet }) }
    }

    /// Adds a worker with an empty cache. One of the same id is replaced, as after a restart of its engine: what the old
    /// one held or was given no longer counts.
    pub fn add_worker(&self, id: WorkerId, info: WorkerInfo) {
        let index = self.shared.index_mut();
        self.shared.fleet().add(id, info);
        index.add_worker(id, info.block_size);
    }

    /// Forgets a worker, its blocks and the promises of its requests. Reservations for it may live on.
    pub fn remove_worker(&self, id: WorkerId) {
        let index = self.shared.index_mut();
        self.shared.fleet().workers.remove(&id);
        index.remove_worker(id);
    }

    /// Takes in a batch of a worker's KV events.
    pub fn apply(&self, id: WorkerId, batch: &KvEventBatch) {
        let index = self.shared.index_mut();
        let added = index.apply(id, batch);
        if let Some(worker) = self.shared.fleet().workers.get_mut(&id) {
            added.into_iter().for_each(|block| worker.promises.confirm(block));
        }
    }

    /// Forgets what a worker holds, not the worker: its events were lost. What its requests in flight promise stays.
    pub fn reset_worker_blocks(&self, id: WorkerId) {
        self.shared.index_mut().clear(id);
    }

    /// Takes note of what a worker's engine says about itself. It shows in [`Router::workers`]; the cost goes by what the
    /// router itself gave to the worker, which is known earlier.
    pub fn set_stats(&self, id: WorkerId, running: u64, waiting: u64, kv_usage: f64) {
        if let Some(worker) = self.shared.fleet().workers.get_mut(&id) {
            worker.engine = Some(EngineStats { running, waiting, kv_usage });
        }
    }

    /// Picks a worker for a request.
    ///
    /// # Errors
    /// [`RouteError::NoWorker`] when there is none that the request does not exclude.
    pub fn select(&self, request: &RouteRequest<'_>) -> Result<Reservation, RouteError> {
        // The index stays locked until the promises are made: no event can confirm a block in between and leave its
        // promise behind.
        let index = self.shared.index();
        let mut fleet = self.shared.fleet();
        let choice = select::choose(&self.shared.config, &mut fleet, &index, request).ok_or(RouteError::NoWorker)?;
        let worker = fleet.workers.get(&choice.worker).ok_or(RouteError::NoWorker)?;
        let blocks = prompt_blocks(request, worker);
        let promised =
            request.keys[choice.overlap..].iter().copied().filter(|key| !index.holds(choice.worker, *key)).collect();
        let hold = fleet.hold(choice.worker, blocks, promised).ok_or(RouteError::NoWorker)?;
        Ok(Reservation::new(self.shared.clone(), hold, choice.overlap))
    }

    /// What the index holds for all workers together. Takes a moment per worker: for reports, not for each request.
    pub fn index_totals(&self) -> IndexStats {
        self.shared.index().totals()
    }

    /// Every worker, in the order of their ids.
    pub fn workers(&self) -> Vec<WorkerSnapshot> {
        let index = self.shared.index();
        let fleet = self.shared.fleet();
        fleet
            .workers
            .iter()
            .map(|(id, worker)| WorkerSnapshot {
                id: *id,
                info: worker.info,
                requests: worker.requests,
                blocks_in_use: worker.blocks_in_use,
                promised_blocks: worker.promises.len(),
                index: index.stats(*id).unwrap_or_default(),
                engine: worker.engine,
            })
            .collect()
    }
}

impl Shared {
    pub(crate) fn release(&self, hold: Hold, computed: bool) {
        self.fleet().release(hold, computed, self.config.promise_grace);
    }

    // A thread that panicked in one of the methods above can at worst have left a number wrong: no reason to fail all
    // requests from then on.

    fn index(&self) -> RwLockReadGuard<'_, PrefixIndex> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn index_mut(&self) -> RwLockWriteGuard<'_, PrefixIndex> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn fleet(&self) -> MutexGuard<'_, Fleet> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
