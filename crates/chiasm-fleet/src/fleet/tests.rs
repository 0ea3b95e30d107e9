use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chiasm_backend::fake::{FakeBackend, FakeConnector, fake_capabilities};
use chiasm_backend::{
    Activity, Capabilities, ConnectError, Connected, Connector, Death, Life, Load, MediaObserver,
};
use chiasm_router::{Knowledge, RouterConfig};
use chiasm_types::BlockSize;
use futures_util::future::{BoxFuture, FutureExt};
use tokio::time::Instant;

use super::*;

const ONLY: WorkerId = WorkerId(0);

/// A fleet of one worker with these backends, one after the other.
fn fleet(backends: impl IntoIterator<Item = Result<FakeBackend, ConnectError>>) -> Arc<Fleet> {
    let connector = Box::new(FakeConnector::new(backends)) as Box<dyn Connector>;
    Fleet::start(vec![connector], RouterConfig::default(), Patience::default()).unwrap()
}

fn refused() -> Result<FakeBackend, ConnectError> {
    Err(ConnectError::new("no such program"))
}

/// Returns `true` if any series of the metrics is one of this worker.
fn tells_of(fleet: &Fleet, worker: WorkerId) -> bool {
    let mut registry = prometheus_client::registry::Registry::default();
    fleet.metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode_registry(&mut text, &registry).unwrap();
    text.contains(&format!("worker=\"{worker}\""))
}

async fn gone(fleet: &Fleet) {
    fleet.ready.subscribe().wait_for(|&ready| ready == 0).await.unwrap();
}

