//! An engine behind the seam: what it lacks is asked for, what it turns out to lack is sent again,
//! before anybody learns of it.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::mock_engine::{MockEngine, Order, report, soon};
use bytes::Bytes;
use chiasm_backend::{
    Backend, ConnectError, Connected, Connector, Constraint, Content, Death, Delivered, Embeddings,
    EncodedItem, FieldValue, Finish, HandOff, Input, ItemField, Job, JobError, JobItem, KvSource,
    LargestItem, Load, Locality, MediaForm, MediaObserver, MediaSource, Output, ReasoningHints,
    RequestId, RunningJob, Sampling, SourceError, Stage, Structured, Tensor, TensorBytes,
    TensorFormat, TensorOrder, TraceContext,
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

/// Starts a scripted engine and hands it to the test.
struct MockHost {
    report: EngineReady,
    started: Mutex<Option<oneshot::Sender<MockEngine>>>,
    over_tcp: bool,
    has_plugin: bool,
    log: LastLines,
}

impl EngineHost for MockHost {
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints {
        match self.over_tcp {
            true => EngineEndpoints::tcp("tcp://127.0.0.1:0", "127.0.0.1"),
            false => EngineEndpoints::local("tcp://127.0.0.1:0", sockets),
        }
    }

    fn start<'a>(
        &'a self,
        _: WorkerId,
        endpoints: &'a EngineEndpoints,
        _: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>> {
        let (endpoints, report, has_plugin) =
            (endpoints.clone(), self.report.clone(), self.has_plugin);
        let started = self.started.lock().unwrap().take().unwrap();
        tokio::spawn(async move {
            let mut engine = MockEngine::start(&endpoints, report, Order::ReportFirst).await;
            if has_plugin {
                open_arena(&mut engine).await;
            }
            drop(started.send(engine));
        });
        let engine = Immortal(self.log.clone());
        async { Ok(Box::new(engine) as Box<dyn RunningEngine>) }.boxed()
    }

    fn describe(&self) -> String {
        "starting a mock".to_owned()
    }
}

/// Answers as the plugin does, and opens nothing: a name is enough for who only looks at handles.
async fn open_arena(engine: &mut MockEngine) {
    let ClientMessage::Utility(call) = engine.receive().await else { panic!("not a call") };
    let answer =
        Value::Map(vec![("plugin".into(), "0".into()), ("layout".into(), LAYOUT_VERSION.into())]);
    let utility_output = Some(UtilityOutput { call_id: call.call_id, result: Ok(answer) });
    engine.send(EngineCoreOutputs { utility_output, ..EngineCoreOutputs::default() }).await;
}

struct Immortal(LastLines);

impl RunningEngine for Immortal {
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
    delivered: Mutex<Delivered>,
    missed: AtomicUsize,
    steps: Mutex<Vec<&'static str>>,
}

impl MediaObserver for Observed {
    fn delivered(&self, delivered: Delivered) {
        *self.delivered.lock().unwrap() += delivered;
    }

    fn missed(&self, items: usize) {
        self.missed.fetch_add(items, Ordering::Relaxed);
    }

    fn stepped_down(&self, cause: &'static str, _: &dyn fmt::Display) {
        self.steps.lock().unwrap().push(cause);
    }
}

struct Stand {
    backend: Arc<dyn Backend>,
    engine: MockEngine,
    observed: Arc<Observed>,
    log: LastLines,
}

impl Stand {
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
        crate::mock_engine::abort_on_panics_of_the_client();
        let (started, engine) = oneshot::channel();
        let has_plugin = arena != ArenaPolicy::Never;
        let log = LastLines::default();
        let started = Mutex::new(Some(started));
        let host = MockHost { report, started, over_tcp, has_plugin, log: log.clone() };
        let options = EngineOptions {
            startup_timeout: crate::mock_engine::PATIENCE,
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

    /// One failed request.
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

/// An item whose tensor is this byte again and again; counts how often it is asked for.
struct Bytefield {
    byte: u8,
    asked: Arc<AtomicUsize>,
}

impl MediaSource for Bytefield {
    fn tensors(
        &self,
        order: TensorOrder,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        async move {
            if !(order.still_wanted)() {
                return Ok(None);
            }
            self.asked.fetch_add(1, Ordering::Relaxed);
            assert_eq!(
                order.format,
                TensorFormat::Normalized(Dtype::BF16),
                "what the engine reports"
            );
            let bytes = match order.memory.reserve(2 * ELEMENTS) {
                Some(mut slot) => {
                    slot.fill(self.byte);
                    TensorBytes::Slot(slot.publish())
                }
                None => TensorBytes::Here(Bytes::from(vec![self.byte; 2 * ELEMENTS])),
            };
            assert!(order.memory.takes(&bytes));
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

/// Items by their bytes, one token each, and how often each was asked for.
fn items(bytes: &[u8]) -> (Arc<[JobItem]>, Vec<Arc<AtomicUsize>>) {
    let counts: Vec<Arc<AtomicUsize>> = bytes.iter().map(|_| Arc::default()).collect();
    let item = |(offset, (&byte, asked)): (usize, (&u8, &Arc<AtomicUsize>))| JobItem {
        elements: 1,
        modality: Modality::Image,
        hash: MmHash::new([byte; 32]),
        placeholder: Placeholder { offset, length: 1, is_embed: None },
        source: Arc::new(Bytefield { byte, asked: asked.clone() }),
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

fn asked(counts: &[Arc<AtomicUsize>]) -> Vec<usize> {
    counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
}

/// The first byte of each item's tensor in a request; `None` where it came without data.
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
async fn what_the_engine_reports_becomes_its_capabilities() {
    let stand = Stand::new().await;
    let can = stand.backend.capabilities();
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
async fn embeddings_are_known_where_they_are_left_and_missed_where_they_are_not_found() {
    let store = Arc::new(EmbeddingStore::new(EcConnector::Store, 1 << 20).unwrap());
    let mut stand = Stand::with_options(
        report(),
        Some(1 << 20),
        false,
        ArenaPolicy::Never,
        Some(store.clone()),
    )
    .await;
    assert_eq!(stand.backend.capabilities().embedding_store_bytes, 7 << 17);
    let (media, _) = items(&[1, 2, 3]);
    let [first, second, third] = [0, 1, 2].map(|at| media[at].hash);
    let encodes = Job { stage: Stage::Encode, ..job(1, media.clone()) };
    let mut running = stand.start(encodes).await.unwrap();
    let request = stand.engine.receive_add().await;
    assert_eq!(request.sampling_params.extra_args, None);
    // The engine tells the size of one, has left another, and has not left the third.
    std::fs::write(store.folder().unwrap().join(format!("{second}.safetensors")), "1234").unwrap();
    let said =
        [(first, Value::Map(vec![("bytes".into(), 7.into())])), (second, Value::Map(Vec::new()))];
    let output = EngineCoreOutput {
        request_id: request.request_id.clone(),
        finish_reason: Some(FinishReason::Stop),
        ec_transfer_params: Some(Value::Map(
            said.map(|(item, value)| (item.to_string().into(), value)).into(),
        )),
        ..EngineCoreOutput::default()
    };
    stand
        .engine
        .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
        .await;
    assert_eq!(tokens(soon(running.next()).await), []);
    assert!(soon(running.next()).await.is_none());
    let left = [Embeddings { item: first, bytes: 7 }, Embeddings { item: second, bytes: 4 }];
    assert_eq!(running.embeddings(), left);
    // Another job should find two items, of which one is there.
    let computes = Job { embedded: vec![second, third], ..job(1, media) };
    let running = stand.start(computes).await.unwrap();
    assert_eq!(running.delivered().unfound, 1);
    assert_eq!(*stand.observed.steps.lock().unwrap(), ["no_embeddings"]);
}

#[tokio::test]
async fn an_engine_over_tcp_publishes_where_it_connects_from() {
    let events = KvEventsConfig {
        enable_kv_cache_events: true,
        publisher: "zmq".to_owned(),
        endpoint: "tcp://*:5557".to_owned(),
        ..KvEventsConfig::default()
    };
    let stand =
        Stand::with(EngineReady { kv_events_config: Some(events), ..report() }, None, true).await;
    let can = stand.backend.capabilities();
    // The mock's connection comes from loopback: it is on this machine.
    assert_eq!(can.locality, Locality::Here);
    let KvSource::Events(stream) = &can.kv else { panic!("{:?}", can.kv) };
    assert_eq!(stream.endpoint, "tcp://127.0.0.1:5557");
}

#[tokio::test]
async fn continuations_are_requests_that_bear_the_jobs_identity() {
    let mut stand = Stand::new().await;
    let mut running = stand.start(job(3, no_media())).await.unwrap();
    let mut requests = Vec::new();
    for choice in 0..3 {
        let request = stand.engine.receive_add().await;
        assert!(
            request.request_id.starts_with("req-1-")
                && request.request_id.ends_with(&format!("-{choice}"))
        );
        assert_eq!(request.sampling_params.seed, Some(7 + choice));
        let told = (request.reasoning_ended, &request.reasoning_variables[..]);
        assert_eq!(told, (Some(true), &[("thinking".to_owned(), false)][..]));
        assert_eq!(request.trace_headers[0].0, "traceparent");
        requests.push(request);
    }
    for (choice, token) in [(2, 5), (0, 6)] {
        stand.engine.answer(&requests[choice].request_id, token, Some(FinishReason::Length)).await;
        let output = soon(running.next()).await.unwrap().unwrap();
        assert_eq!((output.choice, output.finish), (choice, Some(Finish::Length)));
    }
    running.stop(1);
    assert!(soon(running.next()).await.is_none());
    assert!(
        matches!(stand.engine.receive().await, ClientMessage::Abort(ids) if ids == [requests[1].request_id.clone()])
    );
}

#[tokio::test]
async fn items_that_the_engine_holds_are_not_asked_for() {
    let mut stand = Stand::new().await;
    let (media, counts) = items(&[1, 2, 1]);
    let first = stand.start(job(1, media.clone())).await.unwrap();
    assert_eq!(sent(&stand.engine.receive_add().await), [Some(1), Some(2), None]);
    let second = stand.start(job(1, media)).await.unwrap();
    assert_eq!(sent(&stand.engine.receive_add().await), [None; 3]);
    assert_eq!(asked(&counts), [1, 1, 0]);
    let ways = |cached, inline| Delivered { cached, inline, ..Delivered::default() };
    assert_eq!((first.delivered(), second.delivered()), (ways(1, 2), ways(3, 0)));
    assert_eq!(*stand.observed.delivered.lock().unwrap(), ways(4, 2));
}

#[tokio::test]
async fn items_that_exceed_the_engines_cache_together_are_all_sent() {
    // Room for one and a half.
    let mut stand = Stand::with(report(), Some(3 * ELEMENTS as u64), false).await;
    let (one, _) = items(&[1]);
    let _first = stand.start(job(1, one)).await.unwrap();
    assert_eq!(sent(&stand.engine.receive_add().await), [Some(1)]);
    // The engine holds the first, but could evict it for the second before it has read it.
    let (both, counts) = items(&[1, 2]);
    let second = stand.start(job(1, both)).await.unwrap();
    assert_eq!(asked(&counts), [1, 1]);
    // What it still holds when the request is read goes without data after all.
    assert_eq!(sent(&stand.engine.receive_add().await), [None, Some(2)]);
    assert_eq!(second.delivered(), Delivered { cached: 1, inline: 1, ..Delivered::default() });
}

#[tokio::test]
async fn what_the_engine_turns_out_to_lack_is_sent_again_with_its_data() {
    let mut stand = Stand::new().await;
    let (media, counts) = items(&[1, 2]);
    let _first = stand.start(job(1, media.clone())).await.unwrap();
    stand.engine.receive_add().await;
    let mut running = stand.start(job(1, media)).await.unwrap();
    let request = stand.engine.receive_add().await;
    assert_eq!(sent(&request), [None, None]);
    stand.fail(&request, &[&"02".repeat(32)]).await;
    let again = {
        // Nobody is told of the failure: whoever reads sees only the answer to the second request.
        let Stand { engine, .. } = &mut stand;
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
    assert_eq!(asked(&counts), [1, 2]);
    assert_eq!(stand.observed.missed.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn slots_that_an_engine_fails_to_read_are_followed_by_messages_once() {
    let arena = ArenaPolicy::Required { bytes: 1 << 20 };
    let mut stand = Stand::with_arena(report(), Some(1 << 20), false, arena).await;
    assert_eq!(stand.backend.capabilities().hand_off, HandOff::SharedMemory);
    let (media, counts) = items(&[1]);
    let mut running = stand.start(job(1, media)).await.unwrap();
    let first = stand.engine.receive_add().await;
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
    assert_eq!(running.delivered(), Delivered { shared_memory: 1, ..Delivered::default() });
    stand.fail(&first, &[]).await;
    let failing = async {
        let second = stand.engine.receive_add().await;
        assert_eq!(sent(&second), [Some(1)], "in the message");
        stand.fail(&second, &[]).await;
    };
    let (output, ()) = soon(async { tokio::join!(running.next(), failing) }).await;
    assert!(matches!(output, Some(Err(JobError::Failed))), "{output:?}");
    assert_eq!(asked(&counts), [2]);
    assert_eq!(*stand.observed.steps.lock().unwrap(), ["engine_refused"]);
}

#[tokio::test]
async fn an_engine_that_keeps_losing_items_is_given_up() {
    let mut stand = Stand::new().await;
    let (media, _) = items(&[1, 2]);
    let _first = stand.start(job(1, media.clone())).await.unwrap();
    stand.engine.receive_add().await;
    let mut running = stand.start(job(1, media.clone())).await.unwrap();
    // Each time it loses the one of the two that it was believed to hold.
    let losing = async {
        for (lost, expected) in [(0, [None, None]), (1, [Some(1), None]), (0, [None, Some(2)])] {
            let request = stand.engine.receive_add().await;
            assert_eq!(sent(&request), expected);
            stand.fail(&request, &[&media[lost].name()]).await;
        }
    };
    let (output, ()) = soon(async { tokio::join!(running.next(), losing) }).await;
    assert!(matches!(output, Some(Err(JobError::KeepsLosingMedia))), "{output:?}");
    assert_eq!(stand.observed.missed.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn what_an_engine_fails_with_all_its_data_is_final() {
    let mut stand = Stand::new().await;
    let (media, _) = items(&[1]);
    let mut running = stand.start(job(1, media)).await.unwrap();
    let request = stand.engine.receive_add().await;
    stand.fail(&request, &[]).await;
    assert!(matches!(soon(running.next()).await, Some(Err(JobError::Failed))));
}

#[tokio::test]
async fn a_failure_after_the_first_output_is_final() {
    let mut stand = Stand::new().await;
    let (media, _) = items(&[1]);
    let _first = stand.start(job(1, media.clone())).await.unwrap();
    stand.engine.receive_add().await;
    let mut running = stand.start(job(1, media)).await.unwrap();
    let request = stand.engine.receive_add().await;
    stand.engine.answer(&request.request_id, 5, None).await;
    assert_eq!(tokens(soon(running.next()).await), [TokenId(5)]);
    stand.fail(&request, &[]).await;
    assert!(matches!(soon(running.next()).await, Some(Err(JobError::Failed))));
}

#[tokio::test]
async fn an_engine_s_own_words_about_an_error_decide_what_becomes_of_the_job() {
    let mut stand = Stand::new().await;
    let mut ended = async |code: &str, retryable| {
        let mut running = stand.start(job(1, no_media())).await.unwrap();
        let request_id = stand.engine.receive_add().await.request_id;
        let error = Some(RequestError {
            code: code.to_owned(),
            message: "its words".to_owned(),
            retryable,
        });
        let finish_reason = Some(FinishReason::Error);
        let output =
            EngineCoreOutput { request_id, finish_reason, error, ..EngineCoreOutput::default() };
        stand
            .engine
            .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
            .await;
        soon(running.next()).await.unwrap().unwrap_err()
    };
    let paused = ended("engine_paused", true).await;
    assert!(
        matches!(&paused, JobError::NotTaken(why) if why.to_string() == "its words"),
        "{paused}"
    );
    let invalid = ended("validation_error", false).await;
    assert!(
        matches!(&invalid, JobError::Refused { message, .. } if message == "its words"),
        "{invalid}"
    );
    assert!(matches!(ended("internal_error", false).await, JobError::Failed));
}

/// Fails a job with a constraint, after its engine has logged these lines. Returns the job's error.
async fn failed_constraint(
    stand: &mut Stand,
    error: Option<RequestError>,
    log: &[&str],
) -> JobError {
    let mut job = job(1, no_media());
    let constraint = Constraint::Regex("(".into());
    job.sampling.structured = Some(Structured { constraint, field: "structured_outputs.regex" });
    let mut running = stand.start(job).await.unwrap();
    let request_id = stand.engine.receive_add().await.request_id;
    log.iter().for_each(|line| stand.log.add(&line.replace("ID", &request_id)));
    let finish_reason = Some(FinishReason::Error);
    let output =
        EngineCoreOutput { request_id, finish_reason, error, ..EngineCoreOutput::default() };
    stand
        .engine
        .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
        .await;
    let failed = soon(running.next()).await.unwrap().unwrap_err();
    assert!(soon(running.next()).await.is_none());
    failed
}

#[tokio::test]
async fn failed_constraint_gives_the_reason_of_the_output() {
    let mut stand = Stand::new().await;
    let error = |code: &str| {
        Some(RequestError {
            code: code.to_owned(),
            message: "its words\n".to_owned(),
            retryable: false,
        })
    };
    let refused = failed_constraint(&mut stand, error("validation_error"), &[]).await;
    assert!(matches!(&refused, JobError::Refused { field, message }
        if field == "structured_outputs.regex" && message == "its words"));
    let failed = failed_constraint(&mut stand, error("internal_error"), &[]).await;
    assert!(
        matches!(&failed, JobError::ConstraintFailed { field, message }
        if field == "structured_outputs.regex" && message.contains("its words (internal_error)")),
        "{failed}"
    );
}

#[tokio::test]
async fn failed_constraint_gives_the_reason_of_the_log() {
    let mut stand = Stand::new().await;
    let rejected = "ERROR 11-28 [scheduler.py:1] Unexpected: grammar rejected tokens [0] for request ID. Terminating.";
    let compile = "ERROR 11-28 [__init__.py:2] Failed to compile grammar for request ID";
    let trace = "ERROR 11-28 [__init__.py:2] Traceback (most recent call last):";
    let exception = "ERROR 11-28 [__init__.py:2] RuntimeError: not closed";
    let refused = failed_constraint(&mut stand, None, &[compile, trace, exception]).await;
    assert!(
        matches!(&refused, JobError::Refused { field, message }
        if field == "structured_outputs.regex" && message.ends_with("RuntimeError: not closed")),
        "{refused}"
    );
    let failed = failed_constraint(&mut stand, None, &[rejected]).await;
    assert!(
        matches!(&failed, JobError::ConstraintFailed { message, .. }
        if message.contains("grammar rejected tokens")),
        "{failed}"
    );
    // What was logged is about other requests.
    let unexplained = failed_constraint(&mut stand, None, &[]).await;
    assert!(
        matches!(&unexplained, JobError::ConstraintFailed { message, .. }
        if message.ends_with("it gives no reason, its log may")),
        "{unexplained}"
    );
}

#[tokio::test]
async fn the_first_output_tells_what_was_cached() {
    let mut stand = Stand::new().await;
    let mut running = stand.start(job(1, no_media())).await.unwrap();
    let request = stand.engine.receive_add().await;
    let output = EngineCoreOutput {
        request_id: request.request_id,
        new_token_ids: vec![TokenId(5)],
        prefill_stats: Some(PrefillStats { num_cached_tokens: 8, ..PrefillStats::default() }),
        ..EngineCoreOutput::default()
    };
    stand
        .engine
        .send(EngineCoreOutputs { outputs: vec![output], ..EngineCoreOutputs::default() })
        .await;
    let prefill = soon(running.next()).await.unwrap().unwrap().prefill.unwrap();
    assert_eq!((prefill.cached_tokens, prefill.queued), (8, None));
}

#[tokio::test]
async fn load_is_told_as_the_engine_tells_it() {
    let mut stand = Stand::new().await;
    let (told, mut loads) = tokio::sync::mpsc::unbounded_channel();
    stand.backend.follow_load(Box::new(move |load| told.send(load).unwrap()));
    let stats = SchedulerStats {
        num_running_reqs: 3,
        num_waiting_reqs: 2,
        kv_cache_usage: 0.5,
        ..SchedulerStats::default()
    };
    let outputs =
        EngineCoreOutputs { scheduler_stats: Some(stats), ..EngineCoreOutputs::default() };
    stand.engine.send(outputs).await;
    let load = Load { running: 3, waiting: 2, kv_usage: 0.5, ..Load::default() };
    assert_eq!(soon(loads.recv()).await, Some(load));
}

#[tokio::test]
async fn a_job_that_would_break_the_engine_is_refused_and_messages_are_too() {
    let stand = Stand::new().await;
    let mut too_long = job(1, no_media());
    too_long.input = Input::Tokens(Arc::new(vec![TokenId(1); 512]));
    let refused = stand.start(too_long).await.err();
    assert!(
        matches!(refused, Some(JobError::Refused { field, .. }) if field == "prompt_token_ids")
    );
    let mut messages = job(1, no_media());
    messages.input = Input::Messages(Bytes::from_static(b"{}"));
    assert!(
        matches!(stand.start(messages).await.err(), Some(JobError::Refused { field, .. }) if field == "input")
    );
}

#[tokio::test]
async fn a_declared_death_ends_running_jobs_in_its_words() {
    let mut stand = Stand::new().await;
    let mut running = stand.start(job(1, no_media())).await.unwrap();
    stand.engine.receive_add().await;
    stand.backend.declare_dead(Death::new("somebody pulled the plug"));
    let ended = soon(running.next()).await;
    assert!(
        matches!(&ended, Some(Err(JobError::Dead(death))) if death.to_string() == "somebody pulled the plug")
    );
    assert_eq!(soon(stand.backend.ended()).await, Death::new("somebody pulled the plug"));
    assert!(matches!(stand.start(job(1, no_media())).await.err(), Some(JobError::NotTaken(_))));
}
