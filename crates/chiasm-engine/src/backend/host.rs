//! Where engines come from: the trait, and engines that somebody else starts.

use std::time::Duration;

use chiasm_backend::{Activity, ConnectError};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt, pending, ready};

use crate::launch::LastLines;
use crate::state::Launched;
use crate::{EngineEndpoints, SocketDir};

/// Between the ends and starts of engines that this process starts and that die again and again.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Starts the engines of one worker, one after the other.
pub trait EngineHost: Send + Sync + 'static {
    /// Addresses for the next engine; `sockets` is a folder for Unix sockets that lives as long as
    /// the engine.
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints;

    /// Starts an engine that will connect to these addresses, which are bound by now.
    fn start<'a>(
        &'a self,
        worker: WorkerId,
        endpoints: &'a EngineEndpoints,
        sockets: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>>;

    /// The name under which the state folder has what is known of the host's engine; `None` where
    /// engines end with this process.
    fn kept_as(&self) -> Option<KeptAs> {
        None
    }

    /// Takes over an engine that a frontend before this one has launched and left, `sockets` being
    /// its folder. `None` if it does not run any more.
    fn take_over(
        &self,
        _worker: WorkerId,
        _launched: Launched,
        _sockets: &SocketDir,
    ) -> Result<Option<Box<dyn RunningEngine>>, ConnectError> {
        Ok(None)
    }

    /// What a person reads while it starts.
    fn describe(&self) -> String;

    /// The longest pause before the engine after one that died. Engines that die again and again
    /// must not keep a machine busy with starting them.
    fn longest_pause(&self) -> Duration {
        LONGEST_PAUSE
    }
}

/// A name in the state folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptAs {
    /// One engine can have it: two frontends that want it take turns.
    One(String),
    /// It stands for engines that are all alike, of which each frontend takes what no other has.
    AnyOf(String),
}

/// An engine that was started. Dropping it ends it at once.
pub trait RunningEngine: Send {
    /// Ends when the engine has ended by itself; says how.
    fn exited(&mut self) -> BoxFuture<'_, String>;

    /// What its processes do; `None` where they are not ours to look at.
    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        ready(None).boxed()
    }

    /// Returns the end of its log; `None` if this process does not read that.
    fn log(&self) -> Option<LastLines> {
        None
    }

    /// Ends the engine and everything it started.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()>;

    /// Its processes, if they outlive this one.
    fn outlives(&self) -> Option<Launched> {
        None
    }

    /// Lets go of it at the end of this process: it runs on if it can outlive that, and ends if
    /// not.
    fn leave(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.stop()
    }
}

/// Engines that somebody else starts, one after the other, and points at this handshake address.
pub struct AttachHost {
    handshake: String,
}

impl AttachHost {
    /// `handshake` is `tcp://host:port`, with a host that the engine can reach.
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

    fn kept_as(&self) -> Option<KeptAs> {
        Some(KeptAs::One(self.handshake.clone()))
    }

    fn describe(&self) -> String {
        format!("waiting for an engine at {}", self.handshake)
    }

    /// Waiting costs nothing, and whoever starts them has pauses of their own.
    fn longest_pause(&self) -> Duration {
        Duration::from_millis(100)
    }
}

/// An engine of somebody else: its end is seen on its sockets, and not ours to bring about.
struct Attached;

impl RunningEngine for Attached {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        pending().boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }
}
