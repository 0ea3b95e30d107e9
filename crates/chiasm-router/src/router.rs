//! The router's public face.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chiasm_kv::event::KvEventBatch;
use chiasm_kv::{
    BlockKey, Chore, IndexStats, KeyScheme, KvError, Snapshot, SnapshotError, WorkerIndexStats,
};
use chiasm_types::{MmHash, WorkerId};

use crate::believed::Believed;
use crate::clock::Clock;
use crate::config::RouterConfig;
use crate::error::RouteError;
use crate::explain::Explanation;
use crate::request::{RouteRequest, Splitting};
use crate::reservation::Reservation;
use crate::roster::Hold;
use crate::route::{Encodes, Route};
use crate::select::{self, Assignment, Encoding, Scratch, Stages};
use crate::shared::Shared;
use crate::worker::{Admission, EngineStats, Worker, WorkerInfo, WorkerSnapshot};

/// Picks workers. Cheap to clone; all clones are the same router.
///
/// All methods are short and never wait for anything but each other: fine to call from async code.
/// What takes time in proportion to a worker's blocks, to give them back or to shed, goes to
/// whoever [`Router::in_background`] names.
#[derive(Clone)]
pub struct Router {
    shared: Arc<Shared>,
}

/// Blocks that a batch may add for their list to be worth keeping.
const MOST_ADDED: usize = 1 << 12;

thread_local! {
    /// Keys that the payload which this thread applies has added.
    static ADDED: RefCell<Vec<BlockKey>> = const { RefCell::new(Vec::new()) };
}

impl Router {
    /// A router without workers.
    pub fn new(config: RouterConfig) -> Self {
        Self::with_clock(config, Clock::default())
    }

    /// A router that lives in another time.
    pub fn with_clock(config: RouterConfig, clock: Clock) -> Self {
        Self::make(config, clock, Arc::new(|chore: Chore| chore()))
    }

    /// A router that hands work that takes long to `run`, which has to run it once, on a thread
    /// that may block. Other routers do it within the call. `run` may be called with a lock of the
    /// router held, so it must not use the router.
    pub fn in_background(
        config: RouterConfig,
        run: impl Fn(Chore) + Send + Sync + 'static,
    ) -> Self {
        Self::make(config, Clock::default(), Arc::new(run))
    }

    fn make(
        config: RouterConfig,
        clock: Clock,
        background: Arc<dyn Fn(Chore) + Send + Sync>,
    ) -> Self {
        Self { shared: Arc::new(Shared::new(config, clock, background)) }
    }

    /// Adds a worker with an empty cache. One of the same id is replaced, as after a restart of its
    /// engine: what the old one held or was given no longer counts.
    pub fn add_worker(&self, id: WorkerId, info: WorkerInfo) {
        self.add_worker_with(id, info, KeyScheme::Content);
    }

    /// Does what [`Router::add_worker`] does, for a worker whose blocks have keys of a scheme. All
    /// workers of a class have one scheme.
    pub fn add_worker_with(&self, id: WorkerId, info: WorkerInfo, scheme: KeyScheme) {
        self.shared.index.add_worker_with(id, info.block_size, scheme);
        let replaced = self.shared.roster().add(id, info);
        self.shared.drop_later(replaced);
    }

    /// Forgets a worker, its blocks and the promises of its requests. Reservations for it may live
    /// on.
    pub fn remove_worker(&self, id: WorkerId) {
        let removed = self.shared.roster().remove(id);
        self.shared.index.remove_worker(id);
        self.shared.drop_later(removed);
    }

    /// Takes in a batch of a worker's KV events.
    pub fn apply(&self, id: WorkerId, batch: &KvEventBatch) {
        let added = self.shared.index.apply(id, batch);
        self.confirm(id, &added);
    }

    /// Does what [`Router::apply`] does, from the payload that the engine publishes. `look` sees
    /// the batch before it is applied, and must not apply another.
    ///
    /// # Errors
    /// When the payload can't be read; nothing was applied then, and `look` was not called.
    pub fn apply_payload(
        &self,
        id: WorkerId,
        payload: &[u8],
        look: impl FnOnce(&KvEventBatch),
    ) -> Result<(), KvError> {
        ADDED.with_borrow_mut(|added| {
            added.clear();
            added.shrink_to(MOST_ADDED);
            self.shared.index.apply_payload(id, payload, added, look)?;
            self.confirm(id, added);
            Ok(())
        })
    }

    /// What a worker is known to hold, as bytes for [`Router::restore`] of another router with the
    /// same [`KeySecret`](chiasm_kv::KeySecret). `None` when the worker is unknown.
    pub fn snapshot(&self, id: WorkerId) -> Option<Snapshot> {
        self.shared.index.snapshot(id)
    }

    /// The revision of what a worker is known to hold, which a snapshot has too. `None` when the
    /// worker is unknown.
    pub fn revision(&self, id: WorkerId) -> Option<u64> {
        self.shared.index.stats(id).map(|stats| stats.revision)
    }

