//! A pool of threads for work of one size.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chiasm_limit::Owner;

use crate::metrics::{CpuMetrics, LaneMetrics};
use crate::waiting::{FairQueue, JobKey};

/// A pool of threads that start on demand and end after a while without work, because each keeps
/// the memory of the last image that it decoded.
pub(crate) struct Lane {
    name: &'static str,
    max_threads: usize,
    niceness: i32,
    /// The time after which a thread without work ends.
    idle_timeout: Duration,
    metrics: LaneMetrics,
    state: Mutex<State>,
    /// Notified when a job is pushed, and when the lane is closed.
    work: Condvar,
}

#[derive(Default)]
struct State {
    waiting: FairQueue<Job>,
    threads: usize,
    /// The number of threads that wait for work.
    idle: usize,
    /// The total price of waiting and running jobs.
    pending: Duration,
    closed: bool,
}

struct Job {
    run: Box<dyn FnOnce() + Send>,
    since: Instant,
    price: Duration,
}

/// A queued job. Dropping this cancels the job unless it has begun.
pub(crate) struct QueuedJob {
    lane: Arc<Lane>,
    key: JobKey,
}

impl Lane {
    /// Creates a lane that runs at most `max_threads` jobs at once, on threads with `niceness`
    /// added to their niceness. Threads end after `idle_timeout` without work.
    pub(crate) fn new(
        name: &'static str,
        max_threads: usize,
        niceness: i32,
        idle_timeout: Duration,
        metrics: &CpuMetrics,
    ) -> Self {
        let metrics = metrics.lane(name);
        Self {
            name,
            max_threads,
            niceness,
            idle_timeout,
            metrics,
            state: Mutex::default(),
            work: Condvar::new(),
        }
    }

    /// Returns the number of threads, working or idle.
    #[cfg(test)]
    pub(crate) fn threads(&self) -> usize {
        self.state().threads
    }

    /// Returns the number of working threads.
    pub(crate) fn busy(&self) -> usize {
        let state = self.state();
        state.threads - state.idle
    }

    /// Returns `true` if a job would start at once.
    pub(crate) fn is_free(&self) -> bool {
        let state = self.state();
        state.waiting.len() + state.threads - state.idle < self.max_threads
    }

    /// Returns the total price of waiting and running jobs.
    pub(crate) fn pending(&self) -> Duration {
        self.state().pending
    }

    /// Queues a job. Drops it if no thread can be started.
    pub(crate) fn push(
        self: &Arc<Self>,
        owner: Option<Owner>,
        price: Duration,
        due: Instant,
        run: Box<dyn FnOnce() + Send>,
    ) -> QueuedJob {
        let mut state = self.state();
        let key = state.waiting.push(owner, price, due, Job { run, since: Instant::now(), price });
        state.pending = state.pending.saturating_add(price);
        self.metrics.waiting.inc();
        // Threads that were notified of earlier jobs still count as idle until they wake up.
        let start = state.waiting.len() > state.idle && state.threads < self.max_threads;
        if start {
            state.threads += 1;
        }
        drop(state);
        if start {
            self.start_thread();
        } else {
            self.work.notify_one();
        }
        QueuedJob { lane: self.clone(), key }
    }

    /// Drops waiting jobs, and lets the threads end after their current jobs.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let dropped = std::mem::take(&mut state.waiting);
        // The load of a closed lane is no longer read.
        state.pending = Duration::ZERO;
        drop(state);
        self.metrics.waiting.dec_by(dropped.len() as i64);
        self.work.notify_all();
    }

    fn start_thread(self: &Arc<Self>) {
        let lane = self.clone();
        let work = move || {
            lower_priority(lane.niceness);
            let mut finished_price = Duration::ZERO;
            while let Some(job) = lane.next(finished_price) {
                lane.metrics.waited.observe(job.since.elapsed().as_secs_f64());
                // The awaiting task sees a panic because the job's sender is dropped.
                drop(catch_unwind(AssertUnwindSafe(job.run)));
                finished_price = job.price;
            }
        };
        let Err(error) = std::thread::Builder::new().name(format!("cpu-{}", self.name)).spawn(work)
        else {
            return;
        };
        tracing::warn!(%error, lane = self.name, "can't start a thread for CPU-heavy work");
        let mut state = self.state();
        state.threads -= 1;
        // Other threads will do the work. Without any thread, jobs would wait for ever.
        let mut dropped = FairQueue::default();
        if state.threads == 0 {
            dropped = std::mem::take(&mut state.waiting);
            state.pending = Duration::ZERO;
        }
        drop(state);
        self.metrics.waiting.dec_by(dropped.len() as i64);
    }

    /// Waits for the next job, after a job of `finished_price`. Returns `None` if the thread should
    /// end.
    fn next(&self, finished_price: Duration) -> Option<Job> {
        let mut state = self.state();
        state.pending = state.pending.saturating_sub(finished_price);
        let mut has_timed_out = false;
        loop {
            if let Some(job) = state.waiting.pop() {
                self.metrics.waiting.dec();
                return Some(job);
            }
            if state.closed || has_timed_out {
                // The next `push` sees that it has to start a thread.
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            let (guard, result) = self
                .work
                .wait_timeout(state, self.idle_timeout)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            has_timed_out = result.timed_out();
            state.idle -= 1;
        }
    }

    /// Locks the state, ignoring poison: it is never left half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for QueuedJob {
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

/// Adds `niceness` to this thread's niceness. Has no effect except on Linux: elsewhere niceness
/// belongs to the process.
pub fn lower_priority(niceness: i32) {
    #[cfg(target_os = "linux")]
    if niceness > 0
        && let Err(error) = rustix::process::nice(niceness)
    {
        tracing::debug!(%error, "can't lower the priority of a thread");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = niceness;
}
