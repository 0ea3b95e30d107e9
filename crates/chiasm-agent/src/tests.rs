//! Tests with an agent in front of a fake engine, and with frontends that misbehave.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::fake::{FakeBackend, FakeConnector, Script, fake_capabilities};
use chiasm_backend::{
    Backend, Capabilities, Connected, Connector, Constraint, EncodedItem, Finish, Input, ItemField,
    Job, JobError, JobItem, MediaDelivery, MediaObserver, MediaSource, Output, PlanClass,
    ReasoningHints, RequestId, RunningJob, Sampling, SourceError, Stage, Structured, TensorRequest,
    TraceContext,
};
use chiasm_fleet::adapters::Adapters;
use chiasm_fleet::{Fleet, Patience};
use chiasm_media::{
    ByteBudget, ContentHash, EncodedMedia, MediaConfig, MediaHeader, MediaLimits, MediaLoader,
};
use chiasm_nixl::Reader;
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{MachineMedia, PipelineLimits, VllmProcessorOptions};
use chiasm_router::RouterConfig;
use chiasm_types::{MmHash, Modality, Placeholder, TokenId, WorkerId};
use chiasm_vision::{ImageKwargs, ImageSize};
use futures_util::future::{BoxFuture, FutureExt};
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;

use crate::client::{AgentConnector, AgentLink};
use crate::cuts::AcceptedCuts;
use crate::peer::Peer;
use crate::server::Shares;
use crate::{AgentServer, Drain, job, proto, serve};

mod adapters;
mod calls;
mod files;
mod going;
mod images;
mod lending;
mod messages;
mod refusals;
mod tensors;
mod videos;
mod windows;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
/// The maximum size of tensors at test agents.
const MAX_TENSOR_BYTES: u64 = 1 << 20;
/// No cuts of videos.
const NO_CUTS: AcceptedCuts = AcceptedCuts { slots: 0, max_bytes: 0 };
const PICTURE: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/images/dawn.jpg"));

struct Unobserved;

impl MediaObserver for Unobserved {
    fn delivered(&self, _: MediaDelivery) {}

    fn missed(&self, _: usize) {}

