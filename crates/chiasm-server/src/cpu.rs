//! Where CPU-heavy work runs: off the async threads, and no more of it at once than there are cores.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use rayon::{ThreadPool, ThreadPoolBuilder};
use tokio::sync::Semaphore;

use crate::pipeline::RequestError;

/// A bounded number of blocking threads.
#[derive(Clone, Debug)]
pub struct CpuPool {
    permits: Arc<Semaphore>,
    threads: usize,
    /// Threads that share one large piece of work, started when first asked for.
    shared: Arc<OnceLock<Option<ThreadPool>>>,
}

/// Pixels from which on an image is worth several threads: below, waking them takes as long as the work.
const SHARED_PIXELS: u64 = 2_000_000;

impl CpuPool {
    /// At most `threads` jobs at once, at least one. This also bounds the memory of decoded images.
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        Self { permits: Arc::new(Semaphore::new(threads)), threads, shared: Arc::default() }
    }

    /// Threads for an image of so many pixels beside the caller's: none if it is small, or if other jobs keep more than
    /// half of the threads busy. Then an image's own time matters less than everybody's.
    pub fn shared(&self, pixels: u64) -> Option<&ThreadPool> {
        if self.threads < 2 || pixels < SHARED_PIXELS || 2 * self.permits.available_permits() < self.threads {
            return None;
        }
        let start = || {
            let name = |index| format!("pixels-{index}");
            let pool = ThreadPoolBuilder::new().num_threads(self.threads).thread_name(name).build();
            pool.inspect_err(|error| tracing::warn!(%error, "images are processed by one thread each")).ok()
        };
        self.shared.get_or_init(start).as_ref()
    }

    /// Runs a job here if it is `small`, that is, done in less time than waking another thread and being woken by it takes:
    /// some tens of microseconds. Fails only if the job panics.
    pub async fn run_or_here<T: Send + 'static>(
        &self,
        small: bool,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, RequestError> {
        if !small {
            return self.run(job).await;
        }
        catch_unwind(AssertUnwindSafe(job)).map_err(|_| RequestError::internal("a request's work failed"))
    }

    /// Runs a job. Fails only if the job panics.
    pub async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T, RequestError> {
        let stopped = |_| RequestError::internal("a worker thread failed");
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| RequestError::internal("shutting down"))?;
        tokio::task::spawn_blocking(move || {
            // Held until the job is done, even when the client has gone and nobody awaits it any more.
            let _permit = permit;
            job()
        })
        .await
        .map_err(stopped)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::pipeline::Cause;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_more_jobs_run_at_once_than_allowed() {
        let pool = CpuPool::new(2);
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let jobs = (0..16).map(|_| {
            let (running, most) = (running.clone(), most.clone());
            pool.run(move || {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::yield_now();
                running.fetch_sub(1, Ordering::SeqCst);
            })
        });
        futures_util::future::try_join_all(jobs).await.unwrap();
        assert!(most.load(Ordering::SeqCst) <= 2);
    }

    #[tokio::test]
    async fn threads_are_shared_for_large_images_while_others_are_idle() {
        assert!(CpuPool::new(1).shared(SHARED_PIXELS).is_none());
        let pool = CpuPool::new(4);
        assert!(pool.shared(SHARED_PIXELS - 1).is_none());
        let busy = pool.permits.clone().acquire_many_owned(2).await.unwrap();
        assert_eq!(pool.shared(SHARED_PIXELS).map(ThreadPool::current_num_threads), Some(4));
        let busier = pool.permits.clone().acquire_owned().await.unwrap();
        assert!(pool.shared(SHARED_PIXELS).is_none());
        drop((busy, busier));
    }

    #[tokio::test]
    async fn a_panicking_job_is_an_error() {
        for small in [true, false] {
            let error = CpuPool::new(1).run_or_here::<()>(small, || panic!("on purpose")).await.unwrap_err();
            assert!(matches!(error.cause, Cause::Internal(_)));
        }
    }
}
