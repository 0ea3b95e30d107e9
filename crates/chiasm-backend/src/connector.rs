use std::sync::Arc;
use std::time::Duration;

use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt, pending};

use crate::{Backend, Death, MediaObserver};

/// Why no backend could be had. Worth trying again after a pause.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConnectError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl ConnectError {
    /// Wraps the reason, or words for it.
    pub fn new(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(reason.into())
    }
}

/// Starts or finds the backends of one worker, one after the other.
pub trait Connector: Send + Sync + 'static {
    /// Waits until the next backend can take jobs, which takes minutes where an engine has to load
    /// its model. What happens to media on its way there is told to `observer`. Dropping the future
    /// ends what it has started, at once.
    ///
    /// # Errors
    /// [`ConnectError`] says why there is none. Whatever was started has been ended.
    fn connect(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>>;

    /// What it does, for the log: `starting vllm for /models/m`.
    fn describe(&self) -> String;

    /// The longest pause before the backend after one that died. Engines that die again and again
    /// must not keep a machine busy with starting them.
    fn longest_pause(&self) -> Duration;
}

/// A backend, and what keeps it alive.
pub struct Connected {
    /// Takes jobs.
    pub backend: Arc<dyn Backend>,
    /// The other end: a process, or nothing that could be watched.
    pub life: Box<dyn Life>,
}

/// What the processes behind a backend do, as the system sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// One of them is stopped, as by SIGSTOP or a debugger.
    pub stopped: bool,
    /// CPU time that those which live have taken so far, all together.
    pub cpu: Duration,
}

/// What keeps a backend alive, seen from outside its connection. Dropping it ends the backend at
/// once.
pub trait Life: Send {
    /// Returns when it has ended by itself, and how. Never returns where only the connection can
    /// tell.
    fn ended(&mut self) -> BoxFuture<'_, Death>;

    /// What its processes do; `None` where they are not ours to look at.
    fn activity(&self) -> BoxFuture<'_, Option<Activity>>;

    /// Ends it in an orderly way, with everything that it started.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()>;

    /// Returns `true` if it runs on, with its caches, after this process has let go of it.
    fn outlives(&self) -> bool {
        false
    }

    /// Lets go of it because this process ends: what can be taken over by a later process runs on,
    /// everything else ends.
    fn leave(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.stop()
    }
}

/// The life of what is not ours to watch, such as an engine of another machine: only its connection
/// tells.
#[derive(Clone, Copy, Debug, Default)]
pub struct Elsewhere;

impl Life for Elsewhere {
    fn ended(&mut self) -> BoxFuture<'_, Death> {
        pending().boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        async { None }.boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }

    fn outlives(&self) -> bool {
        true
    }
}
