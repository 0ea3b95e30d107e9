//! The backend against a scripted engine: media items that the engine lacks are fetched, and sent
//! again if its mirror was wrong, invisibly to the caller.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::mock_engine::{MockEngine, Order, report, soon};
use bytes::Bytes;
use chiasm_backend::{
    Backend, ConnectError, Connected, Connector, Constraint, Content, DeathReason, EncodedItem,
    FieldValue, Finish, HandOff, Input, ItemField, Job, JobError, JobItem, KvSource, LargestItem,
    Load, Locality, MediaDelivery, MediaForm, MediaObserver, MediaSource, Output, ReasoningHints,
    RequestId, RunningJob, Sampling, SourceError, Stage, StoredEmbeddings, Structured, Tensor,
    TensorBytes, TensorFormat, TensorRequest, TraceContext,
};
use chiasm_engine::launch::LastLines;
use chiasm_engine::wire::handshake::KvEventsConfig;
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineReady,
    FinishReason, PrefillStats, RequestError, SchedulerStats, TensorData, UtilityOutput, Value,
};
use chiasm_engine::{
    ArenaPolicy, ClientOptions, EcConnector, EmbeddingStore, EngineConnector, EngineEndpoints,
    EngineHost, EngineOptions, FormatPolicy, RunningEngine, SocketDir,
};
use chiasm_transfer::LAYOUT_VERSION;
use chiasm_types::{Dtype, MmHash, Modality, Placeholder, Role, TensorField, TokenId, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, pending};
use tokio::sync::oneshot;

const ELEMENTS: usize = 1000;

/// A host that starts a scripted engine and passes it to the test.
struct MockHost {
    report: EngineReady,
    started: Mutex<Option<oneshot::Sender<MockEngine>>>,
    over_tcp: bool,
    has_plugin: bool,
    log: LastLines,
}

impl EngineHost for MockHost {
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints {
        if self.over_tcp {
            EngineEndpoints::tcp("tcp://127.0.0.1:0", "127.0.0.1")
        } else {
            EngineEndpoints::local("tcp://127.0.0.1:0", sockets)
        }
    }

    fn start<'a>(
        &'a self,
        _: WorkerId,
        endpoints: &'a EngineEndpoints,
        _: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>> {
        let endpoints = endpoints.clone();
        let report = self.report.clone();
        let has_plugin = self.has_plugin;
        let started = self.started.lock().unwrap().take().unwrap();
        tokio::spawn(async move {
            let mut engine = MockEngine::start(&endpoints, report, Order::ReportFirst).await;
            if has_plugin {
                open_arena(&mut engine).await;
            }
            drop(started.send(engine));
        });
        let engine = EndlessEngine(self.log.clone());
        async { Ok(Box::new(engine) as Box<dyn RunningEngine>) }.boxed()
    }

    fn describe(&self) -> String {
        "starting a mock".to_owned()
    }
}

/// Answers `chiasm_attach` as the plugin does, without opening the arena: the tests only check
/// handles.
async fn open_arena(engine: &mut MockEngine) {
    let ClientMessage::Utility(call) = engine.receive().await else { panic!("not a call") };
    let answer =
        Value::Map(vec![("plugin".into(), "0".into()), ("layout".into(), LAYOUT_VERSION.into())]);
    let utility_output = Some(UtilityOutput { call_id: call.call_id, result: Ok(answer) });
    engine.send(EngineCoreOutputs { utility_output, ..EngineCoreOutputs::default() }).await;
}

struct EndlessEngine(LastLines);

impl RunningEngine for EndlessEngine {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        pending().boxed()
    }

    fn log(&self) -> Option<LastLines> {
        Some(self.0.clone())
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        async {}.boxed()
    }
}

#[derive(Default)]
struct Observed {
    delivered: Mutex<MediaDelivery>,
    missed: AtomicUsize,
    steps: Mutex<Vec<&'static str>>,
}

impl MediaObserver for Observed {
    fn delivered(&self, delivered: MediaDelivery) {
        *self.delivered.lock().unwrap() += delivered;
    }

    fn missed(&self, items: usize) {
        self.missed.fetch_add(items, Ordering::Relaxed);
    }

