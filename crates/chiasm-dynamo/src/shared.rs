//! The state shared by a backend, its jobs and its tasks, and the task that checks the worker.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{DeathReason, Load, LoadSink, MediaObserver};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::io::AsyncReadExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::directory::Worker;
use crate::wire::Wire;

/// The time after which an unreachable worker counts as gone.
const UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(4);
/// The pause between two attempts to connect.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

/// The state shared by a backend, its jobs and its tasks.
pub(crate) struct Shared {
    /// `COMPONENT/ENDPOINT/INSTANCE`.
    pub(crate) name: String,
    pub(crate) worker: Arc<Worker>,
    pub(crate) wire: Wire,
    pub(crate) load: Mutex<Option<LoadSink>>,
    running: AtomicU64,
    /// The time since the worker's last answer, in milliseconds.
    pub(crate) silent_ms: AtomicU64,
    pub(crate) observer: Arc<dyn MediaObserver>,
    pub(crate) ended: watch::Sender<Option<DeathReason>>,
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
    /// Creates the state of a worker that has just been connected.
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

    /// Records the worker's end; only the first call has an effect.
    pub(crate) fn end(&self, death: DeathReason) {
        set_once(&self.ended, death);
    }

    /// Records that a prompt did not expand as expected; only the first call has an effect.
    pub(crate) fn distrust(&self, why: String) {
        set_once(&self.distrusted, why);
    }

    /// Returns a future that completes once the worker is gone.
    pub(crate) fn when_ended(&self) -> BoxFuture<'static, DeathReason> {
        let mut ended = self.ended.subscribe();
        async move {
            let death = ended.wait_for(Option::is_some).await.ok().and_then(|death| death.clone());
            death.unwrap_or_else(|| DeathReason::new("the connection was closed"))
        }
        .boxed()
    }

    /// Passes the number of jobs of this frontend to the load sink. A worker does not report the
    /// jobs of other frontends.
    fn report_load(&self, running: u64) {
        if let Some(sink) = &*self.load.lock().unwrap_or_else(PoisonError::into_inner) {
            sink(Load {
                running,
                // Workers do not report these.
                waiting: 0,
                kv_usage: 0.0,
                pending_tokens_of_others: 0,
                draining: false,
                media: None,
            });
        }
    }

    /// Keeps an idle connection to the worker, which ends when the worker does.
    pub(crate) async fn watch(self: Arc<Self>) {
        let mut failing_since: Option<Instant> = None;
        loop {
            match self.wire.connect().await {
                Ok(mut stream) => {
                    failing_since = None;
                    // No request is sent, so nothing arrives before the end of the connection.
                    let _ = stream.read(&mut [0]).await;
                }
                Err(error) => {
                    let is_refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
                    let since = *failing_since.get_or_insert_with(Instant::now);
                    if is_refused || since.elapsed() >= UNREACHABLE_TIMEOUT {
                        return self.end(DeathReason::new(format!("connecting failed: {error}")));
                    }
                }
            }
            sleep(RECONNECT_PAUSE).await;
        }
    }
}

/// Counts one job while it runs.
pub(crate) struct InFlight(Arc<Shared>);

impl InFlight {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        shared.report_load(shared.running.fetch_add(1, Relaxed) + 1);
        Self(shared)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.report_load(self.0.running.fetch_sub(1, Relaxed).saturating_sub(1));
    }
}
