//! The workers and the requests that were given to them.

use std::time::Duration;

use chiasm_kv::BlockKey;
use chiasm_types::{MmHash, Role, WorkerId};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::approximate_cache::ApproximateCache;
use crate::config::{Decoding, RouterConfig};
use crate::embeddings::EmbeddingStores;
use crate::media_holders::{CacheEstimate, MediaCaches, MediaHolders};
use crate::promises::{Promises, RequestNumber};
use crate::recent_work::RecentWork;
use crate::sessions::Sessions;
use crate::worker::{Admission, PendingWork, Worker, WorkerInfo};
use crate::worker_handle::WorkerHandle;

/// The workers that can be picked and the requests given to them. One lock of the router guards
/// it.
pub(crate) struct WorkerTable {
    /// The workers by index. A worker keeps its index. The indices of removed workers are reused.
    entries: Vec<Option<Worker>>,
    /// Ids and indices of the workers, in the order of their ids.
    order: Vec<(WorkerId, u32)>,
    pub(crate) promises: Promises,
    pub(crate) media: MediaHolders,
    pub(crate) embeddings: EmbeddingStores,
    pub(crate) sessions: Sessions,
    pub(crate) rng: SmallRng,
    /// The worker that answers the last request, for round-robin.
    pub(crate) last_answer: Option<WorkerId>,
    /// The worker that last got a prompt to compute for another one, for round-robin.
    pub(crate) last_prefill: Option<WorkerId>,
    /// The work of a typical request, in the unit of costs. Used for the requests that engines have
    /// from other frontends.
    pub(crate) typical_work: f64,
    recent_work: RecentWork,
    requests: u64,
    generations: u32,
    /// The number of workers whose role is not [`Role::Aggregated`].
    specialized_workers: usize,
    /// The number of workers whose role is [`Role::Encode`].
    encode_workers: usize,
}

/// The share of a worker that one request has.
pub(crate) struct Allocation {
    pub(crate) worker: WorkerHandle,
    pub(crate) request: RequestNumber,
    pub(crate) blocks: u64,
    /// The work before the request's first token; zero once it has that token.
    pub(crate) pending: PendingWork,
    pub(crate) promised: Vec<BlockKey>,
    /// Keys of the whole prompt, if the worker has an approximate cache; otherwise empty.
    pub(crate) approximate_keys: Vec<BlockKey>,
    /// The media items that the worker encodes for others.
    encode: Option<EncodeWork>,
}

struct EncodeWork {
    machine: u64,
    items: Vec<MmHash>,
}

impl WorkerTable {
    /// Creates an empty table.
    pub(crate) fn new(config: &RouterConfig) -> Self {
        let rng = match config.seed {
            Some(seed) => SmallRng::seed_from_u64(seed),
            None => SmallRng::from_rng(&mut rand::rng()),
        };
        Self {
            entries: Vec::new(),
            order: Vec::new(),
            promises: Promises::default(),
            media: MediaHolders::default(),
            embeddings: EmbeddingStores::default(),
            sessions: Sessions::new(config.max_sessions),
            rng,
            last_answer: None,
            last_prefill: None,
            typical_work: 0.0,
            recent_work: RecentWork::default(),
            requests: 0,
            generations: 0,
            specialized_workers: 0,
            encode_workers: 0,
        }
    }

    /// Adds a worker, replacing one of the same id. Returns the approximate cache of the replaced
    /// worker.
    pub(crate) fn add(&mut self, id: WorkerId, info: WorkerInfo) -> Option<ApproximateCache> {
        let replaced = self.remove(id);
        let index = self.entries.iter().position(Option::is_none).unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.generations = self.generations.wrapping_add(1);
        // Starts at the mean: from 0, the worker would be preferred until it had caught up.
        let recent_work = self.mean_recent_work();
        self.recent_work.add(recent_work);
        self.specialized_workers += usize::from(info.role != Role::Aggregated);
        self.encode_workers += usize::from(info.role == Role::Encode);
        self.embeddings.add_worker(info.machine, info.embedding_store_bytes);
        let at = self.order.partition_point(|(other, _)| *other < id);
        self.order.insert(at, (id, index as u32));
        self.entries[index] = Some(Worker {
            id,
            info,
            handle: WorkerHandle { index: index as u32, generation: self.generations },
            requests: 0,
            blocks_in_use: 0,
            pending: PendingWork::default(),
            recent_work,
            media_caches: MediaCaches {
                tensors: CacheEstimate::new(info.receiver_cache_elements),
                embeddings: CacheEstimate::new(info.encoder_cache_tokens),
            },
            engine: None,
            waiting_of_others: 0,
            suspect: false,
            admission: Admission::All,
            caught_up: false,
            approximate_cache: (!info.publishes_events)
                .then(|| ApproximateCache::new(info.total_blocks)),
            last_event_batch: 0,
        });
        replaced
    }

