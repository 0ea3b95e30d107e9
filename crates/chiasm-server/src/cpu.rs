//! Where CPU-heavy work runs: off the async threads, and no more of it at once than there are cores.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::error::ApiError;

/// A bounded number of blocking threads.
#[derive(Clone, Debug)]
pub struct CpuPool {
    permits: Arc<Semaphore>,
}

impl CpuPool {
    /// At most `threads` jobs at once, at least one. This also bounds the memory of decoded images.
    pub fn new(threads: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(threads.max(1))) }
    }

    /// Runs a job. Fails only if the job panics.
    pub async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
        let stopped = |_| ApiError::internal("a worker thread failed");
        let permit = self.permits.clone().acquire_owned().await.map_err(|_| ApiError::internal("shutting down"))?;
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
    async fn a_panicking_job_is_an_error() {
        let error = CpuPool::new(1).run::<()>(|| panic!("on purpose")).await.unwrap_err();
        assert_eq!(error.status.as_u16(), 500);
    }
}
