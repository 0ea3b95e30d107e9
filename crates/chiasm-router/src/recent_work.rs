//! An exponentially decayed sum of the work that each worker has done.
//!
//! The other terms of the cost see what is queued and running now. They miss a worker that is
//! steadily busier than the rest because it holds a popular prefix: nobody queues yet, so no second
//! copy is made until many requests have to wait. This term makes that imbalance visible early.
//!
//! A worker's recent work grows by the prefill work of each request at its first token, and by the
//! decode work while requests run. It decays with time constant [`DECAY`], so it converges to
//! `DECAY` times the worker's work per second.

use std::time::Duration;

use crate::config::Decoding;
use crate::cost::in_blocks;
use crate::worker::Worker;

/// The time in which past work loses weight by a factor of e.
pub(crate) const DECAY: Duration = Duration::from_secs(5);

/// The interval between two updates of all workers; work decays by 5 % per interval.
const UPDATE_INTERVAL: Duration = Duration::from_millis(250);

/// The decayed work of all workers.
#[derive(Debug, Default)]
pub(crate) struct RecentWork {
    total: f64,
    updated_at: Duration,
}

impl RecentWork {
    /// Returns the mean over this number of workers.
    pub(crate) fn mean(&self, workers: usize) -> f64 {
        self.total / workers.max(1) as f64
    }

    /// Adds `work` to the total; negative when a worker leaves.
    pub(crate) fn add(&mut self, work: f64) {
        self.total += work;
    }

    /// Decays and updates the work of all workers, at most once per [`UPDATE_INTERVAL`].
    ///
    /// `prefill_cost` is the cost of computing one block.
    pub(crate) fn update<'a>(
        &mut self,
        now: Duration,
        prefill_cost: f64,
        decoding: Decoding,
        workers: impl Iterator<Item = &'a mut Worker>,
    ) {
        let elapsed = now.saturating_sub(self.updated_at);
        if elapsed < UPDATE_INTERVAL {
            return;
        }
        self.updated_at = now;
        let decay = (-elapsed.as_secs_f64() / DECAY.as_secs_f64()).exp();
        // The integral of the decay over `elapsed`, for work that accrued at a constant rate.
        let accrual = (1.0 - decay) * DECAY.as_secs_f64();
        self.total = 0.0;
        for worker in workers {
            let context_tokens = worker.blocks_in_use as f64 * worker.info.block_size.get() as f64;
            let blocks_per_step = in_blocks(worker.requests as f64)
                + decoding.read_per_block * in_blocks(context_tokens);
            let work_per_second = prefill_cost * decoding.steps_per_second * blocks_per_step;
            worker.recent_work = decay * worker.recent_work + accrual * work_per_second;
            self.total += worker.recent_work;
        }
    }
}
