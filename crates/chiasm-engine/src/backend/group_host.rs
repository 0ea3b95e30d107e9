//! A host for the engines of one rank of a group.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Activity, ConnectError};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt};

use super::host::{EngineHost, RunningEngine};
use crate::error::first_line;
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
            let membership = DissolveOnDrop { rank: self.rank, generation };
            let started = self.host.start(worker, endpoints, sockets).await;
            let engine =
                started.inspect_err(|error| membership.end(&format!("can't start: {error}")))?;
            Ok(Box::new(GroupEngine { membership, engine }) as Box<dyn RunningEngine>)
        }
        .boxed()
    }

    fn max_retry_pause(&self) -> Duration {
        self.host.max_retry_pause()
    }

    // `record_name` and `take_over` keep their defaults: a group never outlives this process.
    fn describe(&self) -> String {
        let size = self.group.size();
        format!("{} (rank {} of a group of {size})", self.host.describe(), self.rank)
    }
}

/// The engine of one rank. It ends when another engine of its generation ends.
struct GroupEngine {
    membership: DissolveOnDrop,
    engine: Box<dyn RunningEngine>,
}

/// The place of a rank in a generation. Dissolves the generation when dropped.
struct DissolveOnDrop {
    rank: u16,
    generation: Arc<Generation>,
}

impl DissolveOnDrop {
    /// Ends the generation, unless it has ended, because of this rank.
    fn end(&self, why: &str) {
        self.generation.dissolve(self.rank, why);
    }
}

impl Drop for DissolveOnDrop {
    fn drop(&mut self) {
        self.end("it was stopped");
    }
}

impl RunningEngine for GroupEngine {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            let generation = self.membership.generation.clone();
            tokio::select! {
                // The engine's own end explains more than that of its group.
                biased;
                end = self.engine.exited() => {
                    self.membership.end(first_line(&end));
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

    fn fail(&self, reason: &str) {
        self.membership.end(first_line(reason));
    }

    // At once: an engine that is asked to end first finishes its step, which may need an engine
    // that is gone.
    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        let Self { membership, engine } = *self;
        drop(membership);
        engine.kill()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::{join, pending, ready};
    use tokio::sync::Notify;

    use super::*;

    /// A host whose engines end when they are told, and count how often they are killed.
    #[derive(Clone, Default)]
    struct TestHost {
        end: Arc<Notify>,
        killed: Arc<AtomicUsize>,
    }

    struct TestEngine(TestHost);

    impl EngineHost for TestHost {
        fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints {
            EngineEndpoints::local("tcp://127.0.0.1:0", sockets)
        }

        fn start<'a>(
            &'a self,
            _: WorkerId,
            _: &'a EngineEndpoints,
            _: &'a SocketDir,
        ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>> {
            ready(Ok(Box::new(TestEngine(self.clone())) as Box<dyn RunningEngine>)).boxed()
        }

        fn describe(&self) -> String {
            "starting a test engine".to_owned()
        }
    }

    impl RunningEngine for TestEngine {
        fn exited(&mut self) -> BoxFuture<'_, String> {
            async {
                self.0.end.notified().await;
                "its process ended\nlast lines".to_owned()
            }
            .boxed()
        }

        fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
            pending().boxed()
        }

        fn kill(self: Box<Self>) -> BoxFuture<'static, ()> {
            self.0.killed.fetch_add(1, Ordering::Relaxed);
            ready(()).boxed()
        }
    }

    #[tokio::test]
    async fn end_of_one_rank_ends_all() {
        let group = EngineGroup::new(0, 2, Duration::from_secs(60));
        let hosts = [TestHost::default(), TestHost::default()];
        let [first, second] = [0, 1]
            .map(|rank| GroupHost::new(group.clone(), rank, hosts[usize::from(rank)].clone()));
        let sockets = SocketDir::new().unwrap();
        let endpoints = first.endpoints(&sockets);
        assert!(first.describe().ends_with("(rank 0 of a group of 2)"));
        for end_by_itself in [true, false] {
            let start = |host| GroupHost::start(host, WorkerId(0), &endpoints, &sockets);
            let (first, second) = join(start(&first), start(&second)).await;
            let (mut first, mut second) = (first.unwrap(), second.unwrap());
            let end = if end_by_itself {
                hosts[1].end.notify_one();
                assert_eq!(second.exited().await, "its process ended\nlast lines");
                "its group ended: rank 1: its process ended"
            } else {
                second.stop().await;
                "its group ended: rank 1: it was stopped"
            };
            assert_eq!(first.exited().await, end);
            first.stop().await;
        }
        assert_eq!(hosts.map(|host| host.killed.load(Ordering::Relaxed)), [2, 1]);
    }

    #[tokio::test]
    async fn group_ends_with_the_reason_of_the_rank_that_failed() {
        let group = EngineGroup::new(0, 2, Duration::from_secs(60));
        let hosts = [0, 1].map(|rank| GroupHost::new(group.clone(), rank, TestHost::default()));
        let sockets = SocketDir::new().unwrap();
        let endpoints = hosts[0].endpoints(&sockets);
        let start = |host| GroupHost::start(host, WorkerId(0), &endpoints, &sockets);
        let (first, second) = join(start(&hosts[0]), start(&hosts[1])).await;
        let mut first = first.unwrap();
        let second = second.unwrap();
        second.fail("it was not ready after 5 s\nmore");
        second.stop().await;
        let end = "its group ended: rank 1: it was not ready after 5 s";
        assert_eq!(first.exited().await, end);
    }
}
