//! The public interface of the router: workers, events and selection.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chiasm_kv::event::KvEventBatch;
use chiasm_kv::{
    BlockKey, Chore, IndexStats, KeyScheme, KvError, Snapshot, SnapshotError, WorkerIndexStats,
};
use chiasm_types::{MmHash, WorkerId};

use crate::approximate_cache::ApproximateCache;
use crate::clock::Clock;
use crate::config::RouterConfig;
use crate::error::RouteError;
use crate::explain::Explanation;
use crate::request::{RouteRequest, Splitting};
use crate::reservation::Reservation;
use crate::route::{EncodeStage, Route};
use crate::select::{self, Assignment, EncodeAssignment, Scratch, Stages};
use crate::shared::Shared;
use crate::worker::{Admission, EngineStats, Worker, WorkerInfo, WorkerSnapshot};
use crate::worker_table::Allocation;

/// A router that picks workers for requests. Cheap to clone; all clones are the same router.
///
/// All methods are short and only block on each other, so they may be called from async code. Work
/// that takes time proportional to a worker's blocks, to free or to evict them, is handed to the
/// function given to [`Router::with_background`].
#[derive(Clone)]
pub struct Router {
    shared: Arc<Shared>,
}

/// The maximum capacity of [`ADDED_KEYS`] that is kept between payloads.
const MAX_KEPT_KEYS: usize = 1 << 12;

thread_local! {
    /// The block keys added by the payload that this thread is applying.
    static ADDED_KEYS: RefCell<Vec<BlockKey>> = const { RefCell::new(Vec::new()) };
}

impl Router {
    /// Creates a router without workers.
    pub fn new(config: RouterConfig) -> Self {
        Self::with_clock(config, Clock::default())
    }

    /// Creates a router with its own clock.
    pub fn with_clock(config: RouterConfig, clock: Clock) -> Self {
        Self::build(config, clock, Arc::new(|chore: Chore| chore()))
    }

    /// Creates a router that hands long work to `run`. Other routers do it within the call.
    ///
    /// `run` must run the work once, on a thread that may block. It may be called with a lock of
    /// the router held, so it must not use the router.
    pub fn with_background(
        config: RouterConfig,
        run: impl Fn(Chore) + Send + Sync + 'static,
    ) -> Self {
        Self::build(config, Clock::default(), Arc::new(run))
    }

    fn build(
        config: RouterConfig,
        clock: Clock,
        background: Arc<dyn Fn(Chore) + Send + Sync>,
    ) -> Self {
        Self { shared: Arc::new(Shared::new(config, clock, background)) }
    }

    /// Adds a worker with an empty cache. A worker with the same id is replaced, as after a restart
    /// of its engine: its blocks and requests no longer count.
    pub fn add_worker(&self, id: WorkerId, info: WorkerInfo) {
        self.add_worker_with(id, info, KeyScheme::Content);
    }

    /// Adds a worker like [`Router::add_worker`], with the key scheme of its blocks. All workers of
    /// a plan class must have the same scheme.
    pub fn add_worker_with(&self, id: WorkerId, info: WorkerInfo, scheme: KeyScheme) {
        self.shared.index.add_worker_with(id, info.block_size, scheme);
        let replaced = self.shared.table().add(id, info);
        self.shared.drop_later(replaced);
    }

    /// Removes a worker, its blocks and the promises of its requests. Reservations on it may live
    /// on.
    pub fn remove_worker(&self, id: WorkerId) {
        let removed = self.shared.table().remove(id);
        self.shared.index.remove_worker(id);
        self.shared.drop_later(removed);
    }

    /// Applies a batch of a worker's KV events.
    pub fn apply(&self, id: WorkerId, batch: &KvEventBatch) {
        let added = self.shared.index.apply(id, batch);
        self.confirm(id, &added);
    }