    /// Records that a worker was picked: [`Admission::One`] becomes [`Admission::None`].
    pub(crate) fn use_admission(&mut self, worker: WorkerHandle) {
        let is_last = |worker: &&mut Worker| worker.admission == Admission::One;
        if let Some(worker) = self.worker_mut(worker).filter(is_last) {
            worker.admission = Admission::None;
        }
    }

    /// Removes a worker and returns its approximate cache.
    pub(crate) fn remove(&mut self, id: WorkerId) -> Option<ApproximateCache> {
        let at = self.order.binary_search_by_key(&id, |(other, _)| *other).ok()?;
        let (_, index) = self.order.remove(at);
        let removed = self.entries[index as usize].take()?;
        self.recent_work.add(-removed.recent_work);
        self.specialized_workers -= usize::from(removed.info.role != Role::Aggregated);
        self.encode_workers -= usize::from(removed.info.role == Role::Encode);
        self.embeddings.remove_worker(removed.info.machine, removed.info.embedding_store_bytes);
        removed.approximate_cache
    }

    /// Returns `true` if some workers have the role [`Role::Encode`].
    pub(crate) fn has_encode_workers(&self) -> bool {
        self.encode_workers > 0
    }

    /// Returns `true` if some workers have a role other than [`Role::Aggregated`].
    pub(crate) fn has_roles(&self) -> bool {
        self.specialized_workers > 0
    }

    /// Returns the upper bound of the indices in worker handles.
    pub(crate) fn index_count(&self) -> usize {
        self.entries.len()
    }

    /// Returns the workers in the order of their ids.
    pub(crate) fn workers(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.order
            .iter()
            .filter_map(|(id, index)| Some((*id, self.entries[*index as usize].as_ref()?)))
    }

    /// Returns the approximate caches of the workers that have one.
    pub(crate) fn approximate_caches_mut(
        &mut self,
    ) -> impl Iterator<Item = (WorkerId, &mut ApproximateCache)> {
        self.entries
            .iter_mut()
            .flatten()
            .filter_map(|worker| Some((worker.id, worker.approximate_cache.as_mut()?)))
    }

    /// Returns the worker with this id.
    pub(crate) fn by_id(&self, id: WorkerId) -> Option<&Worker> {
        let at = self.order.binary_search_by_key(&id, |(other, _)| *other).ok()?;
        self.entries[self.order[at].1 as usize].as_ref()
    }

