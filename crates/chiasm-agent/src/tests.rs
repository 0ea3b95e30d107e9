//! An agent before fake engines, and frontends that ask for what they must not have.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::fake::{FakeBackend, FakeConnector, Script, fake_capabilities};
use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, Connected, Connector, Constraint, Delivered, EncodedItem, FieldValue,
    Finish, Input, ItemField, Job, JobError, JobItem, Left, MediaObserver, MediaSource, Output, OwnAdapter, PlanClass,
    ReasoningHints, Repetition, RequestId, RunningJob, Sampling, SourceError, Stage, Structured, Tensor, TensorBytes,
    TensorFormat, TensorOrder, TraceContext,
};
use chiasm_media::{ByteBudget, ContentHash, EncodedMedia, MediaConfig, MediaDoor, MediaHeader, MediaLimits};
use chiasm_nixl::Reader;
use chiasm_router::RouterConfig;
use chiasm_server::adapters::{AdapterFiles, AdapterSource, Adapters, Stamps};
use chiasm_server::fleet::{Fleet, Patience};
use chiasm_server::model::ServedModel;
use chiasm_server::{ItemOrigin, Limits, MachineMedia};
use chiasm_types::{Dtype, MmHash, Modality, Placeholder, TensorField, TokenId, WorkerId};
use chiasm_vision::{ImageKwargs, ImageSize};
use futures_util::future::{BoxFuture, FutureExt};
use prost::Message;
use serde_json::Map;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tonic::Code;

use crate::client::{AgentConnector, AgentLink, LinkError, OwnMemory};
use crate::proto::watch_event::Event;
use crate::proto::{self, HelloRequest, MediaChunk, TensorChunk, WatchRequest};
use crate::{AgentServer, Drain, job, serve};

mod calls;
mod going;
mod images;
mod lending;
mod messages;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
const PICTURE: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/images/dawn.jpg"));

struct Unobserved;

impl MediaObserver for Unobserved {
    fn delivered(&self, _: Delivered) {}

    fn missed(&self, _: usize) {}

    fn stepped_down(&self, _: &'static str, _: &dyn std::fmt::Display) {}
}

/// An agent with one fake engine, and a link to it.
struct Stand {
    engine: FakeBackend,
    model: Arc<ServedModel>,
    link: AgentLink,
    fleet: Arc<Fleet>,
    places_of_files: Arc<Semaphore>,
    /// What files and jobs are counted in.
    budget: ByteBudget,
    drain: Drain,
    /// Sent to when the agent is to go down.
    stop: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Stand {
    async fn new() -> Self {
        Self::of(FakeBackend::new(), Arc::default()).await
    }

    /// An agent with these adapters.
    async fn of(engine: FakeBackend, adapters: Arc<Adapters>) -> Self {
        Self::reading(engine, adapters, None).await
    }

    /// An agent that reads what frontends lend.
    async fn reading(engine: FakeBackend, adapters: Arc<Adapters>, reader: Option<Reader>) -> Self {
        let connector: Box<dyn Connector> = Box::new(FakeConnector::new([Ok(engine.clone())]));
        let (config, patience) = (RouterConfig::default(), Patience::default());
        let fleet = Fleet::start_with_adapters(vec![connector], config, patience, adapters).unwrap();
        assert!(fleet.wait_ready(1).await);
        let model = Arc::new(ServedModel::load(Path::new(MODEL), "m", None).unwrap());
        let budget = ByteBudget::new(1 << 30);
        let door = MediaDoor::new(MediaConfig::default(), budget.clone()).unwrap();
        let media = MachineMedia::new(model.clone(), door, fleet.clone(), &Limits::default(), Some(1 << 20), false);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = AgentLink::new(&listener.local_addr().unwrap().to_string(), None).unwrap();
        let agent = AgentServer::new(fleet.clone(), media, budget.clone(), 1);
        let agent = match reader {
            Some(reader) => agent.with_reader(reader),
            None => agent,
        };
        let places_of_files = agent.places_of_files();
        let (drain, (stop, stopped)) = (agent.drain(), oneshot::channel());
        let serving = tokio::spawn(serve(agent, listener, None, stopped.map(drop)));
        Self { engine, model, link, fleet, places_of_files, budget, drain, stop, serving }
    }

    /// The engine as a frontend has it.
    async fn connect(&self) -> Arc<dyn Backend> {
        self.connect_over(self.link.clone(), Arc::new(Unobserved)).await
    }

    async fn connect_over(&self, link: AgentLink, observer: Arc<dyn MediaObserver>) -> Arc<dyn Backend> {
        let connector = AgentConnector::new(link, 0, fake_capabilities().class.processor);
        let Connected { backend, .. } = connector.connect(WorkerId(0), observer).await.unwrap();
        backend
    }

    /// Waits until the engine was given so many jobs.
    async fn engine_has_jobs(&self, count: usize) {
        let given = async {
            while self.engine.jobs().len() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), given).await.unwrap();
    }