    /// Applies a batch of a worker's KV events, from the payload that the engine publishes.
    /// `inspect` gets the batch before it is applied, and must not apply another.
    ///
    /// # Errors
    /// If the payload can't be decoded. Then nothing is applied and `inspect` is not called.
    pub fn apply_payload(
        &self,
        id: WorkerId,
        payload: &[u8],
        inspect: impl FnOnce(&KvEventBatch),
    ) -> Result<(), KvError> {
        ADDED_KEYS.with_borrow_mut(|added| {
            added.clear();
            added.shrink_to(MAX_KEPT_KEYS);
            self.shared.index.apply_payload(id, payload, added, inspect)?;
            self.confirm(id, added);
            Ok(())
        })
    }

    /// Returns the blocks that a worker is known to hold, as bytes for [`Router::restore`] of
    /// another router with the same [`KeySecret`](chiasm_kv::KeySecret). `None` if the worker is
    /// unknown.
    pub fn snapshot(&self, id: WorkerId) -> Option<Snapshot> {
        self.shared.index.snapshot(id)
    }

    /// Returns the revision of the blocks that a worker is known to hold, which is also in a
    /// snapshot. `None` if the worker is unknown.
    pub fn revision(&self, id: WorkerId) -> Option<u64> {
        self.shared.index.stats(id).map(|stats| stats.revision)
    }

    /// Replaces the blocks of a known worker by those of a snapshot.
    ///
    /// # Errors
    /// If the snapshot can't be decoded. Then nothing has changed.
    pub fn restore(&self, id: WorkerId, snapshot: &[u8]) -> Result<(), SnapshotError> {
        self.shared.index.restore(id, snapshot).map(drop)
    }

    /// Ends the promises of the blocks that an event batch has added.
    fn confirm(&self, id: WorkerId, added: &[BlockKey]) {
        let mut table = self.shared.table();
        let batch = self.shared.event_batches.fetch_add(1, Ordering::AcqRel) + 1;
        if let Some(worker) = table.by_id_mut(id) {
            worker.last_event_batch = batch;
            let handle = worker.handle;
            added.iter().for_each(|block| table.promises.confirm(handle, *block));
        }
    }

    /// Removes the blocks of a worker whose events were lost, but not the worker. The promises of
    /// its requests in flight stay.
    pub fn reset_worker_blocks(&self, id: WorkerId) {
        let removed = self.shared.table().by_id_mut(id).and_then(|worker| {
            let cache = worker.approximate_cache.as_mut()?;
            Some(std::mem::replace(cache, ApproximateCache::new(worker.info.total_blocks)))
        });
        self.shared.index.clear(id);
        self.shared.drop_later(removed);
    }

    /// Sets whether all recoverable events of a worker have been applied. Workers that publish
    /// events start as [`CatchingUp`](crate::Knowledge::CatchingUp).
    pub fn set_caught_up(&self, id: WorkerId, caught_up: bool) {
        if let Some(worker) = self.shared.table().by_id_mut(id) {
            worker.caught_up = caught_up;
        }
    }

    /// Sets whether the applied events describe the worker's whole cache, as they do if they start
    /// from an empty cache.
    ///
    /// If not, blocks that follow unknown ones could not be learned for as long as the engine keeps
    /// the unknown ones. So the worker is also assumed to hold the prompts it computes, like a
    /// worker without events.
    pub fn set_history_known(&self, id: WorkerId, known: bool) {
        let removed = {
            let mut table = self.shared.table();
            let worker = table.by_id_mut(id).filter(|worker| worker.info.publishes_events);
            let is_changed = |worker: &&mut Worker| known == worker.approximate_cache.is_some();
            let Some(worker) = worker.filter(is_changed) else { return };
            let new = (!known).then(|| ApproximateCache::new(worker.info.total_blocks));
            std::mem::replace(&mut worker.approximate_cache, new)
        };
        if let Some(mut removed) = removed {
            let mut blocks = Vec::new();
            removed.expire(Duration::MAX, usize::MAX, &mut blocks);
            self.shared.index.forget(id, &blocks);
        }
    }

