use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chiasm_backend::fake::{FakeBackend, FakeConnector, fake_capabilities};
use chiasm_backend::{
    Activity, BackendLifecycle, Capabilities, ConnectError, Connected, Connector, DeathReason,
    Load, MediaObserver,
};
use chiasm_router::{Knowledge, RouterConfig};
use chiasm_types::BlockSize;
use futures_util::future::{BoxFuture, FutureExt};
use tokio::time::Instant;

use super::*;

const ONLY: WorkerId = WorkerId(0);

/// Starts a fleet of one worker that connects to these backends in turn.
fn fleet(backends: impl IntoIterator<Item = Result<FakeBackend, ConnectError>>) -> Arc<Fleet> {
    let connector = Box::new(FakeConnector::new(backends)) as Box<dyn Connector>;
    Fleet::start(vec![connector], RouterConfig::default(), Patience::default()).unwrap()
}

fn refused() -> Result<FakeBackend, ConnectError> {
    Err(ConnectError::new("no such program"))
}

/// Returns `true` if the metrics have a series of this worker.
fn has_series(fleet: &Fleet, worker: WorkerId) -> bool {
    let mut registry = prometheus_client::registry::Registry::default();
    fleet.metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode_registry(&mut text, &registry).unwrap();
    text.contains(&format!("worker=\"{worker}\""))
}

/// Waits until no worker is available.
async fn all_gone(fleet: &Fleet) {
    fleet.ready.subscribe().wait_for(|&ready| ready == 0).await.unwrap();
}

#[test]
fn fleet_without_workers_is_refused() {
    assert!(Fleet::start(Vec::new(), RouterConfig::default(), Patience::default()).is_err());
}

#[tokio::test(start_paused = true)]
async fn failed_connection_is_retried_with_backoff() {
    let started = Instant::now();
    let fleet = fleet([refused(), refused(), refused(), Ok(FakeBackend::new())]);
    assert!(fleet.wait_ready(1).await);
    assert_eq!(started.elapsed().as_millis() / 100 * 100, 500 + 1000 + 2000);
    assert_eq!(fleet.metrics.engine_deaths(ONLY), 3);
}

#[tokio::test(start_paused = true)]
async fn dead_backend_is_replaced_after_initial_pause() {
    let first = FakeBackend::new();
    let second = FakeBackend::new();
    let fleet = fleet([Ok(first.clone()), Ok(second.clone())]);
    assert!(fleet.wait_ready(1).await);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    first.die(DeathReason::new("out of memory"));
    all_gone(&fleet).await;
    assert!(
        fleet.worker(ONLY).is_none()
            && fleet.router().workers().is_empty()
            && fleet.classes().is_empty()
    );
    let lost_at = Instant::now();
    assert!(fleet.wait_ready(1).await);
    assert_eq!(
        lost_at.elapsed().as_millis() / 100 * 100,
        500,
        "after a healthy hour the pause is the initial one"
    );
    assert!(fleet.worker(ONLY).is_some());
}

/// A connector whose backends record how they end.
struct RecordingConnector {
    connector: FakeConnector,
    max_silence: Option<Duration>,
    ends: Ends,
}

type Ends = Arc<std::sync::Mutex<Vec<&'static str>>>;

struct RecordingLifecycle {
    max_silence: Option<Duration>,
    ends: Ends,
}

impl Connector for RecordingConnector {
    fn connect(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let Connected { backend, .. } = self.connector.connect(worker, observer).await?;
            let Self { max_silence, ends, .. } = self;
            let lifecycle = RecordingLifecycle { max_silence: *max_silence, ends: ends.clone() };
            Ok(Connected { backend, lifecycle: Box::new(lifecycle) })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        self.connector.describe()
    }

    fn max_retry_pause(&self) -> Duration {
        self.connector.max_retry_pause()
    }
}