    /// Returns the worker with this id.
    pub(crate) fn by_id_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        let at = self.order.binary_search_by_key(&id, |(other, _)| *other).ok()?;
        self.entries[self.order[at].1 as usize].as_mut()
    }

    /// Returns the worker of a handle, `None` if it was removed.
    pub(crate) fn worker(&self, handle: WorkerHandle) -> Option<&Worker> {
        let worker = self.entries.get(handle.index as usize)?.as_ref();
        worker.filter(|worker| worker.handle == handle)
    }

    /// Returns the worker of a handle, `None` if it was removed.
    pub(crate) fn worker_mut(&mut self, handle: WorkerHandle) -> Option<&mut Worker> {
        let worker = self.entries.get_mut(handle.index as usize)?.as_mut();
        worker.filter(|worker| worker.handle == handle)
    }

    /// Decays and updates the recent work of all workers if an update is due. `prefill_cost` is the
    /// cost of computing one block.
    pub(crate) fn update_recent_work(
        &mut self,
        now: Duration,
        prefill_cost: f64,
        decoding: Decoding,
    ) {
        self.recent_work.update(now, prefill_cost, decoding, self.entries.iter_mut().flatten());
    }

    /// Returns the mean recent work of a worker, in the unit of costs.
    pub(crate) fn mean_recent_work(&self) -> f64 {
        self.recent_work.mean(self.order.len())
    }

    /// Removes media items that no worker has any more, if a sweep is due.
    pub(crate) fn sweep_media(&mut self) {
        let Self { media, entries, .. } = self;
        media.sweep_if_due(|handle| {
            let worker = entries.get(handle.index as usize)?.as_ref();
            worker.filter(|worker| worker.handle == handle).map(|worker| worker.media_caches)
        });
    }

    /// Gives a request to a worker and promises the `keys` from index `overlap` on. Returns `None`
    /// if the worker was removed.
    pub(crate) fn allocate(
        &mut self,
        handle: WorkerHandle,
        blocks: u64,
        pending: PendingWork,
        keys: &[BlockKey],
        overlap: usize,
    ) -> Option<Allocation> {
        self.requests += 1;
        let request = RequestNumber(self.requests);
        let worker = self.worker_mut(handle)?;
        worker.requests += 1;
        worker.blocks_in_use += blocks;
        worker.pending.tokens += pending.tokens;
        worker.pending.work += pending.work;
        let approximate_keys =
            if worker.approximate_cache.is_some() { keys.to_vec() } else { Vec::new() };
        let promised = keys[overlap..].to_vec();
        self.promises.add(handle, request, &promised);
        // A moving average over about the last hundred requests.
        self.typical_work += (pending.work - self.typical_work) / 100.0;
        Some(Allocation {
            worker: handle,
            request,
            blocks,
            pending,
            promised,
            approximate_keys,
            encode: None,
        })
    }

    /// Adds media items that the worker of an allocation encodes for others.
    pub(crate) fn begin_encoding(&mut self, allocation: &mut Allocation, items: &[MmHash]) {
        let worker = self.worker(allocation.worker);
        let Some(machine) = worker.map(|worker| worker.info.machine) else { return };
        for item in items {
            self.embeddings.begin_encoding(machine, *item, allocation.worker);
        }
        allocation.encode = Some(EncodeWork { machine, items: items.to_vec() });
    }

    /// Records that the worker of an allocation has stored the embeddings of an item.
    pub(crate) fn encoded(&mut self, allocation: &Allocation, item: MmHash, bytes: u64) {
        let Some(EncodeWork { machine, .. }) = allocation.encode else { return };
        self.embeddings.insert(machine, item, bytes);
    }

    /// Records that a worker has computed the prompt of a request.
    pub(crate) fn prompt_computed(&mut self, allocation: &mut Allocation) {
        let work = self.remove_pending(allocation);
        if let Some(worker) = self.worker_mut(allocation.worker) {
            worker.recent_work += work;
            self.recent_work.add(work);
        }
    }

    /// Removes the pending work of a request and returns it.
    fn remove_pending(&mut self, allocation: &mut Allocation) -> f64 {
        let pending = std::mem::take(&mut allocation.pending);
        if let Some(worker) = self.worker_mut(allocation.worker) {
            worker.pending.tokens -= pending.tokens;
            worker.pending.work -= pending.work;
            if worker.pending.tokens == 0 {
                // Drops the rounding error.
                worker.pending.work = 0.0;
            }
        }
        pending.work
    }

    /// Takes a request back from a worker. Its promises end at `until`, or at once if it is `None`.
    pub(crate) fn release(&mut self, mut allocation: Allocation, until: Option<Duration>) {
        // Not added to the recent work: without a first token it is unknown how much was done.
        self.remove_pending(&mut allocation);
        let handle = allocation.worker;
        let until = until.filter(|_| self.worker(handle).is_some());
        if let Some(worker) = self.worker_mut(handle) {
            worker.requests -= 1;
            worker.blocks_in_use -= allocation.blocks;
        }
        if let Some(EncodeWork { machine, items }) = allocation.encode {
            items.iter().for_each(|item| self.embeddings.end_encoding(machine, *item, handle));
        }
        self.promises.end(handle, allocation.request, allocation.promised, until);
    }
}
