//! Where work on large files is done.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};

/// Threads for work that takes too long for async threads.
pub trait Workers: Send + Sync {
    /// Does work that takes about `time` of one core. The future ends when it is done; work that
    /// panics, or that is given up because the future was dropped, is dropped too.
    fn run(&self, time: Duration, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'_, ()>;
}

/// The async runtime's threads for blocking work: as many at once as it allows.
pub(crate) struct BlockingThreads;

impl Workers for BlockingThreads {
    fn run(&self, _: Duration, work: Box<dyn FnOnce() + Send>) -> BoxFuture<'_, ()> {
        tokio::task::spawn_blocking(work).map(drop).boxed()
    }
}
