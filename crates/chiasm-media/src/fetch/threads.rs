//! Threads on which origins are heard.
//!
//! What an origin sends may cost far more than to read it: the size of a chunk may have any number
//! of zeros before it, and as long as more is there the HTTP client reads on. On the threads that
//! serve everybody nobody would be served meanwhile.

use std::future::Future;
use std::sync::OnceLock;
use std::thread::available_parallelism;

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::MediaError;

/// Most threads. One hears hundreds of megabytes in a second.
const MOST: usize = 8;

/// How many connections that have something are heard before it is looked at which others have:
/// each may take milliseconds.
const LOOK_EVERY: u32 = 4;

/// The threads, started for the first fetch.
#[derive(Default)]
pub(crate) struct FetchThreads {
    /// `None` if they could not be started.
    runtime: OnceLock<Option<Runtime>>,
}

impl FetchThreads {
    /// Does this on these threads, connections that it opens included. Dropping the future ends it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        fetch: impl Future<Output = Result<T, MediaError>> + Send + 'static,
    ) -> Result<T, MediaError> {
        let Some(runtime) = self.runtime() else { return fetch.await };
        // What is fetched ends with this set.
        let mut fetching = JoinSet::new();
        fetching.spawn_on(fetch, runtime.handle());
        match fetching.join_next().await {
            Some(Ok(fetched)) => fetched,
            _ => Err(MediaError::Internal),
        }
    }

    fn runtime(&self) -> Option<&Runtime> {
        let start = || {
            let threads =
                available_parallelism().map_or(1, |cores| cores.get().div_ceil(2)).min(MOST);
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(threads).thread_name("fetch").event_interval(LOOK_EVERY);
            let started = builder.enable_all().build();
            started
                .inspect_err(|error| tracing::warn!(%error, "origins are heard by the threads that serve everybody"))
                .ok()
        };
        self.runtime.get_or_init(start).as_ref()
    }
}

impl Drop for FetchThreads {
    fn drop(&mut self) {
        // The last to know of these threads may be a task, which must not wait for them.
        if let Some(Some(runtime)) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