    /// Makes a known worker hold what a snapshot says, and nothing else.
    ///
    /// # Errors
    /// The snapshot can't be read; nothing has changed then.
    pub fn restore(&self, id: WorkerId, snapshot: &[u8]) -> Result<(), SnapshotError> {
        self.shared.index.restore(id, snapshot).map(drop)
    }

    /// Ends the promises of blocks that a batch says are held now.
    fn confirm(&self, id: WorkerId, added: &[BlockKey]) {
        let mut roster = self.shared.roster();
        let batches = self.shared.batches.fetch_add(1, Ordering::AcqRel) + 1;
        if let Some(worker) = roster.get_mut(id) {
            worker.events_at = batches;
            let seat = worker.seat;
            added.iter().for_each(|block| roster.promises.confirm(seat, *block));
        }
    }

    /// Forgets what a worker holds, not the worker: its events were lost. What its requests in
    /// flight promise stays.
    pub fn reset_worker_blocks(&self, id: WorkerId) {
        let believed = self.shared.roster().get_mut(id).and_then(|worker| {
            let believed = worker.believed.as_mut()?;
            Some(std::mem::replace(believed, Believed::new(worker.info.total_blocks)))
        });
        self.shared.index.clear(id);
        self.shared.drop_later(believed);
    }

    /// Takes note of whether events of a worker are missing that can still be had. Workers start as
    /// [`CatchingUp`](crate::Knowledge::CatchingUp), but for those that publish none.
    pub fn set_caught_up(&self, id: WorkerId, caught_up: bool) {
        if let Some(worker) = self.shared.roster().get_mut(id) {
            worker.caught_up = caught_up;
        }
    }

    /// Takes note of whether the events that were applied tell all that the worker holds, which
    /// they do from an empty cache on. If not, blocks that follow unknown ones could not be learned
    /// for as long as the engine keeps those; so the worker is also believed to hold what it
    /// computes, as one without events.
    pub fn set_history_known(&self, id: WorkerId, known: bool) {
        let believed = {
            let mut roster = self.shared.roster();
            let worker = roster.get_mut(id).filter(|worker| worker.info.publishes_events);
            let Some(worker) = worker.filter(|worker| known == worker.believed.is_some()) else {
                return;
            };
            let new = (!known).then(|| Believed::new(worker.info.total_blocks));
            std::mem::replace(&mut worker.believed, new)
        };
        if let Some(mut believed) = believed {
            let mut forgotten = Vec::new();
            believed.expire(Duration::MAX, usize::MAX, &mut forgotten);
            self.shared.index.forget(id, &forgotten);
        }
    }

    /// Takes note of what a worker's engine says about itself. The cost goes by what the router
    /// itself gave to the worker, which is known earlier; of the engine's counts it takes the
    /// waiting requests of others.
    pub fn set_stats(&self, id: WorkerId, stats: EngineStats) {
        if let Some(worker) = self.shared.roster().get_mut(id) {
            worker.tell(stats);
        }
    }

    /// Takes note of whether a worker fails to answer: it is not picked then. A request that only
    /// such workers could take gets [`RouteError::Silent`].
    pub fn set_suspect(&self, id: WorkerId, suspect: bool) {
        if let Some(worker) = self.shared.roster().get_mut(id) {
            worker.suspect = suspect;
        }
    }

    /// Sets the requests that a worker may get from now on.
    pub fn set_admission(&self, id: WorkerId, admission: Admission) {
        if let Some(worker) = self.shared.roster().get_mut(id) {
            worker.admission = admission;
        }
    }

    /// Takes note that a worker did not find the embeddings of some of these media items,
    /// whichever: they are encoded again when they are needed next, or found by whoever is to
    /// encode them.
    pub fn forget_embeddings(&self, id: WorkerId, items: &[MmHash]) {
        let mut roster = self.shared.roster();
        let Some(machine) = roster.get(id).map(|worker| worker.info.machine) else { return };
        items.iter().for_each(|item| roster.embeddings.forget(machine, *item));
    }

    /// Picks a worker for a request.
    ///
    /// # Errors
    /// [`RouteError::NoWorker`] when there is none that the request does not exclude,
    /// [`RouteError::Busy`] when there are some but all are busy, [`RouteError::Silent`] when all
    /// are suspect.
    pub fn select(&self, request: &RouteRequest<'_>) -> Result<Reservation, RouteError> {
        self.select_planned(std::slice::from_ref(request))
    }

