//! The state that all clones of a router share: assigns requests to workers under the lock of the
//! worker table, and releases them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_kv::{Chore, PrefixIndex};
use chiasm_types::{MmHash, WorkerId};

use crate::approximate_cache::ApproximateCache;
use crate::clock::Clock;
use crate::config::{Policy, RouterConfig};
use crate::error::RouteError;
use crate::request::{RouteRequest, Splitting};
use crate::select::{self, Assignment, EncodeAssignment, Scratch, Stages};
use crate::worker_table::{Allocation, WorkerTable};

/// The pause between two expirations of the approximate caches, as a walk over all of them takes a
/// while. A block may be kept this much longer than its time to live.
const EXPIRY_PAUSE: Duration = Duration::from_secs(1);
/// The maximum number of blocks of a worker that are expired at once, in about a millisecond; the
/// rest expires with the next requests.
const MAX_EXPIRED_BLOCKS: usize = 4096;

/// The shared state. The index has locks of its own. They may be taken while the worker table is
/// locked, not the other way round. No lock is held longer than a call.
pub(crate) struct Shared {
    pub(crate) config: RouterConfig,
    pub(crate) clock: Clock,
    pub(crate) index: PrefixIndex,
    table: Mutex<WorkerTable>,
    /// The number of event batches whose blocks have been confirmed.
    pub(crate) event_batches: AtomicU64,
    /// The time of the next expiration of the approximate caches, in nanoseconds; `u64::MAX` for
    /// never.
    expire_caches_at: AtomicU64,
    /// Buffers that no selection is using now.
    scratch: Mutex<Vec<Scratch>>,
    background: Arc<dyn Fn(Chore) + Send + Sync>,
}

/// The allocations of a request's stages, in the order of [`Stages`].
pub(crate) struct StageAllocations {
    pub(crate) answer: Allocation,
    pub(crate) prefill: Option<Allocation>,
    pub(crate) encode: Vec<Allocation>,
}

/// The locked worker table, after the lookup of a request in the index.
struct Lookup<'a> {
    table: MutexGuard<'a, WorkerTable>,
    /// The number of event batches that had been confirmed before the lookup.
    event_batches: u64,
}

impl Shared {
    /// Creates the state of a router without workers.
    pub(crate) fn new(
        config: RouterConfig,
        clock: Clock,
        background: Arc<dyn Fn(Chore) + Send + Sync>,
    ) -> Self {
        let table = Mutex::new(WorkerTable::new(&config));
        let index =
            config.index_max_bytes.map_or_else(PrefixIndex::new, PrefixIndex::with_max_bytes);
        let run = background.clone();
        let index = index.in_background(move |chore| run(chore));
        Self {
            config,
            clock,
            index,
            table,
            event_batches: AtomicU64::new(0),
            expire_caches_at: AtomicU64::new(u64::MAX),
            scratch: Mutex::default(),
            background,
        }
    }