    /// Sets the statistics that a worker's engine reports.
    ///
    /// The cost only uses the waiting requests of other frontends. For the requests of its own
    /// frontend, the router counts the work that it gave to the worker, which it knows earlier.
    pub fn set_stats(&self, id: WorkerId, stats: EngineStats) {
        if let Some(worker) = self.shared.table().by_id_mut(id) {
            worker.set_stats(stats);
        }
    }

    /// Sets whether a worker fails to answer. A suspect worker is not picked. A request that only
    /// suspect workers could take gets [`RouteError::Suspect`].
    pub fn set_suspect(&self, id: WorkerId, suspect: bool) {
        if let Some(worker) = self.shared.table().by_id_mut(id) {
            worker.suspect = suspect;
        }
    }

    /// Sets the requests that a worker may get from now on.
    pub fn set_admission(&self, id: WorkerId, admission: Admission) {
        if let Some(worker) = self.shared.table().by_id_mut(id) {
            worker.admission = admission;
        }
    }

    /// Removes media items from the embedding store of a worker's machine, after the worker did not
    /// find the embeddings of at least one of them.
    ///
    /// The embeddings are encoded again when they are needed next. Those that are still stored are
    /// found by the worker that is to encode them.
    pub fn forget_embeddings(&self, id: WorkerId, items: &[MmHash]) {
        let mut table = self.shared.table();
        let Some(machine) = table.by_id(id).map(|worker| worker.info.machine) else { return };
        items.iter().for_each(|item| table.embeddings.forget(machine, *item));
    }

    /// Picks a worker for a request.
    ///
    /// # Errors
    /// [`RouteError::NoWorker`] if there is no worker that could take the request, or it excludes
    /// all of them. [`RouteError::Busy`] if all others are busy, or some busy and the rest suspect.
    /// [`RouteError::Suspect`] if all others are suspect.
    pub fn select(&self, request: &RouteRequest<'_>) -> Result<Reservation, RouteError> {
        self.select_planned(std::slice::from_ref(request))
    }

