use std::sync::Arc;
use std::time::Duration;

use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt, pending};

use crate::{Backend, DeathReason, MediaObserver};

/// The reason why connecting to a backend failed. Retry after a pause.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConnectError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl ConnectError {
    /// Wraps an error or a text.
    pub fn new(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(reason.into())
    }
}

/// Starts or finds the backends of one worker, one after the other.
pub trait Connector: Send + Sync + 'static {
    /// Waits until the next backend can take jobs. An engine that has to load its model takes
    /// minutes. The backend reports to `observer` how media items reach it. Dropping the future
    /// immediately ends everything that it has started.
    ///
    /// # Errors
    /// [`ConnectError`] if there is no backend. Everything that was started has been ended.
    fn connect(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>>;

    /// Describes the attempt for the log: `starting vllm for /models/m`.
    fn describe(&self) -> String;

    /// Returns the maximum pause between the death of a backend and the next attempt. The pause
    /// keeps an engine that dies again and again from loading its machine with restarts.
    fn max_retry_pause(&self) -> Duration;
}

/// A connected backend and the handle to its processes.
pub struct Connected {
    /// The backend, which takes jobs.
    pub backend: Arc<dyn Backend>,
    /// The processes behind the backend.
    pub lifecycle: Box<dyn BackendLifecycle>,
}

/// The activity of a backend's processes, as the operating system sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// `true` if a process is stopped, by SIGSTOP or by a debugger.
    pub stopped: bool,
    /// The CPU time of all live processes together.
    pub cpu: Duration,
}

/// The processes behind a backend, observed and controlled outside its connection. Dropping it
/// immediately ends the backend.
pub trait BackendLifecycle: Send {
    /// Waits until the processes end by themselves, and returns the reason. Never returns if only
    /// the connection can show that.
    fn ended(&mut self) -> BoxFuture<'_, DeathReason>;

    /// Returns the activity of the processes; `None` if this process can't observe them.
    fn activity(&self) -> BoxFuture<'_, Option<Activity>>;

    /// Returns the silence after which the backend counts as dead; `None` if a silent backend may
    /// answer again at any time.
    fn max_silence(&self) -> Option<Duration> {
        None
    }

    /// Shuts the backend down in an orderly way, with everything that it started.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()>;

    /// Returns `true` if the backend keeps running, with its caches, after
    /// [`detach`](Self::detach).
    fn survives_detach(&self) -> bool {
        false
    }

    /// Releases the backend because this process ends. A backend that a later process can take over
    /// keeps running; any other is stopped.
    fn detach(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.stop()
    }
}

/// The lifecycle of a backend that this process can't observe, such as an engine on another
/// machine. Only the connection shows whether it is alive.
#[derive(Clone, Copy, Debug, Default)]
pub struct RemoteLifecycle;

impl BackendLifecycle for RemoteLifecycle {
    fn ended(&mut self) -> BoxFuture<'_, DeathReason> {
        pending().boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        async { None }.boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }

    fn survives_detach(&self) -> bool {
        true
    }
}