impl BackendLifecycle for RecordingLifecycle {
    fn ended(&mut self) -> BoxFuture<'_, DeathReason> {
        std::future::pending().boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        async { None }.boxed()
    }

    fn max_silence(&self) -> Option<Duration> {
        self.max_silence
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.ends.lock().unwrap().push("stopped");
        async {}.boxed()
    }

    fn detach(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.ends.lock().unwrap().push("detached");
        async {}.boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn dead_backend_is_stopped_live_one_detached() {
    let first = FakeBackend::new();
    let ends = Arc::default();
    let connector = FakeConnector::new([Ok(first.clone()), Ok(FakeBackend::new())]);
    let connector: Box<dyn Connector> =
        Box::new(RecordingConnector { connector, max_silence: None, ends: Arc::clone(&ends) });
    let fleet =
        Fleet::start(vec![connector], RouterConfig::default(), Patience::default()).unwrap();
    assert!(fleet.wait_ready(1).await);
    first.die(DeathReason::new("it does not answer"));
    all_gone(&fleet).await;
    assert!(fleet.wait_ready(1).await);
    assert_eq!(*ends.lock().unwrap(), ["stopped"]);
    // An engine is also detached if its requests had to be aborted.
    fleet.abort_requests("shutting down");
    fleet.shutdown().await;
    assert_eq!(*ends.lock().unwrap(), ["stopped", "detached"]);
}

#[tokio::test(start_paused = true)]
async fn engine_ends_after_its_maximum_silence() {
    let first = FakeBackend::new();
    let ends = Arc::default();
    let connector = FakeConnector::new([Ok(first.clone()), Ok(FakeBackend::new())]);
    let max_silence = Some(Duration::from_secs(60));
    let connector = RecordingConnector { connector, max_silence, ends: Arc::clone(&ends) };
    let connector: Box<dyn Connector> = Box::new(connector);
    let fleet =
        Fleet::start(vec![connector], RouterConfig::default(), Patience::default()).unwrap();
    assert!(fleet.wait_ready(1).await);
    for (seconds, expected) in [(50, &[][..]), (70, &["stopped"])] {
        first.set_silent(true);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        first.set_silent(false);
        assert_eq!(*ends.lock().unwrap(), expected, "silent for {seconds} s");
    }
    assert!(fleet.wait_ready(1).await);
}

/// A connector that panics at the first connection.
struct PanickingConnector {
    connector: FakeConnector,
    has_panicked: AtomicBool,
}

impl Connector for PanickingConnector {
    fn connect(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        assert!(self.has_panicked.swap(true, Ordering::Relaxed), "on purpose");
        self.connector.connect(worker, observer)
    }

    fn describe(&self) -> String {
        self.connector.describe()
    }

    fn max_retry_pause(&self) -> Duration {
        self.connector.max_retry_pause()
    }
}

#[tokio::test(start_paused = true)]
async fn keeper_survives_panic() {
    let connector = FakeConnector::new([Ok(FakeBackend::new())]);
    let connector = PanickingConnector { connector, has_panicked: AtomicBool::new(false) };
    let fleet =
        Fleet::start(vec![Box::new(connector)], RouterConfig::default(), Patience::default())
            .unwrap();
    assert!(fleet.wait_ready(1).await);
    assert_eq!(fleet.metrics.engine_deaths(ONLY), 1);
}

#[tokio::test(start_paused = true)]
async fn removed_worker_has_no_metrics() {
    let fleet = fleet(vec![Ok(FakeBackend::new())]);
    assert!(fleet.wait_ready(1).await);
    let second = fleet.add(Box::new(FakeConnector::new([refused(), Ok(FakeBackend::new())])));
    let second = second.expect("the fleet runs");
    assert!(fleet.wait_ready(2).await);
    assert!(has_series(&fleet, second));
    fleet.remove(second);
    while has_series(&fleet, second) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(fleet.ready_workers(), 1);
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_all_waits() {
    for backends in [vec![], vec![refused()], vec![Ok(FakeBackend::new())]] {
        let fleet = fleet(backends);
        tokio::task::yield_now().await;
        fleet.shutdown().await;
        assert_eq!(fleet.ready_workers(), 0);
        assert!(!fleet.wait_ready(1).await);
    }
}

#[tokio::test(start_paused = true)]
async fn reported_load_reaches_router() {
    let backend = FakeBackend::new();
    let fleet = fleet([Ok(backend.clone())]);
    assert!(fleet.wait_ready(1).await);
    backend.report_load(Load { running: 3, waiting: 2, kv_usage: 0.5, ..Load::default() });
    let engine = fleet.router().workers()[0].engine.unwrap();
    assert_eq!((engine.running, engine.waiting, engine.kv_usage), (3, 2, 0.5));
}

#[tokio::test(start_paused = true)]
async fn backend_without_kv_events_is_approximate() {
    let fleet = fleet([Ok(FakeBackend::new())]);
    assert!(fleet.wait_ready(1).await);
    assert_eq!(fleet.router().workers()[0].knowledge, Knowledge::Approximate);
}

fn class(processor: &str, block_size: u32) -> Capabilities {
    let mut capabilities = fake_capabilities();
    capabilities.class.processor = processor.as_bytes().into();
    capabilities.class.block_size = BlockSize::new(block_size).unwrap();
    capabilities
}

#[test]
fn class_lives_as_long_as_its_workers() {
    let mut classes = classes::Classes::default();
    let same =
        [classes.join(WorkerId(0), &class("a", 16)), classes.join(WorkerId(1), &class("a", 16))];
    assert_eq!(same[0], same[1]);
    let other = classes.join(WorkerId(2), &class("b", 16));
    let blocks = classes.join(WorkerId(3), &class("a", 32));
    let ids = |classes: &classes::Classes| {
        classes.present().iter().map(|class| class.id).collect::<Vec<_>>()
    };
    assert_eq!(ids(&classes), [same[0], other, blocks]);
    classes.leave(WorkerId(0));
    classes.leave(WorkerId(2));
    assert_eq!(ids(&classes), [same[1], blocks]);
    // Numbers of classes are never reused.
    assert!(classes.join(WorkerId(2), &class("b", 16)) > blocks);
}

#[test]
fn class_limits_are_maxima_over_workers() {
    let mut classes = classes::Classes::default();
    for (id, max_model_len) in [(0, 100), (1, 300), (2, 200)] {
        classes.join(WorkerId(id), &Capabilities { max_model_len, ..class("a", 16) });
    }
    assert_eq!(classes.present()[0].max_model_len, 300);
    classes.leave(WorkerId(1));
    assert_eq!(classes.present()[0].max_model_len, 200);
}