    fn life(&self) -> u64 {
        self.fleet.worker(WorkerId(0)).unwrap().life
    }

    /// A prompt with one picture, as a frontend plans it.
    fn with_picture(&self, file: &Bytes) -> Job {
        let media = EncodedMedia::from_bytes(file.clone(), &MediaLimits::default()).unwrap();
        let MediaHeader::Image(header) = media.header else { panic!("an image") };
        let vision = self.model.vision.as_ref().unwrap();
        let kwargs = ImageKwargs::default();
        let plan = vision.plan(ImageSize { width: header.width, height: header.height }, &kwargs).unwrap();
        let mut tokens = vec![TokenId(1); 3];
        let length = plan.placeholder.iter().map(|run| run.count).sum();
        tokens.extend(plan.placeholder.iter().flat_map(|run| std::iter::repeat_n(run.token, run.count)));
        tokens.push(TokenId(2));
        let fingerprint = PlanClass::identify(&fake_capabilities().class.processor, &vision.fingerprint(&kwargs));
        let item = JobItem {
            modality: Modality::Image,
            hash: chiasm_media::mm_hash(&media.content, &Modality::Image, &fingerprint),
            placeholder: Placeholder { offset: 3, length, is_embed: None },
            elements: 1,
            source: Arc::new(File::new(file, media.content)),
        };
        Job { media: vec![item].into(), ..job(&tokens) }
    }
}

struct File {
    bytes: Bytes,
    content: ContentHash,
    url: Option<Arc<str>>,
}

impl File {
    fn new(bytes: &Bytes, content: ContentHash) -> Self {
        Self { bytes: bytes.clone(), content, url: None }
    }
}

impl MediaSource for File {
    fn tensors(&self, _: TensorOrder) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        panic!("tensors are made by the agent");
    }

    fn encoded(&self) -> Option<EncodedItem> {
        Some(EncodedItem {
            bytes: self.bytes.clone(),
            content: *self.content.as_bytes(),
            media_type: "image/jpeg",
            processor_kwargs: "{}".into(),
            url: self.url.clone(),
        })
    }
}

fn sampling() -> Sampling {
    Sampling {
        n: 2,
        max_tokens: 10,
        min_tokens: 1,
        temperature: 0.5,
        top_p: 0.25,
        top_k: 3,
        min_p: 0.125,
        seed: Some(-4),
        presence_penalty: 1.5,
        frequency_penalty: -1.5,
        repetition_penalty: 1.25,
        stop_token_ids: vec![TokenId(4)],
        eos_token: Some(TokenId(5)),
        all_stop_token_ids: vec![TokenId(4), TokenId(5)],
        ignore_eos: true,
        logprobs: Some(0),
        prompt_logprobs: Some(2),
        skip_reading_prefix_cache: true,
        logit_bias: vec![(TokenId(6), -7.5)],
        allowed_token_ids: vec![TokenId(6), TokenId(7)],
        bad_words: vec![vec![TokenId(8)], vec![TokenId(9), TokenId(10)]],
        structured: Some(Structured { constraint: Constraint::Regex("a+".into()), field: "structured_outputs" }),
        thinking_budget: Some(11),
        repetition: Some(Repetition { max_pattern: 3, min_pattern: 2, count: 4 }),
    }
}

fn job(tokens: &[TokenId]) -> Job {
    Job {
        id: RequestId::new("id").unwrap(),
        input: Input::Tokens(Arc::new(tokens.to_vec())),
        media: Arc::default(),
        sampling: sampling(),
        adapter: None,
        cache_salt: Some("salt".to_owned()),
        priority: -3,
        trace: TraceContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Some("a=b")),
        reasoning: ReasoningHints { is_over: true, variables: vec![("enable_thinking", false)] },
        stage: Stage::Whole,
        embedded: Vec::new(),
    }
}

