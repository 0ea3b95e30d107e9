//! Dedicated threads for fetches.
//!
//! An origin can make the HTTP client burn CPU time without yielding: the size of a chunk may have
//! any number of leading zeros, and the client reads on as long as data is available. On the
//! threads that serve clients, that would block all requests.

use std::future::Future;
use std::sync::OnceLock;
use std::thread::available_parallelism;

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::MediaError;

/// The maximum number of threads. One thread reads hundreds of megabytes per second.
const MAX_THREADS: usize = 8;

/// The number of task polls between two checks for new I/O events. It is low because one poll may
/// take milliseconds.
const EVENT_INTERVAL: u32 = 4;

/// The fetch threads, started by the first fetch.
#[derive(Default)]
pub(crate) struct FetchThreads {
    /// `None` if the threads could not be started.
    runtime: OnceLock<Option<Runtime>>,
}

impl FetchThreads {
    /// Runs a fetch, including the connections that it opens, on these threads. Dropping the future
    /// cancels the fetch.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        fetch: impl Future<Output = Result<T, MediaError>> + Send + 'static,
    ) -> Result<T, MediaError> {
        let Some(runtime) = self.runtime() else { return fetch.await };
        // Dropping the set aborts the fetch.
        let mut tasks = JoinSet::new();
        tasks.spawn_on(fetch, runtime.handle());
        match tasks.join_next().await {
            Some(Ok(fetched)) => fetched,
            _ => Err(MediaError::Internal),
        }
    }

    fn runtime(&self) -> Option<&Runtime> {
        let start = || {
            let threads =
                available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)).min(MAX_THREADS);
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(threads).thread_name("fetch").event_interval(EVENT_INTERVAL);
            let started = builder.enable_all().build();
            started
                .inspect_err(|error| {
                    tracing::warn!(
                        %error,
                        "cannot start threads for fetches; they run on the threads of requests"
                    );
                })
                .ok()
        };
        self.runtime.get_or_init(start).as_ref()
    }
}

impl Drop for FetchThreads {
    fn drop(&mut self) {
        // The last owner may be an async task, which must not block on the shutdown.
        if let Some(Some(runtime)) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
