//! A host for the engines of one rank of a group.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Activity, ConnectError};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt};

use super::host::{EngineHost, RunningEngine};
use crate::group::{EngineGroup, Generation};
use crate::launch::LastLines;
use crate::{EngineEndpoints, SocketDir};

/// A host that starts the engines of one rank, each in the next generation of its group.
pub struct GroupHost<H> {
    group: Arc<EngineGroup>,
    rank: u16,
    host: H,
}

impl<H: EngineHost> GroupHost<H> {
    /// Creates the host of a rank. `host` starts the engine.
    pub fn new(group: Arc<EngineGroup>, rank: u16, host: H) -> Self {
        Self { group, rank, host }
    }
}

impl<H: EngineHost> EngineHost for GroupHost<H> {
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints {
        self.host.endpoints(sockets)
    }

    fn start<'a>(
        &'a self,
        worker: WorkerId,
        endpoints: &'a EngineEndpoints,
        sockets: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>> {
        async move {
            let generation = self.group.join(self.rank).await?;
            let started = self.host.start(worker, endpoints, sockets).await;
            let engine = started.inspect_err(|error| {
                generation.dissolve(&format!("rank {} can't start: {error}", self.rank));
            })?;
            let membership = Membership { rank: self.rank, generation };
            Ok(Box::new(GroupEngine { membership, engine }) as Box<dyn RunningEngine>)
        }
        .boxed()
    }

    fn describe(&self) -> String {
        let size = self.group.size();
        format!("{} (rank {} of a group of {size})", self.host.describe(), self.rank)
    }
}

/// The engine of one rank, which ends with the other engines of its generation.
struct GroupEngine {
    membership: Membership,
    engine: Box<dyn RunningEngine>,
}

/// The membership of a running engine in its generation, which ends with it.
struct Membership {
    rank: u16,
    generation: Arc<Generation>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.generation.dissolve(&format!("rank {} was ended", self.rank));
    }
}

impl RunningEngine for GroupEngine {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            let Membership { rank, generation } = &self.membership;
            tokio::select! {
                end = self.engine.exited() => {
                    let first_line = end.lines().next().unwrap_or_default();
                    generation.dissolve(&format!("rank {rank}: {first_line}"));
                    end
                }
                reason = generation.dissolved() => format!("its group ended: {reason}"),
            }
        }
        .boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        self.engine.activity()
    }

    fn log(&self) -> Option<LastLines> {
        self.engine.log()
    }

    fn max_silence(&self) -> Option<Duration> {
        Some(self.membership.generation.max_silence())
    }

    fn generation(&self) -> Option<Arc<Generation>> {
        Some(self.membership.generation.clone())
    }

    // At once: an engine that is asked to end first finishes its step, which may need an engine
    // that is gone.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        let Self { membership, engine } = *self;
        drop(membership);
        engine.kill()
    }
}