    /// Assigns a request to the worker that `choose` returns.
    pub(crate) fn assign(
        &self,
        plans: &[RouteRequest<'_>],
        scratch: &mut Scratch,
        choose: impl FnOnce(
            &RouterConfig,
            &mut WorkerTable,
            &mut Scratch,
            &[RouteRequest<'_>],
        ) -> Result<Assignment, RouteError>,
    ) -> Result<(Allocation, Assignment), RouteError> {
        let Lookup { mut table, event_batches } = self.look_up(plans, scratch);
        let assignment = choose(&self.config, &mut table, scratch, plans)?;
        let allocation = self.allocate(&mut table, event_batches, plans, &assignment)?;
        if self.config.policy == Policy::KvMedia {
            scratch.record_media_use(&mut table, &assignment);
        }
        Ok((allocation, assignment))
    }

    /// Assigns the stages of a request to workers. Returns the workers and the allocation on each.
    pub(crate) fn assign_stages(
        &self,
        plans: &[RouteRequest<'_>],
        splitting: Splitting,
        scratch: &mut Scratch,
    ) -> Result<(Stages, StageAllocations), RouteError> {
        let Lookup { mut table, event_batches } = self.look_up(plans, scratch);
        let stages = select::choose_stages(&self.config, &mut table, scratch, plans, splitting)?;
        let prefill = match &stages.prefill {
            Some(prefill) => Some(self.allocate(&mut table, event_batches, plans, prefill)?),
            None => None,
        };
        let answer = self.allocate(&mut table, event_batches, plans, &stages.answer)?;
        let mut encode = Vec::with_capacity(stages.encode.len());
        for EncodeAssignment { assignment, items } in &stages.encode {
            let allocation = table.allocate(assignment.handle, 0, assignment.pending, &[], 0);
            let mut allocation = allocation.ok_or(RouteError::NoWorker)?;
            table.begin_encoding(&mut allocation, items);
            encode.push(allocation);
        }
        let first_stages =
            stages.encode.iter().map(|encode| &encode.assignment).chain(&stages.prefill);
        first_stages.for_each(|assignment| table.use_admission(assignment.handle));
        table.use_admission(stages.answer.handle);
        if self.config.policy == Policy::KvMedia {
            // The worker that answers gets the tensors too, also if another one computes the
            // prompt; then it encodes nothing.
            if let Some(prefill) = &stages.prefill {
                scratch.record_media_use(&mut table, prefill);
            }
            scratch.record_media_use(&mut table, &stages.answer);
        }
        Ok((stages, StageAllocations { answer, prefill, encode }))
    }

    /// Looks up the blocks of a request that workers hold, then locks the worker table and brings
    /// it up to date.
    fn look_up(&self, plans: &[RouteRequest<'_>], scratch: &mut Scratch) -> Lookup<'_> {
        let event_batches = self.event_batches.load(Ordering::Acquire);
        let now = self.clock.now();
        self.expire_approximate_caches(now);
        for (plan, scratch) in plans.iter().zip(scratch.plans_mut(plans.len())) {
            self.index.lookup(plan.keys, &mut scratch.overlaps);
        }
        let mut table = self.table();
        table.promises.expire(now);
        table.update_recent_work(now, self.config.weights.prefill, self.config.decoding);
        Lookup { table, event_batches }
    }

    /// Allocates a request on a worker, with promises of the blocks that the worker will hold.
    ///
    /// `event_batches` is the number of event batches that had been confirmed before the lookup.
    fn allocate(
        &self,
        table: &mut WorkerTable,
        event_batches: u64,
        plans: &[RouteRequest<'_>],
        assignment: &Assignment,
    ) -> Result<Allocation, RouteError> {
        let keys = plans.get(assignment.plan).map_or(&[][..], |plan| plan.keys);
        let allocation = table.allocate(
            assignment.handle,
            assignment.blocks,
            assignment.pending,
            keys,
            assignment.overlap,
        );
        let allocation = allocation.ok_or(RouteError::NoWorker)?;
        // Blocks that were confirmed between the lookup and the promise would stay promised, even
        // after their eviction.
        let worker = table.worker(assignment.handle);
        if worker.is_some_and(|worker| worker.last_event_batch > event_batches) {
            let held = self.index.overlap(assignment.id, keys);
            for key in keys.iter().take(held).skip(assignment.overlap) {
                table.promises.confirm(assignment.handle, *key);
            }
        }
        Ok(allocation)
    }

    /// Records that a worker has computed the prompt of a request, and adds the prompt to the
    /// worker's approximate cache.
    pub(crate) fn prompt_computed(&self, id: WorkerId, allocation: &mut Allocation) {
        let mut table = self.table();
        table.prompt_computed(allocation);
        let keys = std::mem::take(&mut allocation.approximate_keys);
        let worker = table.worker_mut(allocation.worker);
        let cache = worker.and_then(|worker| worker.approximate_cache.as_mut());
        let Some(cache) = cache else { return };
        let now = self.clock.now();
        let mut evicted = Vec::new();
        let kept = cache.insert(&keys, now, &mut evicted);
        self.index.presume(id, kept);
        self.index.forget(id, &evicted);
        keys.iter().for_each(|key| table.promises.confirm(allocation.worker, *key));
        let expires_at = nanoseconds(now + self.config.approximate_ttl);
        self.expire_caches_at.fetch_min(expires_at, Ordering::AcqRel);
    }

    /// Records that the worker of an allocation has stored the embeddings of an item.
    pub(crate) fn encoded(&self, allocation: &Allocation, item: MmHash, bytes: u64) {
        self.table().encoded(allocation, item, bytes);
    }

    /// Removes blocks from the approximate caches whose time to live is over: up to
    /// [`EXPIRY_PAUSE`] later, and at most [`MAX_EXPIRED_BLOCKS`] per worker at once.
    fn expire_approximate_caches(&self, now: Duration) {
        if nanoseconds(now) < self.expire_caches_at.load(Ordering::Acquire) {
            return;
        }
        let mut table = self.table();
        let Some(since) = now.checked_sub(self.config.approximate_ttl) else { return };
        let mut next = u64::MAX;
        let mut expired = Vec::new();
        for (id, cache) in table.approximate_caches_mut() {
            cache.expire(since, MAX_EXPIRED_BLOCKS, &mut expired);
            self.index.forget(id, &expired);
            let pause =
                if expired.len() < MAX_EXPIRED_BLOCKS { EXPIRY_PAUSE } else { Duration::ZERO };
            expired.clear();
            if let Some(oldest) = cache.oldest() {
                let expires_at = oldest + self.config.approximate_ttl;
                next = next.min(nanoseconds(expires_at.max(now + pause)));
            }
        }
        self.expire_caches_at.store(next, Ordering::Release);
    }

    /// Drops an approximate cache in the background, as a large one takes a while to drop.
    pub(crate) fn drop_later(&self, cache: Option<ApproximateCache>) {
        if let Some(cache) = cache.filter(|cache| cache.oldest().is_some()) {
            (self.background)(Box::new(move || drop(cache)));
        }
    }

    /// Takes a request back from a worker; `computed` is `true` if its prompt was computed.
    pub(crate) fn release(&self, allocation: Allocation, computed: bool) {
        let until = computed.then(|| self.clock.now() + self.config.promise_grace);
        self.table().release(allocation, until);
    }

    // Poisoned locks are ignored: a panic in one of the methods above can at worst leave a number
    // wrong, which is no reason to fail all requests from then on.

    /// Locks the worker table.
    pub(crate) fn table(&self) -> MutexGuard<'_, WorkerTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the list of unused buffers.
    pub(crate) fn scratch(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Converts a time since the clock's start to nanoseconds, which fit for 584 years.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