/// The message of a job as it is read at the other end, after a later version has added a field to it.
fn sent(job: &Job) -> proto::Job {
    let Input::Tokens(prompt) = &job.input else { panic!("tokens") };
    let media = job::MediaTold { urls: true, image_tensors: None };
    let mut bytes = job::to_message(job, prompt, media).unwrap().encode_to_vec();
    // Field 1000, of variable length: two bytes.
    bytes.extend([0xc2, 0x3e, 2, 7, 7]);
    proto::Job::decode(&bytes[..]).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_with_an_adapter_has_it_and_is_announced_with_blocks_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("adapter_config.json"), r#"{"r": 8}"#).unwrap();
    let source = AdapterSource { name: "a".to_owned(), path: dir.path().display().to_string() };
    let adapters = Arc::new(Adapters::new(1));
    adapters.serve(&source, &AdapterFiles::look(&source, false, Stamps::Content).unwrap()).unwrap();
    let adapter = adapters.get("a").unwrap().engine().clone();
    let taking = FakeBackend::with(Capabilities { max_loras: 1, ..fake_capabilities() });
    let stand = Stand::of(taking, adapters).await;
    let engine = stand.connect().await;
    assert_eq!(engine.capabilities().adapters[&adapter.name].root, source.path);
    // Another frontend listens.
    let (mut jobs, _) = stand.link.clients();
    let mut heard = jobs.watch(WatchRequest { engine: 0, frontend: 9 }).await.unwrap().into_inner();
    let mut keys = Vec::new();
    for adapter in [None, Some(adapter.clone())] {
        let mut told = Job { adapter: adapter.clone(), ..job(&[TokenId(3); 40]) };
        told.sampling.skip_reading_prefix_cache = false;
        let _running = engine.start(Arc::new(told)).await.unwrap();
        stand.engine_has_jobs(keys.len() + 1).await;
        // Engines are told what the agent has loaded, not what a frontend says of it.
        assert_eq!(stand.engine.jobs().last().unwrap().adapter, adapter);
        keys.push(loop {
            if let Some(Event::OthersJob(told)) = heard.message().await.unwrap().unwrap().event {
                break told.block_keys;
            }
        });
    }
    assert!(keys[0].len() == 2 * 16 && keys[1].len() == keys[0].len() && keys[0] != keys[1], "{keys:?}");
}

/// A job of which something has come, and that. What is wrong with a job is told behind its start.
async fn begun(engine: &dyn Backend, job: &Job) -> Result<(Box<dyn RunningJob>, Output), JobError> {
    let mut running = engine.start(Arc::new(job.clone())).await?;
    let first = tokio::time::timeout(Duration::from_secs(10), running.next()).await.unwrap();
    first.unwrap().map(|output| (running, output))
}