    fn stepped_down(&self, cause: &'static str, _: &dyn fmt::Display) {
        self.steps.lock().unwrap().push(cause);
    }
}

struct TestHarness {
    backend: Arc<dyn Backend>,
    engine: MockEngine,
    observed: Arc<Observed>,
    log: LastLines,
}

impl TestHarness {
    async fn with(report: EngineReady, receiver_cache_bytes: Option<u64>, over_tcp: bool) -> Self {
        Self::with_arena(report, receiver_cache_bytes, over_tcp, ArenaPolicy::Never).await
    }

    async fn with_arena(
        report: EngineReady,
        receiver_cache_bytes: Option<u64>,
        over_tcp: bool,
        arena: ArenaPolicy,
    ) -> Self {
        Self::with_options(report, receiver_cache_bytes, over_tcp, arena, None).await
    }

    async fn with_options(
        report: EngineReady,
        receiver_cache_bytes: Option<u64>,
        over_tcp: bool,
        arena: ArenaPolicy,
        embeddings: Option<Arc<EmbeddingStore>>,
    ) -> Self {
        crate::mock_engine::abort_on_client_panic();
        let (started, engine) = oneshot::channel();
        let has_plugin = arena != ArenaPolicy::Never;
        let log = LastLines::default();
        let started = Mutex::new(Some(started));
        let host = MockHost { report, started, over_tcp, has_plugin, log: log.clone() };
        let options = EngineOptions {
            startup_timeout: crate::mock_engine::STEP_TIMEOUT,
            client: ClientOptions { receiver_cache_bytes, ..ClientOptions::default() },
            format: FormatPolicy::Float,
            arena,
            processor: b"p"[..].into(),
            largest_item: LargestItem::unknown(),
            role: Role::Aggregated,
            embeddings,
            private_network: None,
            starts: None,
        };
        let observed = Arc::new(Observed::default());
        let connector = EngineConnector::new(host, options);
        let Connected { backend, .. } =
            soon(connector.connect(WorkerId(0), observed.clone())).await.unwrap();
        Self { backend, engine: engine.await.unwrap(), observed, log }
    }

    async fn new() -> Self {
        Self::with(report(), Some(1 << 20), false).await
    }

    async fn start(&self, job: Job) -> Result<Box<dyn RunningJob>, JobError> {
        soon(self.backend.start(Arc::new(job))).await
    }

    /// Fails a request, with these items reported as missing.
    async fn fail(&mut self, request: &EngineCoreRequest, missing: &[&str]) {
        let output = EngineCoreOutput {
            request_id: request.request_id.clone(),
            finish_reason: Some(FinishReason::Error),
            mm_cache_miss_hashes: missing.iter().map(|&name| name.to_owned()).collect(),
            ..EngineCoreOutput::default()
        };
        self.engine
            .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
            .await;
    }
}

/// A source of an item whose tensor repeats one byte. Counts its fetches.
struct ByteSource {
    byte: u8,
    fetches: Arc<AtomicUsize>,
}

