//! Engines that start one after the other, as engines on one GPU must.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::mock_engine::{MockEngine, Order, report, send_hello, soon};
use chiasm_backend::{
    ConnectError, Connected, Connector, LargestItem, MediaDelivery, MediaObserver,
};
use chiasm_engine::{
    ArenaPolicy, AttachHost, ClientOptions, EngineConnector, EngineEndpoints, EngineHost,
    EngineOptions, FormatPolicy, RunningEngine, SocketDir,
};
use chiasm_types::{Role, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, pending};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinHandle;
use zeromq::SocketRecv;

/// The time without a start after which a test assumes that the engine waits.
const NO_START_TIMEOUT: Duration = Duration::from_millis(200);

/// A host of engines that become ready on a signal, and end when its sender is dropped.
struct SlowHost {
    /// Receives the sender of the signal of each started engine.
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
        let (make_ready, signal) = oneshot::channel();
        self.started.send(make_ready).unwrap();
        let endpoints = endpoints.clone();
        let (ended, end) = oneshot::channel();
        tokio::spawn(async move {
            if signal.await.is_err() {
                drop(ended);
                return;
            }
            let _engine = MockEngine::start(&endpoints, report(), Order::ReportFirst).await;
            pending::<()>().await;
        });
        async { Ok(Box::new(SlowEngine(end)) as Box<dyn RunningEngine>) }.boxed()
    }

    fn describe(&self) -> String {
        "starting a slow engine".to_owned()
    }
}

struct SlowEngine(oneshot::Receiver<()>);

impl RunningEngine for SlowEngine {
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

struct NoObserver;

impl MediaObserver for NoObserver {
    fn delivered(&self, _: MediaDelivery) {}

    fn missed(&self, _: usize) {}

    fn stepped_down(&self, _: &'static str, _: &dyn fmt::Display) {}
}

/// Connectors that wait for their engines, and the engines started so far, in order.
struct Starts {
    connecting: Vec<JoinHandle<Result<Connected, ConnectError>>>,
    started: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

fn options(starts: Option<Arc<Mutex<()>>>) -> EngineOptions {
    EngineOptions {
        startup_timeout: crate::mock_engine::STEP_TIMEOUT,
        client: ClientOptions::default(),
        format: FormatPolicy::Float,
        arena: ArenaPolicy::Never,
        processor: b"p"[..].into(),
        largest_item: LargestItem::unknown(),
        role: Role::Aggregated,
        private_network: None,
        embeddings: None,
        starts,
    }
}

fn connect(engines: u32, starts: Option<Arc<Mutex<()>>>) -> Starts {
    let (sender, started) = mpsc::unbounded_channel();
    let connect = |number| {
        let options = options(starts.clone());
        let connector = EngineConnector::new(SlowHost { started: sender.clone() }, options);
        tokio::spawn(async move { connector.connect(WorkerId(number), Arc::new(NoObserver)).await })
    };
    Starts { connecting: (0..engines).map(connect).collect(), started }
}

#[tokio::test]
async fn start_waits_for_previous_engine() {
    let Starts { connecting, mut started } = connect(3, Some(Arc::default()));
    let first = soon(started.recv()).await.unwrap();
    let second = tokio::time::timeout(NO_START_TIMEOUT, started.recv()).await;
    assert!(second.is_err(), "it waits until the first is ready");
    first.send(()).unwrap();
    let second = soon(started.recv()).await.unwrap();
    let third = tokio::time::timeout(NO_START_TIMEOUT, started.recv()).await;
    assert!(third.is_err(), "it waits for the end of the second");
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
async fn starts_are_concurrent_without_lock() {
    let mut starts = connect(3, None);
    for _ in 0..3 {
        soon(starts.started.recv()).await.unwrap();
    }
}

/// An engine may start before the end of its predecessor is detected. Its HELLO, which it sends
/// once, must wait for the next connection of the worker.
#[tokio::test]
async fn early_hello_of_attached_engine_is_answered() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let handshake = format!("tcp://127.0.0.1:{port}");
    let connector = EngineConnector::new(AttachHost::new(&handshake), options(None));
    // Engines receive the other addresses in INIT.
    let endpoints = EngineEndpoints::tcp(&handshake, "127.0.0.1");
    let connect = || soon(connector.connect(WorkerId(0), Arc::new(NoObserver)));

    let start = MockEngine::start(&endpoints, report(), Order::ReportFirst);
    let (first, first_engine) = tokio::join!(connect(), soon(start));
    let mut second_engine = send_hello(&endpoints, 0).await;
    drop(first_engine);
    drop(first.unwrap());
    tokio::select! {
        init = soon(second_engine.recv()) => drop(init.unwrap()),
        result = connect() => panic!("connected before INIT: {:?}", result.is_ok()),
    }
}
