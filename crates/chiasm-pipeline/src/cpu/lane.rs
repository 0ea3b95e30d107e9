//! Threads for work of one size.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chiasm_limit::Owner;

use super::metrics::{CpuMetrics, LaneMetrics};
use super::waiting::{Key, Waiting};

/// A number of threads that start when there is work for them, do that whose turn it is, and end
/// when there has been none for a while: each keeps the memory of the last image that it decoded.
pub(super) struct Lane {
    name: &'static str,
    most_threads: usize,
    niceness: i32,
    /// How long a thread waits for work before it ends.
    patience: Duration,
    metrics: LaneMetrics,
    state: Mutex<State>,
    /// Told when there is work, or no more to come.
    work: Condvar,
}

#[derive(Default)]
struct State {
    waiting: Waiting<Job>,
    threads: usize,
    /// Threads that wait for work.
    idle: usize,
    /// The price of what waits or is being done.
    pending: Duration,
    closed: bool,
}

struct Job {
    run: Box<dyn FnOnce() + Send>,
    since: Instant,
    price: Duration,
}

/// A job's place among those that wait. When it is dropped the job goes too, unless it has begun.
pub(super) struct Place {
    lane: Arc<Lane>,
    key: Key,
}

impl Lane {
    /// Does at most so many jobs at once, on threads that are nicer than others by `niceness` and
    /// wait for work for `patience`.
    pub(super) fn new(
        name: &'static str,
        most_threads: usize,
        niceness: i32,
        patience: Duration,
        metrics: &CpuMetrics,
    ) -> Self {
        let metrics = metrics.lane(name);
        Self {
            name,
            most_threads,
            niceness,
            patience,
            metrics,
            state: Mutex::default(),
            work: Condvar::new(),
        }
    }

    /// Threads that work or wait for work.
    #[cfg(test)]
    pub(super) fn threads(&self) -> usize {
        self.state().threads
    }

    /// Threads at work.
    pub(super) fn busy(&self) -> usize {
        let state = self.state();
        state.threads - state.idle
    }

    /// Whether a thread would begin with a job at once.
    pub(super) fn is_free(&self) -> bool {
        let state = self.state();
        state.waiting.len() + state.threads - state.idle < self.most_threads
    }

    /// The price of the jobs that wait or are being done.
    pub(super) fn pending(&self) -> Duration {
        self.state().pending
    }

    /// Leaves a job of this owner and price to the threads. If none can be started it is dropped.
    pub(super) fn push(
        self: &Arc<Self>,
        owner: Option<Owner>,
        price: Duration,
        due: Instant,
        run: Box<dyn FnOnce() + Send>,
    ) -> Place {
        let mut state = self.state();
        let key = state.waiting.push(owner, price, due, Job { run, since: Instant::now(), price });
        state.pending = state.pending.saturating_add(price);
        self.metrics.waiting.inc();
        // Those that have been told of earlier jobs may not have woken up yet, so they count as
        // idle.
        let start = state.waiting.len() > state.idle && state.threads < self.most_threads;
        if start {
            state.threads += 1;
        }
        drop(state);
        if start {
            self.start_thread();
        } else {
            self.work.notify_one();
        }
        Place { lane: self.clone(), key }
    }

    /// Drops what waits and lets the threads end when they have done what they are at.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let dropped = std::mem::take(&mut state.waiting);
        // Nobody asks any more.
        state.pending = Duration::ZERO;
        drop(state);
        self.metrics.waiting.dec_by(dropped.len() as i64);
        self.work.notify_all();
    }

    fn start_thread(self: &Arc<Self>) {
        let lane = self.clone();
        let work = move || {
            give_way(lane.niceness);
            let mut done = Duration::ZERO;
            while let Some(job) = lane.next(done) {
                lane.metrics.waited.observe(job.since.elapsed().as_secs_f64());
                // Whoever awaits the job finds that it is gone.
                drop(catch_unwind(AssertUnwindSafe(job.run)));
                done = job.price;
            }
        };
        let Err(error) = std::thread::Builder::new().name(format!("cpu-{}", self.name)).spawn(work)
        else {
            return;
        };
        tracing::warn!(%error, lane = self.name, "a thread for CPU-heavy work can't be started");
        let mut state = self.state();
        state.threads -= 1;
        // Others will do the work; without any it would wait for ever.
        let mut dropped = Waiting::default();
        if state.threads == 0 {
            dropped = std::mem::take(&mut state.waiting);
            state.pending = Duration::ZERO;
        }
        drop(state);
        self.metrics.waiting.dec_by(dropped.len() as i64);
    }

    /// Waits for the job whose turn it is, after one of this price; `None` tells the thread to end.
    fn next(&self, done: Duration) -> Option<Job> {
        let mut state = self.state();
        state.pending = state.pending.saturating_sub(done);
        let mut waited_long = false;
        loop {
            if let Some(job) = state.waiting.pop() {
                self.metrics.waiting.dec();
                return Some(job);
            }
            if state.closed || waited_long {
                // Whoever pushes the next job sees that it has to start a thread.
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            let waited = self
                .work
                .wait_timeout(state, self.patience)
                .unwrap_or_else(PoisonError::into_inner);
            waited_long = waited.1.timed_out();
            state = waited.0;
            state.idle -= 1;
        }
    }

    /// The state is never left half-changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let dropped = {
            let mut state = self.lane.state();
            let dropped = state.waiting.remove(self.key);
            let price = dropped.as_ref().map_or(Duration::ZERO, |job| job.price);
            state.pending = state.pending.saturating_sub(price);
            dropped
        };
        if dropped.is_some() {
            self.lane.metrics.waiting.dec();
        }
    }
}

/// Lets other threads go before this one. Only on Linux: elsewhere niceness is the process's.
pub fn give_way(niceness: i32) {
    #[cfg(target_os = "linux")]
    if niceness > 0
        && let Err(error) = rustix::process::nice(niceness)
    {
        tracing::debug!(%error, "a thread keeps its priority");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = niceness;
}
