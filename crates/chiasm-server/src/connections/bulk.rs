//! Threads for connections whose clients send large bodies.
//!
//! A large body takes milliseconds to copy. On the threads that serve everybody, each step of a
//! small request would wait for pieces of all bodies that arrive, and those threads would look busy
//! to the operating system, which lets busy threads wait.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use chiasm_pipeline::cpu::give_way;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

use crate::connection::Connection;

/// The smallest large body, in bytes: less is copied in some 0.7 ms. Most photographs are smaller,
/// and need no memory on more threads.
pub(crate) const LARGE: usize = 1536 << 10;

/// What is added to the niceness of these threads: as for work of usual size.
const NICENESS: i32 = 5;

/// The threads, started when the first large body comes.
pub(crate) struct BulkThreads {
    threads: usize,
    /// `None` if they could not be started.
    runtime: OnceLock<Option<Runtime>>,
}

impl BulkThreads {
    /// So many threads, at least one.
    pub(crate) fn new(threads: usize) -> Self {
        Self { threads: threads.max(1), runtime: OnceLock::new() }
    }

    /// Serves a connection to its end: by these threads while a large body arrives, else by the
    /// caller's.
    pub(super) async fn serve(
        &self,
        connection: Arc<Connection>,
        served: impl Future<Output = ()> + Send + 'static,
    ) {
        let mut served = Stretches { served: Box::pin(served), connection };
        while !served.while_body_is(false).await {
            let Some(runtime) = self.runtime() else { return served.served.await };
            // What is moved ends with this set.
            let mut moved = JoinSet::new();
            moved.spawn_on(
                async move { (served.while_body_is(true).await, served) },
                runtime.handle(),
            );
            match moved.join_next().await {
                Some(Ok((false, back))) => served = back,
                // Served to its end, or a panic that has been told.
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
                .on_thread_start(|| give_way(NICENESS));
            let started = builder.enable_all().build();
            started
                .inspect_err(|error| tracing::warn!(%error, "large bodies are read by the threads of small ones"))
                .ok()
        };
        self.runtime.get_or_init(start).as_ref()
    }
}

impl Drop for BulkThreads {
    fn drop(&mut self) {
        // The last to know of these threads may be a task, which must not wait for them.
        if let Some(Some(runtime)) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A connection that is served for a while here and for a while there.
struct Stretches {
    served: Pin<Box<dyn Future<Output = ()> + Send>>,
    connection: Arc<Connection>,
}

impl Stretches {
    /// Serves while the body that arrives is large (`true`), or while none is (`false`). Returns
    /// whether that was the end.
    async fn while_body_is(&mut self, large: bool) -> bool {
        self.connection.set_bulk(large);
        poll_fn(|context| match self.served.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(true),
            Poll::Pending if self.connection.has_large_body() == large => Poll::Pending,
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

    /// Where a step was taken.
    fn place() -> String {
        std::thread::current().name().unwrap_or_default().to_owned()
    }

    fn connection() -> Arc<Connection> {
        Arc::new(Connection::from_peer([127, 0, 0, 1].into()))
    }

    #[tokio::test]
    async fn large_bodies_are_read_elsewhere_and_answered_here() {
        let (threads, connection) = (BulkThreads::new(1), connection());
        let places = Arc::<Mutex<Vec<String>>>::default();
        let (its, seen) = (connection.clone(), places.clone());
        let served = async move {
            let step = async || {
                tokio::time::sleep(Duration::from_millis(1)).await;
                seen.lock().unwrap().push(place());
            };
            step().await;
            for _ in 0..2 {
                let large = its.receive_large_body();
                step().await;
                drop(large);
                step().await;
            }
        };
        threads.serve(connection, served).await;
        let here = place();
        assert_eq!(
            *places.lock().unwrap(),
            [here.clone(), "bulk".into(), here.clone(), "bulk".into(), here]
        );
    }

    #[tokio::test]
    async fn a_connection_that_is_closed_ends_elsewhere_too() {
        let (threads, connection) = (Arc::new(BulkThreads::new(1)), connection());
        let (held, its) = (Arc::new(()), connection.clone());
        let (moved, there) = tokio::sync::oneshot::channel();
        let holder = held.clone();
        let served = async move {
            let _held = holder;
            let _large = its.receive_large_body();
            tokio::task::yield_now().await;
            moved.send(place()).unwrap();
            std::future::pending().await
        };
        let task = tokio::spawn(async move { threads.serve(connection, served).await });
        assert_eq!(there.await.unwrap(), "bulk");
        task.abort();
        let ended = async {
            while Arc::strong_count(&held) > 1 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), ended).await.expect("its end");
    }
}
