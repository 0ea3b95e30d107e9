//! The state that a backend, its jobs and its tasks share, and the task that watches the worker.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{Death, Load, LoadSink, MediaObserver};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::io::AsyncReadExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::directory::Worker;
use crate::wire::Wire;

/// A worker that nobody could connect to for so long is gone.
const GONE: Duration = Duration::from_secs(4);
/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(100);

/// The state that a backend, its jobs and its tasks share.
pub(crate) struct Shared {
    /// `COMPONENT/ENDPOINT/INSTANCE`.
    pub(crate) name: String,
    pub(crate) worker: Arc<Worker>,
    pub(crate) wire: Wire,
    pub(crate) load: Mutex<Option<LoadSink>>,
    running: AtomicU64,
    /// The time in which the worker has said nothing, in milliseconds.
    pub(crate) silent_ms: AtomicU64,
    pub(crate) observer: Arc<dyn MediaObserver>,
    pub(crate) ended: watch::Sender<Option<Death>>,
    pub(crate) distrusted: watch::Sender<Option<String>>,
}

fn set_once<T>(cell: &watch::Sender<Option<T>>, value: T) {
    cell.send_if_modified(|known| {
        let is_new = known.is_none();
        known.get_or_insert(value);
        is_new
    });
}

impl Shared {
    /// Creates the state of a worker that was found just now.
    pub(crate) fn new(
        name: String,
        worker: Arc<Worker>,
        wire: Wire,
        observer: Arc<dyn MediaObserver>,
    ) -> Self {
        Self {
            name,
            worker,
            wire,
            load: Mutex::new(None),
            running: AtomicU64::new(0),
            silent_ms: AtomicU64::new(0),
            observer,
            ended: watch::Sender::new(None),
            distrusted: watch::Sender::new(None),
        }
    }

    /// Takes note of the worker's end, unless one is known.
    pub(crate) fn end(&self, death: Death) {
        set_once(&self.ended, death);
    }

    /// Takes note of a prompt that has become another one than was expected.
    pub(crate) fn distrust(&self, why: String) {
        set_once(&self.distrusted, why);
    }

    /// Returns once the worker is gone.
    pub(crate) fn when_ended(&self) -> BoxFuture<'static, Death> {
        let mut ended = self.ended.subscribe();
        async move {
            let death = ended.wait_for(Option::is_some).await.ok().and_then(|death| death.clone());
            death.unwrap_or_else(|| Death::new("it was let go"))
        }
        .boxed()
    }

    /// Tells how many jobs of ours run: a worker tells nothing of others.
    fn tell_load(&self, running: u64) {
        if let Some(sink) = &*self.load.lock().unwrap_or_else(PoisonError::into_inner) {
            sink(Load {
                running,
                // A worker tells none of these.
                waiting: 0,
                kv_usage: 0.0,
                pending_tokens_of_others: 0,
                draining: false,
                media: None,
            });
        }
    }

    /// Keeps a connection to the worker on which nothing is said: it ends when the worker does.
    pub(crate) async fn watch(self: Arc<Self>) {
        let mut failing_since: Option<Instant> = None;
        loop {
            match self.wire.connect().await {
                Ok(mut stream) => {
                    failing_since = None;
                    // Nothing is asked, so nothing is answered: whatever comes is the end of it.
                    let _ = stream.read(&mut [0]).await;
                }
                Err(error) => {
                    let is_refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
                    let since = *failing_since.get_or_insert_with(Instant::now);
                    if is_refused || since.elapsed() >= GONE {
                        return self.end(Death::new(format!("it can't be connected to: {error}")));
                    }
                }
            }
            sleep(PAUSE).await;
        }
    }
}

/// Counts one job while it runs.
pub(crate) struct InFlight(Arc<Shared>);

impl InFlight {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        shared.tell_load(shared.running.fetch_add(1, Relaxed) + 1);
        Self(shared)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.tell_load(self.0.running.fetch_sub(1, Relaxed).saturating_sub(1));
    }
}