/// How the items of a job of which something has come have travelled.
async fn delivered(engine: &dyn Backend, job: &Job) -> Result<Delivered, JobError> {
    begun(engine, job).await.map(|(running, _)| running.delivered())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_whose_adapter_is_gone_is_for_another_engine() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let adapter = Adapter { id: std::num::NonZeroU32::MIN, name: "a@1".to_owned(), path: "/a".to_owned() };
    let told = Job { adapter: Some(Arc::new(adapter.clone())), ..job(&[TokenId(3)]) };
    assert_eq!(job::from_message(sent(&told)).unwrap().adapter.as_deref(), Some("a@1"));
    let Err(JobError::NotTaken(why)) = delivered(&*engine, &told).await else { panic!("not taken") };
    assert!(why.to_string().contains("no LoRA adapter that it knows as 'a@1'"), "{why}");
    assert!(matches!(engine.load_adapter(&adapter).await, Err(AdapterError::NotOwn)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_that_do_not_meet_are_refused() {
    let stand = Stand::new().await;
    assert_eq!(stand.link.greet().await.unwrap().engines, 1);
    let hello = |oldest_protocol, newest_protocol| HelloRequest {
        oldest_protocol,
        newest_protocol,
        key_secret_fingerprint: Bytes::copy_from_slice(&chiasm_kv::KeySecret::of_process().fingerprint()),
    };
    let (mut jobs, _) = stand.link.clients();
    assert_eq!(jobs.hello(hello(1, 7)).await.unwrap().into_inner().protocol, 2);
    for (oldest, newest) in [(3, 4), (0, 1)] {
        let status = jobs.hello(hello(oldest, newest)).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("versions 2 to 2"), "{status}");
    }
    assert_eq!(jobs.watch(WatchRequest { engine: 1, frontend: 9 }).await.unwrap_err().code(), Code::InvalidArgument);
    for address in ["", "a", ":1", "a:b", "a:65536"] {
        assert!(matches!(AgentLink::new(address, None), Err(LinkError::Address(_))), "{address}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_asked_for_once_and_tensors_are_made_beside_the_engine() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let told = stand.with_picture(&Bytes::from_static(PICTURE));
    stand.engine.next_job(Script::tokens(&[1, 2]).then(1, &[3]).finish(Finish::Length));
    let (mut running, first) = begun(&*engine, &told).await.unwrap();
    assert_eq!(running.delivered(), Delivered { inline: 1, ..Delivered::default() });
    // The file was sent meanwhile.
    assert!(running.hand_off() > Duration::ZERO);
    let outputs = [first, running.next().await.unwrap().unwrap()];
    assert_eq!(outputs.map(|output| (output.choice, output.finish)), [(0, None), (1, Some(Finish::Length))]);
    // The agent's end without that of the first continuation.
    assert!(matches!(running.next().await, Some(Err(JobError::Unfinished))));
    assert!(running.next().await.is_none());
    assert_eq!(stand.engine.pulled(), [told.media[0].hash]);
    stand.engine.next_job(Script::tokens(&[1]));
    assert_eq!(delivered(&*engine, &told).await.unwrap(), Delivered { cached: 1, ..Delivered::default() });
}

/// Tensors as a frontend has made them, and how often.
#[derive(Default)]
struct Made {
    fields: Vec<ItemField>,
    times: AtomicUsize,
}

impl MediaSource for Made {
    fn tensors(&self, _: TensorOrder) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        self.times.fetch_add(1, Ordering::Relaxed);
        let fields = self.fields.clone();
        async move {
            match fields.is_empty() {
                true => Err(SourceError::new(std::io::Error::other("it is broken"))),
                false => Ok(Some(fields)),
            }
        }
        .boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

impl Made {
    fn of(bytes: usize) -> Arc<Self> {
        let tensor = Tensor {
            dtype: Dtype::U8,
            shape: vec![2, bytes / 2],
            bytes: TensorBytes::Here((0..bytes).map(|byte| byte as u8).collect::<Vec<_>>().into()),
        };
        let field = TensorField::Flat { rows: 2, dim: 0, keep_on_cpu: false };
        let fields = vec![ItemField { name: "pixel_values".into(), field, value: FieldValue::Tensor(tensor) }];
        Arc::new(Self { fields, times: AtomicUsize::new(0) })
    }
}

/// A prompt with a recording, of which the frontend has tensors.
fn with_recording(source: Arc<Made>, mask: Vec<bool>) -> Job {
    let item = JobItem {
        modality: Modality::Audio,
        hash: MmHash::new([5; 32]),
        placeholder: Placeholder { offset: 1, length: mask.len(), is_embed: Some(mask) },
        elements: 1,
        source,
    };
    Job { media: vec![item].into(), ..job(&[TokenId(1); 4]) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_that_a_frontend_has_made_come_as_they_are() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    // More than one message has room for.
    let made = Made::of(3 * crate::CHUNK);
    let told = with_recording(made.clone(), vec![false, true, true]);
    stand.engine.next_job(Script::tokens(&[1, 2]));
    assert_eq!(delivered(&*engine, &told).await.unwrap(), Delivered { inline: 1, ..Delivered::default() });
    let item = stand.engine.jobs()[0].media[0].clone();
    assert_eq!((item.hash, &item.placeholder), (told.media[0].hash, &told.media[0].placeholder));
    // Another engine of that machine would have them so, as they were kept.
    let order = TensorOrder { format: TensorFormat::Raw, memory: Arc::new(OwnMemory), still_wanted: Arc::new(|| true) };
    let came = item.source.tensors(order).await.unwrap().unwrap();
    assert_eq!(format!("{came:?}"), format!("{:?}", made.fields));
    assert_eq!(made.times.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_that_are_not_to_be_had_or_taken_end_the_job_at_once() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let failure = async |made: Arc<Made>, mask: Vec<bool>| {
        delivered(&*engine, &with_recording(made, mask)).await.unwrap_err().to_string()
    };
    assert!(failure(Arc::default(), vec![true]).await.contains("it is broken"));
    // The stand's agent takes a MiB.
    assert!(failure(Made::of(2 << 20), vec![true]).await.contains("bytes at most"));
    assert!(failure(Made::of(2), vec![false]).await.contains("placeholder"));
    assert!(failure(Made::of(2), vec![true; 4]).await.contains("placeholder"));
    let (_, mut files) = stand.link.clients();
    let messages: Vec<_> = crate::tensors::to_messages(&MmHash::new([5; 32]), &Made::of(8).fields).collect();
    let mut put = async |messages: Vec<TensorChunk>| files.put_tensors(tokio_stream::iter(messages)).await.map(drop);
    put(messages.clone()).await.unwrap();
    let [first, rest] = &messages[..] else { panic!("two messages") };
    for messages in [
        vec![],
        vec![first.clone()],
        vec![first.clone(), rest.clone(), rest.clone()],
        vec![TensorChunk { mm_hash: Bytes::new(), ..first.clone() }, rest.clone()],
    ] {
        assert_eq!(put(messages).await.unwrap_err().code(), Code::InvalidArgument);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_that_would_be_others_here_never_reach_the_engine() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let told = stand.with_picture(&Bytes::from_static(PICTURE));
    let refusal = |job: Job| {
        let engine = engine.clone();
        async move {
            match delivered(&*engine, &job).await {
                Err(JobError::Refused { message, .. }) => message,
                Err(error) => panic!("{error}"),
                Ok(_) => panic!("it was taken"),
            }
        }
    };
    let with = |change: &dyn Fn(&mut JobItem)| {
        let mut item = told.media[0].clone();
        change(&mut item);
        Job { media: vec![item].into(), ..told.clone() }
    };
    let other = with(&|item| item.hash = MmHash::new([1; 32]));
    assert!(refusal(other).await.contains("identity"));
    for placeholder in [
        Placeholder { offset: 2, ..told.media[0].placeholder.clone() },
        Placeholder { length: 3, ..told.media[0].placeholder.clone() },
    ] {
        let message = refusal(with(&|item| item.placeholder = placeholder.clone())).await;
        assert!(message.contains("placeholder"), "{message}");
    }
    let twice = Job { media: vec![told.media[0].clone(), told.media[0].clone()].into(), ..told.clone() };
    assert!(refusal(twice).await.contains("media[1]"));
    assert!(refusal(with(&|item| item.modality = Modality::Audio)).await.contains("takes no"));
    let unknown = stand.model.last_token().0 + 1;
    assert!(refusal(job(&[TokenId(unknown)])).await.contains("vocabulary"));
    assert!(refusal(job(&[])).await.contains("empty"));
    assert!(refusal(job(&[TokenId(1); 4096])).await.contains("4096"));
    assert!(stand.engine.jobs().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_file_that_was_named_is_taken_and_no_more_than_was_said() {
    let stand = Stand::new().await;
    let (_, mut files) = stand.link.clients();
    let content = Bytes::copy_from_slice(ContentHash::of(PICTURE).as_bytes());
    let first = MediaChunk {
        content: content.clone(),
        length: PICTURE.len() as u64,
        modality: "image".to_owned(),
        bytes: Bytes::from_static(&PICTURE[..100]),
    };
    let rest = MediaChunk { bytes: Bytes::from_static(&PICTURE[100..]), ..MediaChunk::default() };
    let mut put = async |chunks: Vec<MediaChunk>| files.put_media(tokio_stream::iter(chunks)).await.map(drop);
    put(vec![first.clone(), rest.clone()]).await.unwrap();
    let all = stand.places_of_files.try_acquire_many(stand.places_of_files.available_permits() as u32).unwrap();
    assert_eq!(put(vec![first.clone(), rest.clone()]).await.unwrap_err().code(), Code::ResourceExhausted);
    drop(all);
    for chunks in [
        vec![],
        vec![first.clone()],
        vec![first.clone(), rest.clone(), rest.clone()],
        vec![MediaChunk { content: Bytes::from_static(&[1; 32]), ..first.clone() }, rest.clone()],
        vec![MediaChunk { content: Bytes::new(), ..first.clone() }, rest.clone()],
        vec![MediaChunk { length: u64::MAX, ..first.clone() }, rest.clone()],
        vec![MediaChunk { bytes: Bytes::from_static(b"GIF"), ..first.clone() }, rest],
    ] {
        let status = put(chunks.clone()).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status} {chunks:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_jobs_are_aborted_and_those_of_an_engine_that_ended_are_not_taken() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    stand.engine.next_job(Script::tokens(&[1]));
    let mut running = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    running.next().await.unwrap().unwrap();
    drop(running);
    let aborted = async {
        while stand.engine.aborted() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), aborted).await.unwrap();
    stand.engine.die(chiasm_backend::Death::new("it was told to"));
    let death = tokio::time::timeout(Duration::from_secs(10), engine.ended()).await.unwrap();
    assert_eq!(death.to_string(), "it was told to");
    assert!(matches!(engine.start(Arc::new(job(&[TokenId(1)]))).await, Err(JobError::NotTaken(_))));
}