    /// Picks a worker for a request that was planned for several classes of workers: each worker is
    /// judged by the plan of its class, and workers of other classes don't get it. Session and
    /// exclusions are those of the first plan.
    ///
    /// # Errors
    /// Those of [`Router::select`]; [`RouteError::NoWorker`] without a plan.
    pub fn select_planned(&self, plans: &[RouteRequest<'_>]) -> Result<Reservation, RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let selected = self.shared.assign(plans, &mut scratch, select::choose);
        self.shared.scratch().push(scratch);
        let (hold, assignment) = selected?;
        Ok(Reservation::new(self.shared.clone(), &assignment, hold))
    }

    /// Does what [`Router::select_planned`] does, and tells what was compared. Takes time and
    /// memory in proportion to the workers beyond that: not for each request of many.
    ///
    /// # Errors
    /// Those of [`Router::select_planned`].
    pub fn select_explained(
        &self,
        plans: &[RouteRequest<'_>],
    ) -> Result<(Reservation, Explanation), RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let mut explanation = None;
        let selected = self.shared.assign(plans, &mut scratch, |config, roster, scratch, plans| {
            let assignment = select::choose(config, roster, scratch, plans)?;
            explanation = Some(scratch.explain(config, &assignment, plans));
            Ok(assignment)
        });
        self.shared.scratch().push(scratch);
        let (hold, assignment) = selected?;
        let explanation = explanation.ok_or(RouteError::NoWorker)?;
        Ok((Reservation::new(self.shared.clone(), &assignment, hold), explanation))
    }

    /// Picks a worker that answers and, where workers have roles, it is allowed and cheaper,
    /// another one that computes the prompt before, and others that encode its media items before
    /// that. Policies that know no costs split whatever may be split. Without workers that have
    /// roles it does what [`Router::select_planned`] does.
    ///
    /// # Errors
    /// Those of [`Router::select_planned`], of the worker that answers.
    pub fn select_stages(
        &self,
        plans: &[RouteRequest<'_>],
        splitting: Splitting,
    ) -> Result<Route, RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let route = self.stages(plans, splitting, &mut scratch).map(|(route, _)| route);
        self.shared.scratch().push(scratch);
        route
    }

    /// Does what [`Router::select_stages`] does, and tells what was compared of the workers that
    /// answer. Takes time and memory in proportion to the workers beyond that: not for each request
    /// of many.
    ///
    /// # Errors
    /// Those of [`Router::select_stages`].
    pub fn select_stages_explained(
        &self,
        plans: &[RouteRequest<'_>],
        splitting: Splitting,
    ) -> Result<(Route, Explanation), RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let explained = self.stages(plans, splitting, &mut scratch).map(|(route, stages)| {
            let explanation = scratch.explain(&self.shared.config, &stages.answers, plans);
            (route, explanation)
        });
        self.shared.scratch().push(scratch);
        explained
    }

    fn stages(
        &self,
        plans: &[RouteRequest<'_>],
        splitting: Splitting,
        scratch: &mut Scratch,
    ) -> Result<(Route, Stages), RouteError> {
        let reservation = |(hold, assignment): (Hold, &Assignment)| {
            Reservation::new(self.shared.clone(), assignment, hold)
        };
        let (mut stages, holds) = self.shared.assign_stages(plans, splitting, scratch)?;
        let encodes = holds.encodes.into_iter().zip(std::mem::take(&mut stages.encodes));
        let encodes = encodes.map(|(hold, Encoding { assignment, items })| Encodes {
            reservation: reservation((hold, &assignment)),
            items,
        });
        let route = Route {
            encodes: encodes.collect(),
            embedded: std::mem::take(&mut stages.embedded),
            answers: reservation((holds.answers, &stages.answers)),
            prefills: holds.prefills.zip(stages.prefills.as_ref()).map(reservation),
        };
        Ok((route, stages))
    }

    /// Takes note of a request that another router has given to a worker: until it is dropped, and
    /// in its grace, it counts as one that this router has given to it.
    ///
    /// # Errors
    /// [`RouteError::NoWorker`] when the worker is not there, or of another class than the plan.
    pub fn chosen_elsewhere(
        &self,
        worker: WorkerId,
        plan: &RouteRequest<'_>,
    ) -> Result<Reservation, RouteError> {
        let mut scratch = self.shared.scratch().pop().unwrap_or_default();
        let hold = self.shared.assign(
            std::slice::from_ref(plan),
            &mut scratch,
            |config, roster, scratch, _| {
                select::chosen_elsewhere(config, roster, scratch, plan, worker)
            },
        );
        self.shared.scratch().push(scratch);
        let (hold, assignment) = hold?;
        Ok(Reservation::new(self.shared.clone(), &assignment, hold))
    }

    /// What the index holds for all workers together. Takes a moment per worker: for reports, not
    /// for each request.
    pub fn index_totals(&self) -> IndexStats {
        self.shared.index.totals()
    }

    /// Every worker, in the order of their ids. Takes a moment per worker and promise.
    pub fn workers(&self) -> Vec<WorkerSnapshot> {
        let mut workers: Vec<WorkerSnapshot> = {
            let mut roster = self.shared.roster();
            roster.promises.expire(self.shared.clock.now());
            let promised = roster.promises.counts();
            let snapshot = |(id, worker): (WorkerId, &Worker)| WorkerSnapshot {
                id,
                info: worker.info,
                knowledge: worker.knowledge(),
                requests: worker.requests,
                blocks_in_use: worker.blocks_in_use,
                pending_tokens: worker.pending.tokens,
                promised_blocks: promised.get(&worker.seat).copied().unwrap_or(0),
                index: WorkerIndexStats::default(),
                engine: worker.engine,
            };
            roster.workers().map(snapshot).collect()
        };
        // Waits for a worker whose events are being applied: not while the roster is locked.
        for worker in &mut workers {
            worker.index = self.shared.index.stats(worker.id).unwrap_or_default();
        }
        workers
    }
}
