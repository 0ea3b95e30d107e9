//! A pool for CPU-heavy work, off the async threads.
//!
//! Work is priced before it is done, so that cheap work never waits for expensive work.
//!
//! | module | is |
//! |---|---|
//! | `budget` | a request's budget of CPU time, and the due times of its work |
//! | `price` | estimates of the CPU time of pieces of work |
//! | `error` | the reasons why work was not done |
//! | `lane` | threads for work of one size |
//! | `waiting` | the fair queue of a lane |
//! | `metrics` | queue lengths and waiting times |
#![forbid(unsafe_code)]

mod budget;
mod error;
mod lane;
mod metrics;
pub mod price;
mod waiting;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use chiasm_backend::{MediaLoad, WorkSize};
use chiasm_media::CpuExecutor;
use futures_util::future::{BoxFuture, FutureExt};
use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;

pub use budget::{AnnouncedWork, CpuBudget, Ticket};
pub use error::CpuError;
use lane::Lane;
pub use lane::lower_priority;
pub use metrics::CpuMetrics;

/// The maximum price of short work, which has its own threads and never waits for longer work.
const MAX_SHORT: Duration = Duration::from_millis(5);
/// The maximum price of usual work: an image of some 20 megapixels. Heavier work has fewer threads,
/// at the lowest priority.
const MAX_USUAL: Duration = Duration::from_millis(200);

/// The niceness that each lane adds to its threads. A thread that is nicer by 5 gets a quarter of a
/// contended core, and is preempted when the other thread wakes up.
const NICENESS: [i32; 3] = [0, 5, 10];

/// The time after which an idle thread ends. Starting one takes some tens of microseconds.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The minimum number of pixels of an image that several threads share. Below, waking the threads
/// takes as long as the work.
const MIN_SHARED_PIXELS: u64 = 2_000_000;

/// Threads for CPU-heavy work, in three lanes by the work's price: `short`, `usual` and `heavy`.
///
/// Within a lane, owners get equal shares of the time. Of an owner's requests, the one with the
/// least remaining work is served first, by the due times that [`CpuBudget`] gives its work. Clones
/// share the threads, which end with the last clone.
#[derive(Clone)]
pub struct CpuPool {
    inner: Arc<Inner>,
}

struct Inner {
    /// The lanes, from the cheapest work to the most expensive.
    lanes: [Arc<Lane>; 3],
    threads: usize,
    /// Threads that share one large piece of work, started on first use.
    shared: OnceLock<Option<ThreadPool>>,
}

impl CpuPool {
    /// Creates a pool with `threads` threads for usual work, but at least one. Heavy work has half
    /// as many, rounded up. Short work has one more, to use the core that `threads` leaves free.
    ///
    /// The number of threads also bounds the memory of decoded images.
    pub fn new(threads: usize, metrics: &CpuMetrics) -> Self {
        let threads = threads.max(1);
        let lane = |index: usize, name, threads| {
            Arc::new(Lane::new(name, threads, NICENESS[index], IDLE_TIMEOUT, metrics))
        };
        let lanes = [
            lane(0, "short", threads + 1),
            lane(1, "usual", threads),
            lane(2, "heavy", threads.div_ceil(2)),
        ];
        Self { inner: Arc::new(Inner { lanes, threads, shared: OnceLock::new() }) }
    }

    /// Returns threads that share the work on an image of `pixels` pixels. Returns `None` if the
    /// image is small, or if other images keep more than half of the threads busy: throughput
    /// matters more than latency then.
    pub fn shared(&self, pixels: u64) -> Option<&ThreadPool> {
        let Inner { lanes: [_, usual, heavy], threads, shared } = &*self.inner;
        if *threads < 2
            || pixels < MIN_SHARED_PIXELS
            || 2 * (usual.busy() + heavy.busy()) > *threads
        {
            return None;
        }
        let start = || {
            let name = |index| format!("pixels-{index}");
            let lower_priority = |_| lane::lower_priority(NICENESS[1]);
            let pool = ThreadPoolBuilder::new()
                .num_threads(*threads)
                .thread_name(name)
                .start_handler(lower_priority)
                .build();
            pool.inspect_err(|error| {
                tracing::warn!(%error, "no shared threads; one thread processes each image");
            })
            .ok()
        };
        shared.get_or_init(start).as_ref()
    }

