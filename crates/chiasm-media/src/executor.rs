//! Executors for CPU-heavy work on large files.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};

/// Runs work that takes too long for async threads.
pub trait CpuExecutor: Send + Sync {
    /// Runs `work`, which takes about `time` of one core.
    ///
    /// The future completes when the work is done. Work that panics is dropped, and so is pending
    /// work whose future is dropped.
    fn run(&self, time: Duration, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'_, ()>;
}

/// The async runtime's own pool of blocking threads, with the runtime's limit on their number.
pub(crate) struct BlockingThreads;

impl CpuExecutor for BlockingThreads {
    fn run(&self, _: Duration, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'_, ()> {
        tokio::task::spawn_blocking(work).map(drop).boxed()
    }
}
