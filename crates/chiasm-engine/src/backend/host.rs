//! Hosts, which start engines: the trait, and a host for engines that are started elsewhere.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Activity, ConnectError};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt, pending, ready};

use crate::group::Generation;
use crate::launch::LastLines;
use crate::state::Launched;
use crate::{EngineEndpoints, SocketDir};

/// The default of [`EngineHost::max_retry_pause`].
const DEFAULT_MAX_RETRY_PAUSE: Duration = Duration::from_secs(60);

/// A host that starts the engines of one worker, one after the other.
pub trait EngineHost: Send + Sync + 'static {
    /// Returns the addresses for the next engine. `sockets` is a folder for Unix sockets that lives
    /// as long as the engine.
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints;

    /// Starts an engine that connects to these addresses, which are bound already.
    ///
    /// # Errors
    /// The engine can't be started.
    fn start<'a>(
        &'a self,
        worker: WorkerId,
        endpoints: &'a EngineEndpoints,
        sockets: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>>;

    /// Returns the name of the engine's record in the state folder; `None` if engines end with this
    /// process.
    fn record_name(&self) -> Option<RecordName> {
        None
    }

    /// Takes over an engine that an earlier frontend launched and detached. `sockets` is its
    /// folder. Returns `None` if the engine no longer runs.
    ///
    /// # Errors
    /// The engine's output can't be read.
    fn take_over(
        &self,
        _worker: WorkerId,
        _launched: Launched,
        _sockets: &SocketDir,
    ) -> Result<Option<Box<dyn RunningEngine>>, ConnectError> {
        Ok(None)
    }

    /// Returns `true` if all engines use one handshake address. Its socket then stays open between
    /// them, because an engine may start before the end of its predecessor is detected.
    fn shares_handshake(&self) -> bool {
        false
    }

    /// Describes the start for the user who waits for it.
    fn describe(&self) -> String;

    /// Returns the maximum pause before a restart. It limits the load of an engine that dies again
    /// and again.
    fn max_retry_pause(&self) -> Duration {
        DEFAULT_MAX_RETRY_PAUSE
    }
}

/// The name of an engine's record in the state folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordName {
    /// The name of one record. A second frontend waits for the end of the first.
    Exact(String),
    /// The prefix of numbered records of interchangeable engines. Each frontend takes the first
    /// record that no other has.
    Numbered(String),
}

/// A running engine. Dropping it ends the engine at once.
pub trait RunningEngine: Send {
    /// Waits until the engine has ended by itself, and returns a description of its end.
    fn exited(&mut self) -> BoxFuture<'_, String>;

    /// Returns the activity of the engine's processes; `None` if they are not visible to this one.
    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        ready(None).boxed()
    }

    /// Returns the last lines of the engine's log; `None` if this process does not read it.
    fn log(&self) -> Option<LastLines> {
        None
    }

    /// Returns the silence after which the engine counts as dead; `None` if it may answer again.
    fn max_silence(&self) -> Option<Duration> {
        None
    }

    /// Returns the generation of the engine's group; `None` for an engine that is in no group.
    fn generation(&self) -> Option<Arc<Generation>> {
        None
    }

    /// Records why the engine is not used, before it is stopped.
    fn fail(&self, _reason: &str) {}

    /// Ends the engine and its descendants.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()>;

    /// Ends the engine and its descendants without letting it finish anything.
    fn kill(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.stop()
    }

    /// Returns the engine's processes if they can outlive this one.
    fn surviving_processes(&self) -> Option<Launched> {
        None
    }

    /// Detaches the engine at the end of this process: it runs on if it can outlive the process,
    /// and ends otherwise.
    fn detach(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.stop()
    }
}

/// A host for engines that are started elsewhere, one after the other, with this handshake address.
pub struct AttachHost {
    handshake: String,
}

impl AttachHost {
    /// Creates a host. `handshake` is `tcp://host:port`, with a host that the engine can reach.
    pub fn new(handshake: impl Into<String>) -> Self {
        Self { handshake: handshake.into() }
    }
}

impl EngineHost for AttachHost {
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints {
        let address = self.handshake.strip_prefix("tcp://").unwrap_or_default();
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        match host {
            "127.0.0.1" | "localhost" | "[::1]" => EngineEndpoints::local(&self.handshake, sockets),
            _ => EngineEndpoints::tcp(&self.handshake, host),
        }
    }

    fn start<'a>(
        &'a self,
        _worker: WorkerId,
        _endpoints: &'a EngineEndpoints,
        _sockets: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>> {
        async { Ok(Box::new(Attached) as Box<dyn RunningEngine>) }.boxed()
    }

    fn record_name(&self) -> Option<RecordName> {
        Some(RecordName::Exact(self.handshake.clone()))
    }

    fn shares_handshake(&self) -> bool {
        true
    }

    fn describe(&self) -> String {
        format!("waiting for an engine at {}", self.handshake)
    }

    // Waiting for an engine costs nothing, and whoever starts attached engines pauses between
    // starts.
    fn max_retry_pause(&self) -> Duration {
        Duration::from_millis(100)
    }
}

/// An engine that was started elsewhere. Its end is detected on its sockets, and it can't be ended
/// from here.
struct Attached;

impl RunningEngine for Attached {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        pending().boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }
}
