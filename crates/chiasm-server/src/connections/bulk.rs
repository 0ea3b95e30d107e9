//! Threads for connections whose clients send large bodies.
//!
//! Copying a large body takes milliseconds. On the main async threads, each step of a small request
//! would wait for pieces of all bodies that arrive. Those threads would also look busy to the
//! operating system, which lets busy threads wait.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use chiasm_cpu::lower_priority;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::connection::Connection;

/// The size in bytes from which a body is large: less is copied in some 0.7 ms. Most photographs
/// are smaller and so need no memory on further threads.
pub(crate) const LARGE_BODY_BYTES: usize = 1536 << 10;

/// The increase of the threads' niceness, the same as for CPU work of usual size.
const NICENESS: i32 = 5;

/// The threads, started when the first large body arrives.
pub(crate) struct BulkThreads {
    threads: usize,
    /// `None` if they could not be started.
    runtime: OnceLock<Option<Runtime>>,
}

impl BulkThreads {
    /// Creates a pool of `threads` threads, at least one.
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads: threads.max(1), runtime: OnceLock::new() }
    }

    /// Serves a connection to its end: on these threads while a large body arrives, otherwise on
    /// the caller's.
    pub(super) async fn serve(
        &self,
        connection: Arc<Connection>,
        serve: impl Future<Output = ()> + Send + 'static,
    ) {
        let mut migrating = MigratingConnection { serve: Box::pin(serve), connection };
        while !migrating.run_while_body_is(false).await {
            let Some(runtime) = self.runtime() else { return migrating.serve.await };
            // Dropping the set aborts the task.
            let mut moved = JoinSet::new();
            moved.spawn_on(
                async move { (migrating.run_while_body_is(true).await, migrating) },
                runtime.handle(),
            );
            match moved.join_next().await {
                Some(Ok((false, returned))) => migrating = returned,
                // The connection has ended, or its task has panicked, which is logged already.
                _ => return,
            }
        }
    }

    fn runtime(&self) -> Option<&Runtime> {
        let start = || {
            let mut builder = Builder::new_multi_thread();
            builder
                .worker_threads(self.threads)
                .thread_name("bulk")
                .on_thread_start(|| lower_priority(NICENESS));
            let started = builder.enable_all().build();
            started
                .inspect_err(|error| {
                    tracing::warn!(%error, "no bulk threads; the main threads read large bodies")
                })
                .ok()
        };
        self.runtime.get_or_init(start).as_ref()
    }
}

impl Drop for BulkThreads {
    fn drop(&mut self) {
        // The last owner of these threads may be a task, which must not block on their shutdown.
        if let Some(Some(runtime)) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A connection that moves between the main threads and the bulk threads.
struct MigratingConnection {
    serve: Pin<Box<dyn Future<Output = ()> + Send>>,
    connection: Arc<Connection>,
}

impl MigratingConnection {
    /// Serves while a large body arrives (`true`) or while none does (`false`). Returns `true` if
    /// the connection has ended.
    async fn run_while_body_is(&mut self, is_large: bool) -> bool {
        self.connection.set_bulk(is_large);
        poll_fn(|context| match self.serve.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(true),
            Poll::Pending if self.connection.has_large_body() == is_large => Poll::Pending,
            Poll::Pending => Poll::Ready(false),
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;

    /// Returns the name of the current thread.
    fn thread_name() -> String {
        std::thread::current().name().unwrap_or_default().to_owned()
    }

    fn connection() -> Arc<Connection> {
        Arc::new(Connection::from_peer([127, 0, 0, 1].into()))
    }

    #[tokio::test]
    async fn large_body_moves_to_bulk_threads_until_read() {
        let threads = BulkThreads::new(1);
        let connection = connection();
        let names = Arc::<Mutex<Vec<String>>>::default();
        let served = connection.clone();
        let seen = names.clone();
        let serve = async move {
            let step = async || {
                tokio::time::sleep(Duration::from_millis(1)).await;
                seen.lock().unwrap().push(thread_name());
            };
            step().await;
            for _ in 0..2 {
                let large = served.receive_large_body();
                step().await;
                drop(large);
                step().await;
            }
        };
        threads.serve(connection, serve).await;
        let here = thread_name();
        assert_eq!(
            *names.lock().unwrap(),
            [here.clone(), "bulk".into(), here.clone(), "bulk".into(), here]
        );
    }

    #[tokio::test]
    async fn aborted_connection_ends_on_bulk_threads_too() {
        let threads = Arc::new(BulkThreads::new(1));
        let connection = connection();
        let held = Arc::new(());
        let served = connection.clone();
        let (sender, moved_to) = tokio::sync::oneshot::channel();
        let holder = held.clone();
        let serve = async move {
            let _held = holder;
            let _large = served.receive_large_body();
            tokio::task::yield_now().await;
            sender.send(thread_name()).unwrap();
            std::future::pending().await
        };
        let task = tokio::spawn(async move { threads.serve(connection, serve).await });
        assert_eq!(moved_to.await.unwrap(), "bulk");
        task.abort();
        let ended = async {
            while Arc::strong_count(&held) > 1 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), ended).await.expect("should end in time");
    }
}
