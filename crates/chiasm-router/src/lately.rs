//! How much work workers did lately: who does more than the others for long, and not just for a
//! moment.
//!
//! The cost's other terms see what waits and what runs now. Popular prompts keep the few workers
//! that hold them busier than the rest without making anybody wait, so that no copy would be made
//! elsewhere until many have to.
//!
//! A worker's sum grows with each first token, by what its request waited for, and by what
//! answering takes while requests run. It fades, so that it is about [`FADING`] times the work that
//! the worker does per second.

use std::time::Duration;

use crate::config::Decoding;
use crate::cost::in_blocks;
use crate::worker::Worker;

/// Time in which what was done comes to count less by e.
pub(crate) const FADING: Duration = Duration::from_secs(5);

/// Time between two moments at which all sums fade, by 5 % each.
const PERIOD: Duration = Duration::from_millis(250);

/// The sums of all workers together.
#[derive(Debug, Default)]
pub(crate) struct Lately {
    /// The sum of the workers' sums.
    sum: f64,
    faded_at: Duration,
}

impl Lately {
    /// The mean sum of so many workers.
    pub(crate) fn mean(&self, workers: usize) -> f64 {
        self.sum / workers.max(1) as f64
    }

    /// A worker's sum has grown by so much; less when it is gone.
    pub(crate) fn grow(&mut self, by: f64) {
        self.sum += by;
    }

    /// Brings the sums of all workers up to date, if it is time to. `prefill` is what computing a
    /// block costs.
    pub(crate) fn fade<'a>(
        &mut self,
        now: Duration,
        prefill: f64,
        decoding: Decoding,
        workers: impl Iterator<Item = &'a mut Worker>,
    ) {
        let passed = now.saturating_sub(self.faded_at);
        if passed < PERIOD {
            return;
        }
        self.faded_at = now;
        let left = (-passed.as_secs_f64() / FADING.as_secs_f64()).exp();
        // What has grown evenly since, each part faded for as long as it is old.
        let grown = (1.0 - left) * FADING.as_secs_f64();
        self.sum = 0.0;
        for worker in workers {
            let in_use = worker.blocks_in_use as f64 * worker.info.block_size.get() as f64;
            let blocks =
                in_blocks(worker.requests as f64) + decoding.read_per_block * in_blocks(in_use);
            let answering = prefill * decoding.steps_per_second * blocks;
            worker.lately = left * worker.lately + grown * answering;
            self.sum += worker.lately;
        }
    }
}