    /// Picks a worker for a request that was planned for several plan classes.
    ///
    /// Each worker is judged by the plan of its class; workers of other classes don't get the
    /// request. Session and exclusions are those of the first plan.
    ///
    /// # Errors
    /// The errors of [`Router::select`]; [`RouteError::NoWorker`] without a plan.
    pub fn select_planned(&self, plans: &[RouteRequest<'_>]) -> Result<Reservation, RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let selected = self.shared.assign(plans, &mut scratch, select::choose);
        self.shared.scratch().push(scratch);
        let (allocation, assignment) = selected?;
        Ok(Reservation::new(self.shared.clone(), &assignment, allocation))
    }

    /// Picks a worker like [`Router::select_planned`], and explains the choice.
    ///
    /// The explanation takes additional time and memory proportional to the number of workers: too
    /// much for each of many requests.
    ///
    /// # Errors
    /// The errors of [`Router::select_planned`].
    pub fn select_explained(
        &self,
        plans: &[RouteRequest<'_>],
    ) -> Result<(Reservation, Explanation), RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let mut explanation = None;
        let selected = self.shared.assign(plans, &mut scratch, |config, table, scratch, plans| {
            let assignment = select::choose(config, table, scratch, plans)?;
            explanation = Some(scratch.explain(config, &assignment, plans));
            Ok(assignment)
        });
        self.shared.scratch().push(scratch);
        let (allocation, assignment) = selected?;
        let explanation = explanation.ok_or(RouteError::NoWorker)?;
        Ok((Reservation::new(self.shared.clone(), &assignment, allocation), explanation))
    }

    /// Picks a worker that answers and, where workers have roles, workers for the earlier stages.
    ///
    /// If splitting is allowed and cheaper, another worker computes the prompt first. If that is
    /// cheaper, other workers encode the media items before the prompt is computed. Policies that
    /// do not compute costs split every request that may be split. If no worker has a role, this is
    /// the same as [`Router::select_planned`].
    ///
    /// # Errors
    /// The errors of [`Router::select_planned`], for the worker that answers.
    pub fn select_stages(
        &self,
        plans: &[RouteRequest<'_>],
        splitting: Splitting,
    ) -> Result<Route, RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let route = self.route(plans, splitting, &mut scratch).map(|(route, _)| route);
        self.shared.scratch().push(scratch);
        route
    }

    /// Picks workers like [`Router::select_stages`], and explains the choice of the worker that
    /// answers.
    ///
    /// The explanation takes additional time and memory proportional to the number of workers: too
    /// much for each of many requests.
    ///
    /// # Errors
    /// The errors of [`Router::select_stages`].
    pub fn select_stages_explained(
        &self,
        plans: &[RouteRequest<'_>],
        splitting: Splitting,
    ) -> Result<(Route, Explanation), RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let explained = self.route(plans, splitting, &mut scratch).map(|(route, stages)| {
            let explanation = scratch.explain(&self.shared.config, &stages.answer, plans);
            (route, explanation)
        });
        self.shared.scratch().push(scratch);
        explained
    }

    /// Picks the workers of all stages and reserves them.
    fn route(
        &self,
        plans: &[RouteRequest<'_>],
        splitting: Splitting,
        scratch: &mut Scratch,
    ) -> Result<(Route, Stages), RouteError> {
        let reservation = |(allocation, assignment): (Allocation, &Assignment)| {
            Reservation::new(self.shared.clone(), assignment, allocation)
        };
        let (mut stages, allocations) = self.shared.assign_stages(plans, splitting, scratch)?;
        let encode_stages = allocations.encode.into_iter().zip(std::mem::take(&mut stages.encode));
        let encode_stages =
            encode_stages.map(|(allocation, EncodeAssignment { assignment, items })| EncodeStage {
                reservation: reservation((allocation, &assignment)),
                items,
            });
        let route = Route {
            encode_stages: encode_stages.collect(),
            embedded: std::mem::take(&mut stages.embedded),
            answer: reservation((allocations.answer, &stages.answer)),
            prefill: allocations.prefill.zip(stages.prefill.as_ref()).map(reservation),
        };
        Ok((route, stages))
    }

    /// Reserves a worker for a request that another router has given to it. Until the reservation
    /// is dropped, and in its grace time, the request counts like one of this router.
    ///
    /// # Errors
    /// [`RouteError::NoWorker`] if the worker is unknown, or the plan is not for its class.
    pub fn reserve_on(
        &self,
        worker: WorkerId,
        plan: &RouteRequest<'_>,
    ) -> Result<Reservation, RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let reserved = self.shared.assign(
            std::slice::from_ref(plan),
            &mut scratch,
            |config, table, scratch, _| select::assign_to(config, table, scratch, plan, worker),
        );
        self.shared.scratch().push(scratch);
        let (allocation, assignment) = reserved?;
        Ok(Reservation::new(self.shared.clone(), &assignment, allocation))
    }

    /// Returns the statistics of the prefix index over all workers. Takes time proportional to the
    /// number of workers: for reports, not for each request.
    pub fn index_totals(&self) -> IndexStats {
        self.shared.index.totals()
    }

    /// Returns all workers, in the order of their ids. Takes time proportional to the number of
    /// workers and promises.
    pub fn workers(&self) -> Vec<WorkerSnapshot> {
        let mut workers: Vec<WorkerSnapshot> = {
            let mut table = self.shared.table();
            table.promises.expire(self.shared.clock.now());
            let promised = table.promises.counts();
            let snapshot = |(id, worker): (WorkerId, &Worker)| WorkerSnapshot {
                id,
                info: worker.info,
                knowledge: worker.knowledge(),
                requests: worker.requests,
                blocks_in_use: worker.blocks_in_use,
                pending_tokens: worker.pending.tokens,
                promised_blocks: promised.get(&worker.handle).copied().unwrap_or(0),
                index: WorkerIndexStats::default(),
                engine: worker.engine,
            };
            table.workers().map(snapshot).collect()
        };
        // Without the lock of the table: this waits for workers whose events are being applied.
        for worker in &mut workers {
            worker.index = self.shared.index.stats(worker.id).unwrap_or_default();
        }
        workers
    }
}