#[test]
fn a_fleet_of_nobody_is_refused() {
    assert!(Fleet::start(Vec::new(), RouterConfig::default(), Patience::default()).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_can_not_be_had_is_tried_again_after_longer_and_longer_pauses() {
    let started = Instant::now();
    let fleet = fleet([refused(), refused(), refused(), Ok(FakeBackend::new())]);
    assert!(fleet.wait_ready(1).await);
    assert_eq!(started.elapsed().as_millis() / 100 * 100, 500 + 1000 + 2000);
    assert_eq!(fleet.metrics.engine_deaths(ONLY), 3);
}

#[tokio::test(start_paused = true)]
async fn a_dead_backend_leaves_at_once_and_the_next_one_follows() {
    let (first, second) = (FakeBackend::new(), FakeBackend::new());
    let fleet = fleet([Ok(first.clone()), Ok(second.clone())]);
    assert!(fleet.wait_ready(1).await);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    first.die(Death::new("out of memory"));
    gone(&fleet).await;
    assert!(
        fleet.worker(ONLY).is_none()
            && fleet.router().workers().is_empty()
            && fleet.classes().is_empty()
    );
    let left = Instant::now();
    assert!(fleet.wait_ready(1).await);
    assert_eq!(
        left.elapsed().as_millis() / 100 * 100,
        500,
        "an hour of health makes the pause the first one"
    );
    assert!(fleet.worker(ONLY).is_some());
}

/// Backends whose ends are noted.
struct Noted {
    connector: FakeConnector,
    ends: Arc<std::sync::Mutex<Vec<&'static str>>>,
}

struct NotedLife(Arc<std::sync::Mutex<Vec<&'static str>>>);

impl Connector for Noted {
    fn connect(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let Connected { backend, .. } = self.connector.connect(worker, observer).await?;
            Ok(Connected { backend, life: Box::new(NotedLife(self.ends.clone())) })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        self.connector.describe()
    }

    fn longest_pause(&self) -> Duration {
        self.connector.longest_pause()
    }
}

impl Life for NotedLife {
    fn ended(&mut self) -> BoxFuture<'_, Death> {
        std::future::pending().boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        async { None }.boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.0.lock().unwrap().push("stopped");
        async {}.boxed()
    }

    fn leave(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.0.lock().unwrap().push("left");
        async {}.boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn what_has_died_is_stopped_and_what_lives_at_the_end_is_left() {
    let (first, ends) = (FakeBackend::new(), Arc::default());
    let connector = FakeConnector::new([Ok(first.clone()), Ok(FakeBackend::new())]);
    let connector: Box<dyn Connector> = Box::new(Noted { connector, ends: Arc::clone(&ends) });
    let fleet =
        Fleet::start(vec![connector], RouterConfig::default(), Patience::default()).unwrap();
    assert!(fleet.wait_ready(1).await);
    first.die(Death::new("it does not answer"));
    gone(&fleet).await;
    assert!(fleet.wait_ready(1).await);
    assert_eq!(*ends.lock().unwrap(), ["stopped"]);
    // Also if requests had to be cut off before.
    fleet.cut("going down");
    fleet.shutdown().await;
    assert_eq!(*ends.lock().unwrap(), ["stopped", "left"]);
}

/// Panics when it is first asked.
struct Stumbling {
    connector: FakeConnector,
    has_panicked: AtomicBool,
}

impl Connector for Stumbling {
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

    fn longest_pause(&self) -> Duration {
        self.connector.longest_pause()
    }
}

#[tokio::test(start_paused = true)]
async fn a_keeper_that_panics_goes_on_after_a_pause() {
    let connector = FakeConnector::new([Ok(FakeBackend::new())]);
    let connector = Stumbling { connector, has_panicked: AtomicBool::new(false) };
    let fleet =
        Fleet::start(vec![Box::new(connector)], RouterConfig::default(), Patience::default())
            .unwrap();
    assert!(fleet.wait_ready(1).await);
    assert_eq!(fleet.metrics.engine_deaths(ONLY), 1);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_was_let_go_leaves_nothing_in_the_metrics() {
    let fleet = fleet(vec![Ok(FakeBackend::new())]);
    assert!(fleet.wait_ready(1).await);
    let second = fleet.add(Box::new(FakeConnector::new([refused(), Ok(FakeBackend::new())])));
    let second = second.expect("the fleet runs");
    assert!(fleet.wait_ready(2).await);
    assert!(tells_of(&fleet, second));
    fleet.remove(second);
    while tells_of(&fleet, second) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(fleet.ready_workers(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_whatever_is_being_waited_for() {
    for backends in [vec![], vec![refused()], vec![Ok(FakeBackend::new())]] {
        let fleet = fleet(backends);
        tokio::task::yield_now().await;
        fleet.shutdown().await;
        assert_eq!(fleet.ready_workers(), 0);
        assert!(!fleet.wait_ready(1).await);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_backend_says_of_its_load_reaches_the_router() {
    let backend = FakeBackend::new();
    let fleet = fleet([Ok(backend.clone())]);
    assert!(fleet.wait_ready(1).await);
    backend.say(Load { running: 3, waiting: 2, kv_usage: 0.5, ..Load::default() });
    let engine = fleet.router().workers()[0].engine.unwrap();
    assert_eq!((engine.running, engine.waiting, engine.kv_usage), (3, 2, 0.5));
}

#[tokio::test(start_paused = true)]
async fn a_backend_without_kv_events_is_known_approximately() {
    let fleet = fleet([Ok(FakeBackend::new())]);
    assert!(fleet.wait_ready(1).await);
    assert_eq!(fleet.router().workers()[0].knowledge, Knowledge::Approximate);
}

fn class(processor: &str, block_size: u32) -> Capabilities {
    let mut can = fake_capabilities();
    (can.class.processor, can.class.block_size) =
        (processor.as_bytes().into(), BlockSize::new(block_size).unwrap());
    can
}

#[test]
fn classes_come_and_go_with_their_workers() {
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
    // A number never means another class.
    assert!(classes.join(WorkerId(2), &class("b", 16)) > blocks);
}

#[test]
fn a_classes_limits_are_those_of_its_most_capable_worker() {
    let mut classes = classes::Classes::default();
    for (id, max_model_len) in [(0, 100), (1, 300), (2, 200)] {
        classes.join(WorkerId(id), &Capabilities { max_model_len, ..class("a", 16) });
    }
    assert_eq!(classes.present()[0].max_model_len, 300);
    classes.leave(WorkerId(1));
    assert_eq!(classes.present()[0].max_model_len, 200);
}
