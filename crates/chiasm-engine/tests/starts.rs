//! Engines that start one after the other, as those on one GPU have to.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::mock_engine::{MockEngine, Order, report, soon};
use chiasm_backend::{ConnectError, Connected, Connector, Delivered, LargestItem, MediaObserver};
use chiasm_engine::{
    ArenaPolicy, ClientOptions, EngineConnector, EngineEndpoints, EngineHost, EngineOptions,
    FormatPolicy, RunningEngine, SocketDir,
};
use chiasm_types::{Role, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, pending};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinHandle;

/// Long enough to see that something is not done.
const A_WHILE: Duration = Duration::from_millis(200);

/// Starts engines that get ready when they are told so, and end when nobody can tell them any more.
struct SlowHost {
    started: mpsc::UnboundedSender<oneshot::Sender<()>>,
}

impl EngineHost for SlowHost {
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints {
        EngineEndpoints::local("tcp://127.0.0.1:0", sockets)
    }

    fn start<'a>(
        &'a self,
        _: WorkerId,
        endpoints: &'a EngineEndpoints,
        _: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>> {
        let (get_ready, told) = oneshot::channel();
        self.started.send(get_ready).unwrap();
        let endpoints = endpoints.clone();
        let (ended, end) = oneshot::channel();
        tokio::spawn(async move {
            if told.await.is_err() {
                drop(ended);
                return;
            }
            let _engine = MockEngine::start(&endpoints, report(), Order::ReportFirst).await;
            pending::<()>().await;
        });
        async { Ok(Box::new(Slow(end)) as Box<dyn RunningEngine>) }.boxed()
    }

    fn describe(&self) -> String {
        "starting a slow engine".to_owned()
    }
}

struct Slow(oneshot::Receiver<()>);

impl RunningEngine for Slow {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            let _ = (&mut self.0).await;
            "it ended".to_owned()
        }
        .boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }
}

struct Nobody;

impl MediaObserver for Nobody {
    fn delivered(&self, _: Delivered) {}

    fn missed(&self, _: usize) {}

    fn stepped_down(&self, _: &'static str, _: &dyn fmt::Display) {}
}

/// Engines that connect, and those that have been started so far, in their order.
struct Starts {
    connecting: Vec<JoinHandle<Result<Connected, ConnectError>>>,
    started: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

fn connect(engines: u32, starts: Option<Arc<Mutex<()>>>) -> Starts {
    let (sender, started) = mpsc::unbounded_channel();
    let connect = |number| {
        let options = EngineOptions {
            startup_timeout: crate::mock_engine::PATIENCE,
            client: ClientOptions::default(),
            format: FormatPolicy::Float,
            arena: ArenaPolicy::Never,
            processor: b"p"[..].into(),
            largest_item: LargestItem::unknown(),
            role: Role::Aggregated,
            private_network: None,
            embeddings: None,
            starts: starts.clone(),
        };
        let connector = EngineConnector::new(SlowHost { started: sender.clone() }, options);
        tokio::spawn(async move { connector.connect(WorkerId(number), Arc::new(Nobody)).await })
    };
    Starts { connecting: (0..engines).map(connect).collect(), started }
}

#[tokio::test]
async fn each_starts_when_the_one_before_it_is_ready_or_has_ended() {
    let Starts { connecting, mut started } = connect(3, Some(Arc::default()));
    let first = soon(started.recv()).await.unwrap();
    assert!(tokio::time::timeout(A_WHILE, started.recv()).await.is_err(), "the second is to wait");
    first.send(()).unwrap();
    let second = soon(started.recv()).await.unwrap();
    assert!(tokio::time::timeout(A_WHILE, started.recv()).await.is_err(), "the third is to wait");
    drop(second);
    let third = soon(started.recv()).await.unwrap();
    third.send(()).unwrap();
    let mut ready = 0;
    for connecting in connecting {
        ready += usize::from(soon(connecting).await.unwrap().is_ok());
    }
    assert_eq!(ready, 2);
}

#[tokio::test]
async fn others_start_at_once() {
    let mut starts = connect(3, None);
    for _ in 0..3 {
        soon(starts.started.recv()).await.unwrap();
    }
}
