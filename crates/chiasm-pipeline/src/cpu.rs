//! CPU-heavy work: off the async threads, priced before it is done, and cheap work never behind
//! dear work.
//!
//! | module | is |
//! |---|---|
//! | `budget` | what one request may have done, and when its next piece is due |
//! | `price` | what pieces of work cost |
//! | `error` | the reason for which a piece of work was not done |
//! | `lane` | threads for work of one size |
//! | `waiting` | work that waits for a lane's threads, and whose turn it is |
//! | `metrics` | how much waits and how long |

mod budget;
mod error;
mod lane;
mod metrics;
pub mod price;
mod waiting;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use chiasm_backend::{MediaLoad, WorkSize};
use chiasm_media::Workers;
use futures_util::future::{BoxFuture, FutureExt};
use rayon::{ThreadPool, ThreadPoolBuilder};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;

pub use budget::{CpuBudget, Ticket};
pub use error::CpuError;
use lane::Lane;
pub use lane::give_way;
pub use metrics::CpuMetrics;

/// Work of up to this price has threads of its own, on which it waits for nothing longer.
const SHORT: Duration = Duration::from_millis(5);
/// Work above this price waits for fewer threads, which give way to all others: an image of some 20
/// megapixels.
const HEAVY: Duration = Duration::from_millis(200);

/// What each lane adds to its threads' niceness. A thread that is nicer by 5 gets a quarter of a
/// core that both want, and is interrupted when the other wakes up.
const NICENESS: [i32; 3] = [0, 5, 10];

/// How long a thread that has nothing to do keeps itself ready. Starting one takes some tens of
/// microseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pixels from which on an image is worth several threads: below, waking them takes as long as the
/// work.
const SHARED_PIXELS: u64 = 2_000_000;

/// Threads for CPU-heavy work, in three lanes by the work's price: `short`, `usual` and `heavy`.
/// Within a lane, owners get equal shares of the time, and of one owner's work what is due first is
/// done first, by the rule of [`CpuBudget`]. Clones share the threads, which end with the last of
/// them.
#[derive(Clone)]
pub struct CpuPool {
    inner: Arc<Inner>,
}

struct Inner {
    /// The cheapest work comes first, the dearest last.
    lanes: [Arc<Lane>; 3],
    threads: usize,
    /// Threads that share one large piece of work, started when first asked for.
    shared: OnceLock<Option<ThreadPool>>,
}

impl CpuPool {
    /// Does at most `threads` pieces of usual work at once, at least one; half as many heavy ones,
    /// rounded up; and one more of short ones, so that those can fill a machine whose last core is
    /// not in `threads`. This also bounds the memory of decoded images.
    pub fn new(threads: usize, metrics: &CpuMetrics) -> Self {
        let threads = threads.max(1);
        let lane = |index: usize, name, threads| {
            Arc::new(Lane::new(name, threads, NICENESS[index], PATIENCE, metrics))
        };
        let lanes = [
            lane(0, "short", threads + 1),
            lane(1, "usual", threads),
            lane(2, "heavy", threads.div_ceil(2)),
        ];
        Self { inner: Arc::new(Inner { lanes, threads, shared: OnceLock::new() }) }
    }

    /// Threads for an image of so many pixels beside the caller's: none if it is small, or if other
    /// images keep more than half of the threads busy. Then an image's own time matters less than
    /// everybody's.
    pub fn shared(&self, pixels: u64) -> Option<&ThreadPool> {
        let Inner { lanes: [_, usual, heavy], threads, shared } = &*self.inner;
        if *threads < 2 || pixels < SHARED_PIXELS || 2 * (usual.busy() + heavy.busy()) > *threads {
            return None;
        }
        let start = || {
            let name = |index| format!("pixels-{index}");
            let give_way = |_| lane::give_way(NICENESS[1]);
            let pool = ThreadPoolBuilder::new()
                .num_threads(*threads)
                .thread_name(name)
                .start_handler(give_way)
                .build();
            pool.inspect_err(
                |error| tracing::warn!(%error, "images are processed by one thread each"),
            )
            .ok()
        };
        shared.get_or_init(start).as_ref()
    }

    /// Runs a job here if it is `small`, that is, done in less time than waking another thread and
    /// being woken by it takes: some tens of microseconds. That costs the request nothing.
    /// Otherwise the job is run as [`Self::run`] does, for `price`.
    ///
    /// # Errors
    /// The budget does not allow the price, or the job panics.
    pub async fn run_or_here<T: Send + 'static>(
        &self,
        small: bool,
        budget: &CpuBudget,
        price: Duration,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, CpuError> {
        if !small {
            return self.run(&budget.ticket(price)?, job).await;
        }
        catch_unwind(AssertUnwindSafe(job)).map_err(|_| CpuError::Failed)
    }

    /// Runs a job on a thread of the lane that its ticket's price leads to. If nobody awaits it any
    /// more before it has begun, it is dropped; once begun it runs to its end.
    ///
    /// # Errors
    /// The job panics, or no thread can be started; or the request's work has taken far longer than
    /// its prices by then, and all that it may have.
    pub async fn run<T: Send + 'static>(
        &self,
        ticket: &Ticket,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, CpuError> {
        let (done, outcome) = oneshot::channel();
        let its = ticket.clone();
        let job = Box::new(move || {
            let made = its.check().map(|()| {
                let begun = thread_time();
                let made = job();
                its.settle(thread_time().saturating_sub(begun));
                made
            });
            drop(done.send(made));
        });
        let _place = self.lane(ticket.price()).push(
            ticket.owner(),
            ticket.price(),
            ticket.due(Instant::now()),
            job,
        );
        // A job that panics or is dropped takes `done` with it.
        outcome.await.unwrap_or_else(|_| Err(CpuError::Failed))
    }

    /// Whether a thread would begin with work of this price at once.
    pub fn is_free(&self, price: Duration) -> bool {
        self.lane(price).is_free()
    }

    /// What waits or is being done. Of an agent that is work on media alone.
    pub fn load(&self) -> MediaLoad {
        let threads = u32::try_from(self.inner.threads).unwrap_or(u32::MAX);
        MediaLoad { threads, pending: self.inner.lanes.each_ref().map(|lane| lane.pending()) }
    }

    fn lane(&self, price: Duration) -> &Arc<Lane> {
        &self.inner.lanes[work_size(price) as usize]
    }
}

/// How long this thread has been running on a core.
fn thread_time() -> Duration {
    // Never before the thread began.
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// How large a piece of work of this price is.
pub fn work_size(price: Duration) -> WorkSize {
    match price {
        price if price <= SHORT => WorkSize::Short,
        price if price <= HEAVY => WorkSize::Usual,
        _ => WorkSize::Heavy,
    }
}

/// Files may be awaited by several requests, so each is a request by itself, and nobody's.
impl Workers for CpuPool {
    fn run(&self, time: Duration, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'_, ()> {
        async move {
            if let Ok(ticket) = CpuBudget::shared().ticket(time) {
                // Whoever asked learns from the work itself what became of it.
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