impl MediaSource for ByteSource {
    fn tensors(
        &self,
        request: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        async move {
            if !(request.is_still_needed)() {
                return Ok(None);
            }
            self.fetches.fetch_add(1, Ordering::Relaxed);
            assert_eq!(
                request.format,
                TensorFormat::Normalized(Dtype::BF16),
                "the element type of the report"
            );
            let bytes = match request.memory.reserve(2 * ELEMENTS) {
                Some(mut slot) => {
                    slot.fill(self.byte);
                    TensorBytes::Slot(slot.publish())
                }
                None => TensorBytes::Here(Bytes::from(vec![self.byte; 2 * ELEMENTS])),
            };
            assert!(request.memory.takes(&bytes));
            let field = TensorField::rows(ELEMENTS);
            let tensor = Tensor { dtype: Dtype::BF16, shape: vec![ELEMENTS], bytes };
            let tensor =
                ItemField { name: "pixel_values".into(), field, value: FieldValue::Tensor(tensor) };
            Ok(Some(vec![tensor]))
        }
        .boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

/// Creates items with these bytes, one token each. Returns them with their counts of fetches.
fn items(bytes: &[u8]) -> (Arc<[JobItem]>, Vec<Arc<AtomicUsize>>) {
    let counts: Vec<Arc<AtomicUsize>> = bytes.iter().map(|_| Arc::default()).collect();
    let item = |(offset, (&byte, fetches)): (usize, (&u8, &Arc<AtomicUsize>))| JobItem {
        elements: 1,
        modality: Modality::Image,
        hash: MmHash::new([byte; 32]),
        placeholder: Placeholder { offset, length: 1, is_embed: None },
        source: Arc::new(ByteSource { byte, fetches: fetches.clone() }),
    };
    (bytes.iter().zip(&counts).enumerate().map(item).collect(), counts)
}

fn job(n: usize, media: Arc<[JobItem]>) -> Job {
    Job {
        id: RequestId::new("req-1").unwrap(),
        input: Input::Tokens(Arc::new((10..20).map(TokenId).collect())),
        media,
        sampling: Sampling { n, temperature: 1.0, seed: Some(7), ..Sampling::greedy(4) },
        adapter: None,
        cache_salt: None,
        priority: 0,
        trace: TraceContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
        reasoning: ReasoningHints { is_over: true, variables: vec![("thinking", false)] },
        stage: Stage::Whole,
        embedded: Vec::new(),
    }
}

fn no_media() -> Arc<[JobItem]> {
    Arc::new([])
}

fn fetches(counts: &[Arc<AtomicUsize>]) -> Vec<usize> {
    counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
}

/// Returns the first byte of each item's tensor in a request; `None` for an item without data.
fn sent(request: &EngineCoreRequest) -> Vec<Option<u8>> {
    let first = |data: &TensorData| match data {
        TensorData::Bytes(bytes) => bytes[0],
        other => panic!("{other:?}"),
    };
    let tensor = |feature: &chiasm_engine::wire::MmFeature| {
        let item = feature.data.as_ref()?;
        Some(first(&item.get("pixel_values")?.tensor()?.data))
    };
    request.mm_features.iter().map(tensor).collect()
}

fn tokens(output: Option<Result<Output, JobError>>) -> Vec<TokenId> {
    match output.unwrap().unwrap().content {
        Content::Tokens { tokens, .. } => tokens,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn capabilities_equal_ready_report() {
    let harness = TestHarness::new().await;
    let can = harness.backend.capabilities();
    assert_eq!(
        (can.engine.as_str(), can.max_model_len, can.class.block_size.get()),
        ("vLLM 0.32.0", 512, 16)
    );
    assert_eq!(can.media, MediaForm::Tensors(TensorFormat::Normalized(Dtype::BF16)));
    assert_eq!(
        (&can.hand_off, &can.locality, &*can.class.processor),
        (&HandOff::Inline, &Locality::Here, &b"p"[..])
    );
    assert!(matches!(can.kv, KvSource::Unknown { .. }));
}

#[tokio::test]
async fn stored_embeddings_are_reported_or_counted_missing() {
    let store = Arc::new(EmbeddingStore::new(EcConnector::Store, 1 << 20).unwrap());
    let mut harness = TestHarness::with_options(
        report(),
        Some(1 << 20),
        false,
        ArenaPolicy::Never,
        Some(store.clone()),
    )
    .await;
    assert_eq!(harness.backend.capabilities().embedding_store_bytes, 7 << 17);
    let (media, _) = items(&[1, 2, 3]);
    let [first, second, third] = [0, 1, 2].map(|at| media[at].hash);
    let encodes = Job { stage: Stage::Encode, ..job(1, media.clone()) };
    let mut running = harness.start(encodes).await.unwrap();
    let request = harness.engine.receive_add().await;
    assert_eq!(request.sampling_params.extra_args, None);
    // The engine reports the size of the first, has stored the second, and lacks the third.
    std::fs::write(store.folder().unwrap().join(format!("{second}.safetensors")), "1234").unwrap();
    let stored =
        [(first, Value::Map(vec![("bytes".into(), 7.into())])), (second, Value::Map(Vec::new()))];
    let output = EngineCoreOutput {
        request_id: request.request_id.clone(),
        finish_reason: Some(FinishReason::Stop),
        ec_transfer_params: Some(Value::Map(
            stored.map(|(item, value)| (item.to_string().into(), value)).into(),
        )),
        ..EngineCoreOutput::default()
    };
    harness
        .engine
        .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
        .await;
    assert_eq!(tokens(soon(running.next()).await), []);
    assert!(soon(running.next()).await.is_none());
    let expected =
        [StoredEmbeddings { item: first, bytes: 7 }, StoredEmbeddings { item: second, bytes: 4 }];
    assert_eq!(running.stored_embeddings(), expected);
    // Another job expects two items in the store, which has one of them.
    let computes = Job { embedded: vec![second, third], ..job(1, media) };
    let running = harness.start(computes).await.unwrap();
    assert_eq!(running.delivered().unfound, 1);
    assert_eq!(*harness.observed.steps.lock().unwrap(), ["no_embeddings"]);
}

#[tokio::test]
async fn wildcard_events_come_from_peer_address() {
    let events = KvEventsConfig {
        enable_kv_cache_events: true,
        publisher: "zmq".to_owned(),
        endpoint: "tcp://*:5557".to_owned(),
        ..KvEventsConfig::default()
    };
    let harness =
        TestHarness::with(EngineReady { kv_events_config: Some(events), ..report() }, None, true)
            .await;
    let can = harness.backend.capabilities();
    // The mock connects from loopback, so it is on this machine.
    assert_eq!(can.locality, Locality::Here);
    let KvSource::Events(stream) = &can.kv else { panic!("{:?}", can.kv) };
    assert_eq!(stream.endpoint, "tcp://127.0.0.1:5557");
}

#[tokio::test]
async fn continuations_are_requests_with_id_of_job() {
    let mut harness = TestHarness::new().await;
    let mut running = harness.start(job(3, no_media())).await.unwrap();
    let mut requests = Vec::new();
    for choice in 0..3 {
        let request = harness.engine.receive_add().await;
        assert!(
            request.request_id.starts_with("req-1-")
                && request.request_id.ends_with(&format!("-{choice}"))
        );
        assert_eq!(request.sampling_params.seed, Some(7 + choice));
        assert_eq!(request.reasoning_ended, Some(true));
        assert_eq!(request.reasoning_variables, [("thinking".to_owned(), false)]);
        assert_eq!(request.trace_headers[0].0, "traceparent");
        requests.push(request);
    }
    for (choice, token) in [(2, 5), (0, 6)] {
        harness
            .engine
            .answer(&requests[choice].request_id, token, Some(FinishReason::Length))
            .await;
        let output = soon(running.next()).await.unwrap().unwrap();
        assert_eq!((output.choice, output.finish), (choice, Some(Finish::Length)));
    }
    running.stop(1);
    assert!(soon(running.next()).await.is_none());
    let aborted = harness.engine.receive().await;
    assert_eq!(aborted, ClientMessage::Abort(vec![requests[1].request_id.clone()]));
}

#[tokio::test]
async fn held_items_are_not_fetched() {
    let mut harness = TestHarness::new().await;
    let (media, counts) = items(&[1, 2, 1]);
    let first = harness.start(job(1, media.clone())).await.unwrap();
    assert_eq!(sent(&harness.engine.receive_add().await), [Some(1), Some(2), None]);
    let second = harness.start(job(1, media)).await.unwrap();
    assert_eq!(sent(&harness.engine.receive_add().await), [None; 3]);
    assert_eq!(fetches(&counts), [1, 1, 0]);
    let ways = |cached, inline| MediaDelivery { cached, inline, ..MediaDelivery::default() };
    assert_eq!((first.delivered(), second.delivered()), (ways(1, 2), ways(3, 0)));
    assert_eq!(*harness.observed.delivered.lock().unwrap(), ways(4, 2));
}

#[tokio::test]
async fn items_that_exceed_the_cache_are_all_fetched() {
    // The cache has room for one and a half items.
    let mut harness = TestHarness::with(report(), Some(3 * ELEMENTS as u64), false).await;
    let (one, _) = items(&[1]);
    let _first = harness.start(job(1, one)).await.unwrap();
    assert_eq!(sent(&harness.engine.receive_add().await), [Some(1)]);
    // The engine holds the first item, but could evict it for the second before it reads it.
    let (both, counts) = items(&[1, 2]);
    let second = harness.start(job(1, both)).await.unwrap();
    assert_eq!(fetches(&counts), [1, 1]);
    // The first item is still in the mirror when the request is sent, so it has no data after all.
    assert_eq!(sent(&harness.engine.receive_add().await), [None, Some(2)]);
    assert_eq!(
        second.delivered(),
        MediaDelivery { cached: 1, inline: 1, ..MediaDelivery::default() }
    );
}

#[tokio::test]
async fn missing_item_is_sent_again_with_data() {
    let mut harness = TestHarness::new().await;
    let (media, counts) = items(&[1, 2]);
    let _first = harness.start(job(1, media.clone())).await.unwrap();
    harness.engine.receive_add().await;
    let mut running = harness.start(job(1, media)).await.unwrap();
    let request = harness.engine.receive_add().await;
    assert_eq!(sent(&request), [None, None]);
    harness.fail(&request, &[&"02".repeat(32)]).await;
    let again = {
        // The failure is invisible: the job's only output is that of the second request.
        let TestHarness { engine, .. } = &mut harness;
        let answering = async {
            let again = engine.receive_add().await;
            engine.answer(&again.request_id, 9, Some(FinishReason::Stop)).await;
            again
        };
        let (output, again) = soon(async { tokio::join!(running.next(), answering) }).await;
        assert_eq!(tokens(output), [TokenId(9)]);
        again
    };
    assert_eq!(sent(&again), [None, Some(2)]);
    assert_ne!(again.request_id, request.request_id);
    assert_eq!(fetches(&counts), [1, 2]);
    assert_eq!(harness.observed.missed.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn unreadable_slots_are_replaced_by_messages_once() {
    let arena = ArenaPolicy::Required { bytes: 1 << 20 };
    let mut harness = TestHarness::with_arena(report(), Some(1 << 20), false, arena).await;
    assert_eq!(harness.backend.capabilities().hand_off, HandOff::SharedMemory);
    let (media, counts) = items(&[1]);
    let mut running = harness.start(job(1, media)).await.unwrap();
    let first = harness.engine.receive_add().await;
    let data = &first.mm_features[0]
        .data
        .as_ref()
        .unwrap()
        .get("pixel_values")
        .unwrap()
        .tensor()
        .unwrap()
        .data;
    assert!(matches!(data, TensorData::OutOfBand(_)), "{data:?}");
    assert_eq!(running.delivered(), MediaDelivery { shared_memory: 1, ..MediaDelivery::default() });
    harness.fail(&first, &[]).await;
    let failing = async {
        let second = harness.engine.receive_add().await;
        assert_eq!(sent(&second), [Some(1)], "in the message");
        harness.fail(&second, &[]).await;
    };
    let (output, ()) = soon(async { tokio::join!(running.next(), failing) }).await;
    assert!(matches!(output, Some(Err(JobError::Failed))), "{output:?}");
    assert_eq!(fetches(&counts), [2]);
    assert_eq!(*harness.observed.steps.lock().unwrap(), ["engine_refused"]);
}

#[tokio::test]
async fn repeated_misses_fail_the_job() {
    let mut harness = TestHarness::new().await;
    let (media, _) = items(&[1, 2]);
    let _first = harness.start(job(1, media.clone())).await.unwrap();
    harness.engine.receive_add().await;
    let mut running = harness.start(job(1, media.clone())).await.unwrap();
    // Each time the engine lacks one of the two items: the one that the mirror has.
    let losing = async {
        for (lost, expected) in [(0, [None, None]), (1, [Some(1), None]), (0, [None, Some(2)])] {
            let request = harness.engine.receive_add().await;
            assert_eq!(sent(&request), expected);
            harness.fail(&request, &[&media[lost].name()]).await;
        }
    };
    let (output, ()) = soon(async { tokio::join!(running.next(), losing) }).await;
    assert!(matches!(output, Some(Err(JobError::KeepsLosingMedia))), "{output:?}");
    assert_eq!(harness.observed.missed.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn failure_with_all_data_is_final() {
    let mut harness = TestHarness::new().await;
    let (media, _) = items(&[1]);
    let mut running = harness.start(job(1, media)).await.unwrap();
    let request = harness.engine.receive_add().await;
    harness.fail(&request, &[]).await;
    assert!(matches!(soon(running.next()).await, Some(Err(JobError::Failed))));
}

#[tokio::test]
async fn failure_after_first_output_is_final() {
    let mut harness = TestHarness::new().await;
    let (media, _) = items(&[1]);
    let _first = harness.start(job(1, media.clone())).await.unwrap();
    harness.engine.receive_add().await;
    let mut running = harness.start(job(1, media)).await.unwrap();
    let request = harness.engine.receive_add().await;
    harness.engine.answer(&request.request_id, 5, None).await;
    assert_eq!(tokens(soon(running.next()).await), [TokenId(5)]);
    harness.fail(&request, &[]).await;
    assert!(matches!(soon(running.next()).await, Some(Err(JobError::Failed))));
}

#[tokio::test]
async fn error_of_output_decides_job_error() {
    let mut harness = TestHarness::new().await;
    let mut job_error = async |code: &str, retryable| {
        let mut running = harness.start(job(1, no_media())).await.unwrap();
        let request_id = harness.engine.receive_add().await.request_id;
        let error = Some(RequestError {
            code: code.to_owned(),
            message: "its words".to_owned(),
            retryable,
        });
        let finish_reason = Some(FinishReason::Error);
        let output =
            EngineCoreOutput { request_id, finish_reason, error, ..EngineCoreOutput::default() };
        harness
            .engine
            .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
            .await;
        soon(running.next()).await.unwrap().unwrap_err()
    };
    let paused = job_error("engine_paused", true).await;
    assert!(
        matches!(&paused, JobError::NotTaken(why) if why.to_string() == "its words"),
        "{paused}"
    );
    let invalid = job_error("validation_error", false).await;
    assert!(
        matches!(&invalid, JobError::Refused { message, .. } if message == "its words"),
        "{invalid}"
    );
    assert!(matches!(job_error("internal_error", false).await, JobError::Failed));
}

/// Fails a job with a constraint, after its engine has logged these lines. Returns the job's error.
async fn failed_constraint(
    harness: &mut TestHarness,
    error: Option<RequestError>,
    log: &[&str],
) -> JobError {
    let mut job = job(1, no_media());
    let constraint = Constraint::Regex("(".into());
    job.sampling.structured = Some(Structured { constraint, field: "structured_outputs.regex" });
    let mut running = harness.start(job).await.unwrap();
    let request_id = harness.engine.receive_add().await.request_id;
    log.iter().for_each(|line| harness.log.add(&line.replace("ID", &request_id)));
    let finish_reason = Some(FinishReason::Error);
    let output =
        EngineCoreOutput { request_id, finish_reason, error, ..EngineCoreOutput::default() };
    harness
        .engine
        .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
        .await;
    let failed = soon(running.next()).await.unwrap().unwrap_err();
    assert!(soon(running.next()).await.is_none());
    failed
}

#[tokio::test]
async fn failed_constraint_gives_the_reason_of_the_output() {
    let mut harness = TestHarness::new().await;
    let error = |code: &str| {
        Some(RequestError {
            code: code.to_owned(),
            message: "its words\n".to_owned(),
            retryable: false,
        })
    };
    let refused = failed_constraint(&mut harness, error("validation_error"), &[]).await;
    assert!(matches!(&refused, JobError::Refused { field, message }
        if field == "structured_outputs.regex" && message == "its words"));
    let failed = failed_constraint(&mut harness, error("internal_error"), &[]).await;
    assert!(
        matches!(&failed, JobError::ConstraintFailed { field, message }
        if field == "structured_outputs.regex" && message.contains("its words (internal_error)")),
        "{failed}"
    );
}

#[tokio::test]
async fn failed_constraint_gives_the_reason_of_the_log() {
    let mut harness = TestHarness::new().await;
    let rejected = "ERROR 11-28 [scheduler.py:1] Unexpected: grammar rejected tokens [0] \
                    for request ID. Terminating.";
    let compile = "ERROR 11-28 [__init__.py:2] Failed to compile grammar for request ID";
    let trace = "ERROR 11-28 [__init__.py:2] Traceback (most recent call last):";
    let exception = "ERROR 11-28 [__init__.py:2] RuntimeError: not closed";
    let refused = failed_constraint(&mut harness, None, &[compile, trace, exception]).await;
    assert!(
        matches!(&refused, JobError::Refused { field, message }
        if field == "structured_outputs.regex" && message.ends_with("RuntimeError: not closed")),
        "{refused}"
    );
    let failed = failed_constraint(&mut harness, None, &[rejected]).await;
    assert!(
        matches!(&failed, JobError::ConstraintFailed { message, .. }
        if message.contains("grammar rejected tokens")),
        "{failed}"
    );
    // The log has the failures of other requests only.
    let unexplained = failed_constraint(&mut harness, None, &[]).await;
    assert!(
        matches!(&unexplained, JobError::ConstraintFailed { message, .. }
        if message.ends_with("it gives no reason, its log may")),
        "{unexplained}"
    );
}

#[tokio::test]
async fn first_output_has_cached_tokens() {
    let mut harness = TestHarness::new().await;
    let mut running = harness.start(job(1, no_media())).await.unwrap();
    let request = harness.engine.receive_add().await;
    let output = EngineCoreOutput {
        request_id: request.request_id,
        new_token_ids: vec![TokenId(5)],
        prefill_stats: Some(PrefillStats { num_cached_tokens: 8, ..PrefillStats::default() }),
        ..EngineCoreOutput::default()
    };
    harness
        .engine
        .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
        .await;
    let prefill = soon(running.next()).await.unwrap().unwrap().prefill.unwrap();
    assert_eq!((prefill.cached_tokens, prefill.queued), (8, None));
}

#[tokio::test]
async fn load_equals_scheduler_stats() {
    let mut harness = TestHarness::new().await;
    let (sender, mut loads) = tokio::sync::mpsc::unbounded_channel();
    harness.backend.follow_load(Box::new(move |load| sender.send(load).unwrap()));
    let stats = SchedulerStats {
        num_running_reqs: 3,
        num_waiting_reqs: 2,
        kv_cache_usage: 0.5,
        ..SchedulerStats::default()
    };
    let outputs =
        EngineCoreOutputs { scheduler_stats: Some(stats), ..EngineCoreOutputs::default() };
    harness.engine.send(outputs).await;
    let load = Load { running: 3, waiting: 2, kv_usage: 0.5, ..Load::default() };
    assert_eq!(soon(loads.recv()).await, Some(load));
}

#[tokio::test]
async fn invalid_job_is_refused() {
    let harness = TestHarness::new().await;
    let mut too_long = job(1, no_media());
    too_long.input = Input::Tokens(Arc::new(vec![TokenId(1); 512]));
    let refused = harness.start(too_long).await.err();
    assert!(
        matches!(refused, Some(JobError::Refused { field, .. }) if field == "prompt_token_ids")
    );
    let mut messages = job(1, no_media());
    messages.input = Input::Messages(Bytes::from_static(b"{}"));
    let refused = harness.start(messages).await.err();
    assert!(matches!(refused, Some(JobError::Refused { field, .. }) if field == "input"));
}

#[tokio::test]
async fn declared_death_ends_jobs_with_its_reason() {
    let mut harness = TestHarness::new().await;
    let mut running = harness.start(job(1, no_media())).await.unwrap();
    harness.engine.receive_add().await;
    let reason = DeathReason::new("the machine was switched off");
    harness.backend.declare_dead(reason.clone());
    let ended = soon(running.next()).await;
    assert!(matches!(&ended, Some(Err(JobError::Dead(death))) if *death == reason), "{ended:?}");
    assert_eq!(soon(harness.backend.ended()).await, reason);
    assert!(matches!(harness.start(job(1, no_media())).await.err(), Some(JobError::NotTaken(_))));
}
