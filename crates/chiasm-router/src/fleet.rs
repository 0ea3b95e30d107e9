//! The workers and what was given to them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use chiasm_kv::{BlockKey, WorkerIndexStats};
use chiasm_types::{BlockSize, WorkerId};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::promises::{Promises, RequestNumber};

/// What is fixed about a worker while its engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Blocks of the engine's KV cache.
    pub total_blocks: u64,
    /// Tokens per block, as in the engine's events.
    pub block_size: BlockSize,
}

/// What an engine last said about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Requests in its running batch.
    pub running: u64,
    /// Requests in its queue.
    pub waiting: u64,
    /// Part of its KV cache in use, 0 to 1.
    pub kv_usage: f64,
}

/// One worker as the router sees it at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerSnapshot {
    /// Who.
    pub id: WorkerId,
    /// What was said when it was added.
    pub info: WorkerInfo,
    /// Live reservations.
    pub requests: usize,
    /// Prompt blocks of the live reservations. Those that share blocks count each.
    pub blocks_in_use: u64,
    /// Blocks that requests in flight will leave behind and events have not confirmed.
    pub promised_blocks: usize,
    /// What the prefix index knows.
    pub index: WorkerIndexStats,
    /// What the engine says; `None` before it said anything.
    pub engine: Option<EngineStats>,
}

/// All workers. Guarded by one lock of the router.
pub(crate) struct Fleet {
    pub(crate) workers: BTreeMap<WorkerId, Worker>,
    pub(crate) rng: SmallRng,
    /// Whose turn it was last.
    pub(crate) last: Option<WorkerId>,
    requests: u64,
    lives: u64,
}

pub(crate) struct Worker {
    pub(crate) info: WorkerInfo,
    /// Which of the workers that had this id. What earlier ones were given does not concern it.
    pub(crate) life: Life,
    pub(crate) requests: usize,
    pub(crate) blocks_in_use: u64,
    pub(crate) promises: Promises,
    pub(crate) engine: Option<EngineStats>,
}

/// Tells the workers apart that had one id after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life(u64);

/// What one request holds of a worker.
pub(crate) struct Hold {
    pub(crate) worker: WorkerId,
    pub(crate) life: Life,
    pub(crate) request: RequestNumber,
    pub(crate) blocks: u64,
    pub(crate) promised: Vec<BlockKey>,
}

impl Fleet {
    pub(crate) fn new(seed: Option<u64>) -> Self {
        let rng = match seed {
            Some(seed) => SmallRng::seed_from_u64(seed),
            None => SmallRng::from_rng(&mut rand::rng()),
        };
        Self { workers: BTreeMap::new(), rng, last: None, requests: 0, lives: 0 }
    }

    pub(crate) fn add(&mut self, id: WorkerId, info: WorkerInfo) {
        self.lives += 1;
        let life = Life(self.lives);
        let worker = Worker { info, life, requests: 0, blocks_in_use: 0, promises: Promises::default(), engine: None };
        self.workers.insert(id, worker);
    }

    /// Gives a request to a worker, with promises for `promised`. `None` when the worker is gone.
    pub(crate) fn hold(&mut self, id: WorkerId, blocks: u64, promised: Vec<BlockKey>) -> Option<Hold> {
        self.requests += 1;
        let request = RequestNumber(self.requests);
        let worker = self.workers.get_mut(&id)?;
        worker.requests += 1;
        worker.blocks_in_use += blocks;
        worker.promises.make(request, &promised);
        Some(Hold { worker: id, life: worker.life, request, blocks, promised })
    }

    /// Takes a request back. Its promises linger for `grace` when it `computed` its prompt.
    pub(crate) fn release(&mut self, hold: Hold, computed: bool, grace: Duration) {
        let Some(worker) = self.workers.get_mut(&hold.worker).filter(|worker| worker.life == hold.life) else {
            return;
        };
        worker.requests -= 1;
        worker.blocks_in_use -= hold.blocks;
        let now = Instant::now();
        worker.promises.expire(now);
        worker.promises.end(hold.request, hold.promised, computed.then(|| now + grace));
    }
}