    /// Runs a small job inline and free of charge. Runs any other job with [`Self::run`], for
    /// `price`.
    ///
    /// A job is small if it takes less time than waking another thread and being woken by it: some
    /// tens of microseconds.
    ///
    /// # Errors
    /// Returns an error if the budget does not allow the price, or if the job panics.
    pub async fn run_inline_if<T: Send + 'static>(
        &self,
        is_small: bool,
        budget: &CpuBudget,
        price: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, CpuError> {
        if !is_small {
            return self.run(&budget.ticket(price)?, job).await;
        }
        catch_unwind(AssertUnwindSafe(job)).map_err(|_| CpuError::Failed)
    }

    /// Runs a job on a thread of the lane for its ticket's price. Dropping the future cancels the
    /// job unless it has begun; a job that has begun runs to its end.
    ///
    /// # Errors
    /// Returns an error if the job panics, if no thread can be started, or if the request's earlier
    /// work has taken so long that its budget is exceeded.
    pub async fn run<T: Send + 'static>(
        &self,
        ticket: &Ticket,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, CpuError> {
        self.run_announced(ticket, ticket.announce(), job).await
    }

    /// Runs a job like [`Self::run`], for work that was announced before.
    ///
    /// # Errors
    /// Returns the errors of [`Self::run`].
    pub async fn run_announced<T: Send + 'static>(
        &self,
        ticket: &Ticket,
        work: AnnouncedWork,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, CpuError> {
        let (sender, receiver) = oneshot::channel();
        let job_ticket = ticket.clone();
        let job = Box::new(move || {
            let result = job_ticket.check().map(|()| {
                let started = thread_time();
                let result = job();
                job_ticket.settle(thread_time().saturating_sub(started));
                result
            });
            drop(sender.send(result));
        });
        let lane = self.lane(ticket.price());
        let _queued = lane.push(ticket.owner(), ticket.price(), work.due(), job);
        // A job that panics or is dropped drops `sender`.
        receiver.await.unwrap_or_else(|_| Err(CpuError::Failed))
    }

    /// Returns `true` if work of this price would start at once.
    pub fn is_free(&self, price: Duration) -> bool {
        self.lane(price).is_free()
    }

    /// Returns the waiting and running work. In an agent, all of it is work on media.
    pub fn load(&self) -> MediaLoad {
        let threads = u32::try_from(self.inner.threads).unwrap_or(u32::MAX);
        MediaLoad { threads, pending: self.inner.lanes.each_ref().map(|lane| lane.pending()) }
    }

    fn lane(&self, price: Duration) -> &Arc<Lane> {
        &self.inner.lanes[work_size(price) as usize]
    }
}

/// Returns the CPU time of this thread.
fn thread_time() -> Duration {
    // Never negative.
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Returns the size class of work of this price.
pub fn work_size(price: Duration) -> WorkSize {
    match price {
        price if price <= MAX_SHORT => WorkSize::Short,
        price if price <= MAX_USUAL => WorkSize::Usual,
        _ => WorkSize::Heavy,
    }
}

/// Runs the loader's work without an owner, because several requests may await one file.
impl CpuExecutor for CpuPool {
    fn run(&self, time: Duration, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'_, ()> {
        async move {
            if let Ok(ticket) = CpuBudget::shared().ticket(time) {
                // The work itself reports its result.
                let _ = self.run(&ticket, work).await;
            }
        }
        .boxed()
    }
}

impl fmt::Debug for CpuPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuPool").field("threads", &self.inner.threads).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.lanes.iter().for_each(|lane| lane.close());
    }
}

#[cfg(test)]
mod tests;