    fn stepped_down(&self, _: &'static str, _: &dyn std::fmt::Display) {}
}

/// An agent with one fake engine, and a link to it.
struct TestHarness {
    engine: FakeBackend,
    model: Arc<ServedModel>,
    link: AgentLink,
    fleet: Arc<Fleet>,
    file_permits: Arc<Semaphore>,
    /// The budget of files and jobs.
    budget: ByteBudget,
    /// The shares of memory, and of incomplete messages.
    shares: (Shares, Shares),
    watches: Shares,
    drain: Drain,
    /// Sent to when the agent should go down.
    stop: oneshot::Sender<()>,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl TestHarness {
    async fn new() -> Self {
        Self::with_adapters(FakeBackend::new(), Arc::default()).await
    }

    /// Starts an agent with these adapters.
    async fn with_adapters(engine: FakeBackend, adapters: Arc<Adapters>) -> Self {
        Self::with_reader(engine, adapters, None).await
    }

    /// Starts an agent that reads lent tensors if it has a reader.
    async fn with_reader(
        engine: FakeBackend,
        adapters: Arc<Adapters>,
        reader: Option<Reader>,
    ) -> Self {
        let model = ServedModel::load(Path::new(MODEL), "m", None).unwrap();
        Self::build(engine, adapters, reader, model, None).await
    }

    /// Starts an agent of this model that decodes videos if it has a processor.
    async fn build(
        engine: FakeBackend,
        adapters: Arc<Adapters>,
        reader: Option<Reader>,
        model: ServedModel,
        processor: Option<VllmProcessorOptions>,
    ) -> Self {
        let connector: Box<dyn Connector> = Box::new(FakeConnector::new([Ok(engine.clone())]));
        let config = RouterConfig::default();
        let patience = Patience::default();
        let fleet =
            Fleet::start_with_adapters(vec![connector], config, patience, adapters).unwrap();
        assert!(fleet.wait_ready(1).await);
        let model = Arc::new(model);
        let budget = ByteBudget::new(1 << 30);
        let loader = MediaLoader::new(MediaConfig::default(), budget.clone()).unwrap();
        let media = MachineMedia::new(
            model.clone(),
            loader,
            fleet.clone(),
            &PipelineLimits::default(),
            Some(MAX_TENSOR_BYTES),
            processor,
            false,
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = AgentLink::new(&listener.local_addr().unwrap().to_string(), None).unwrap();
        let agent = AgentServer::new(fleet.clone(), media, budget.clone(), 1);
        let agent = match reader {
            Some(reader) => agent.with_reader(reader),
            None => agent,
        };
        let (stop, stopped) = oneshot::channel();
        Self {
            engine,
            model,
            link,
            fleet,
            file_permits: agent.file_permits(),
            budget,
            shares: agent.shares(),
            watches: agent.watches(),
            drain: agent.drain(),
            stop,
            serving: tokio::spawn(serve(agent, listener, None, stopped.map(drop))),
        }
    }

    /// Connects to the engine as a frontend does.
    async fn connect(&self) -> Arc<dyn Backend> {
        self.connect_over(self.link.clone(), Arc::new(Unobserved)).await
    }

    async fn connect_over(
        &self,
        link: AgentLink,
        observer: Arc<dyn MediaObserver>,
    ) -> Arc<dyn Backend> {
        let connector = AgentConnector::new(link, 0, fake_capabilities().class.processor);
        let Connected { backend, .. } = connector.connect(WorkerId(0), observer).await.unwrap();
        backend
    }

    /// Waits until the engine has received `count` jobs.
    async fn wait_for_jobs(&self, count: usize) {
        let received = async {
            while self.engine.jobs().len() < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), received).await.unwrap();
    }

    fn life(&self) -> u64 {
        self.fleet.worker(WorkerId(0)).unwrap().life
    }

    /// Returns a job with one picture, as a frontend plans it.
    fn with_picture(&self, file: &Bytes) -> Job {
        let media = EncodedMedia::from_bytes(file.clone(), &MediaLimits::default()).unwrap();
        let MediaHeader::Image(header) = media.header else { panic!("an image") };
        let vision = self.model.vision.as_ref().unwrap();
        let kwargs = ImageKwargs::default();
        let plan =
            vision.plan(ImageSize { width: header.width, height: header.height }, &kwargs).unwrap();
        let mut tokens = vec![TokenId(1); 3];
        let length = plan.placeholder.iter().map(|run| run.count).sum();
        tokens.extend(
            plan.placeholder.iter().flat_map(|run| std::iter::repeat_n(run.token, run.count)),
        );
        tokens.push(TokenId(2));
        let fingerprint = PlanClass::item_identity(
            &fake_capabilities().class.processor,
            &vision.fingerprint(&kwargs),
        );
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
    fn tensors(
        &self,
        _: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
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

fn job(tokens: &[TokenId]) -> Job {
    Job {
        id: RequestId::new("id").unwrap(),
        input: Input::Tokens(Arc::new(tokens.to_vec())),
        media: Arc::default(),
        sampling: Sampling::distinctive(),
        adapter: None,
        cache_salt: Some("salt".to_owned()),
        priority: -3,
        trace: TraceContext::parse(
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            Some("a=b"),
        ),
        reasoning: ReasoningHints { is_over: true, variables: vec![("enable_thinking", false)] },
        stage: Stage::Whole,
        embedded: Vec::new(),
    }
}

/// Encodes and decodes the message of a job. A field is added in between, as a later version may
/// do.
fn over_the_wire(job: &Job) -> proto::Job {
    let Input::Tokens(prompt) = &job.input else { panic!("tokens") };
    let media = job::MediaDetails { urls: true, image_tensors: None, cuts: NO_CUTS };
    let mut bytes = job::to_message(job, prompt, media).unwrap().encode_to_vec();
    // Field 1000, of variable length: two bytes.
    bytes.extend([0xc2, 0x3e, 2, 7, 7]);
    proto::Job::decode(&bytes[..]).unwrap()
}

/// Starts a job and waits for its first output. An invalid job fails only after it was started.
async fn first_output(
    engine: &dyn Backend,
    job: &Job,
) -> Result<(Box<dyn RunningJob>, Output), JobError> {
    let mut running = engine.start(Arc::new(job.clone())).await?;
    let first = tokio::time::timeout(Duration::from_secs(10), running.next()).await.unwrap();
    first.unwrap().map(|output| (running, output))
}

/// Starts a job and returns how its items were delivered.
async fn delivered(engine: &dyn Backend, job: &Job) -> Result<MediaDelivery, JobError> {
    first_output(engine, job).await.map(|(running, _)| running.delivered())
}
