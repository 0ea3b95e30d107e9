//! A pipeline before fake backends, for unit tests.

#![allow(clippy::unwrap_used, reason = "for tests alone")]

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::fake::{FakeBackend, FakeConnector};
use chiasm_backend::{Connector, Finish, RequestId};
use chiasm_fleet::{Fleet, Patience};
use chiasm_limit::Owner;
use chiasm_media::{ByteBudget, MediaConfig, MediaDoor, MediaInput};
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use chiasm_request::{
    Chat, ChoiceDelta, FinishedChoice, GenerateRequest, MediaRef, Prompt, Sampling, ToolUse,
};
use chiasm_router::{Policy, RouterConfig};
use chiasm_types::Modality;
use tokio::time::Instant;

use super::reading::Reading;
use super::{
    Attempts, Caller, Entries, Pipeline, PipelineLimits, Prepared, RequestError, RouteObserver,
    prepare,
};
use crate::cpu::CpuBudget;
use crate::model::ServedModel;

/// The demo's model: Qwen2-VL's template and processor, and a small tokenizer.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
/// A picture that the door takes.
const PICTURE: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/images/dawn.jpg"));

/// A pipeline before fake backends.
pub struct TestPipeline {
    /// The pipeline.
    pub pipeline: Arc<Pipeline>,
    /// The backends, in the order of their workers' ids.
    pub backends: Vec<FakeBackend>,
}

impl TestPipeline {
    /// Creates a pipeline before as many workers.
    pub async fn new(workers: usize) -> Self {
        Self::limited(PipelineLimits::default(), workers).await
    }

    /// Creates a pipeline with these limits before as many workers.
    pub async fn limited(limits: PipelineLimits, workers: usize) -> Self {
        Self::build((0..workers).map(|_| FakeBackend::new()).collect(), limits, None).await
    }

    /// Creates a pipeline before these backends. A request goes to the first one that is not
    /// excluded.
    pub async fn with(backends: Vec<FakeBackend>) -> Self {
        Self::build(backends, PipelineLimits::default(), None).await
    }

    /// Creates a pipeline before as many workers, whose routes are observed.
    pub async fn observed(workers: usize, observer: Arc<dyn RouteObserver>) -> Self {
        let backends = (0..workers).map(|_| FakeBackend::new()).collect();
        Self::build(backends, PipelineLimits::default(), Some(observer)).await
    }

    async fn build(
        backends: Vec<FakeBackend>,
        limits: PipelineLimits,
        observer: Option<Arc<dyn RouteObserver>>,
    ) -> Self {
        let connector = |backend: &FakeBackend| {
            Box::new(FakeConnector::new([Ok(backend.clone())])) as Box<dyn Connector>
        };
        let config = RouterConfig { policy: Policy::RoundRobin, ..RouterConfig::default() };
        let fleet =
            Fleet::start(backends.iter().map(connector).collect(), config, Patience::default())
                .unwrap();
        assert!(fleet.wait_ready(backends.len()).await);
        let model = Arc::new(ServedModel::load(Path::new(MODEL), "m", None).unwrap());
        let media = MediaDoor::new(MediaConfig::default(), ByteBudget::new(1 << 30)).unwrap();
        let pipeline = Pipeline { observer, ..Pipeline::new(model, media, fleet, limits) };
        Self { pipeline: Arc::new(pipeline), backends }
    }

    /// Prepares a request of this prompt.
    pub async fn prepare(
        &self,
        prompt: Prompt,
        sampling: Sampling,
    ) -> Result<Prepared, RequestError> {
        self.prepare_shown(prompt, sampling, Entries::default()).await
    }

    /// Prepares a request that an observer shows at these entries.
    pub async fn prepare_shown(
        &self,
        prompt: Prompt,
        sampling: Sampling,
        entries: Entries,
    ) -> Result<Prepared, RequestError> {
        let request = GenerateRequest {
            prompt,
            sampling,
            cache_salt: None,
            priority: 0,
            tools: None,
            without_reasoning: false,
        };
        let caller = Caller { entries, ..caller() };
        prepare(&self.pipeline, request, None, &caller, self.pipeline.fleet.classes()).await
    }

    /// Prepares a request of a prompt of some tokens.
    pub async fn text(&self, sampling: Sampling) -> Prepared {
        self.prepare(
            Prompt::Text("the quick brown fox jumps over the lazy dog".to_owned()),
            sampling,
        )
        .await
        .unwrap()
    }
}

fn caller() -> Caller {
    Caller {
        id: RequestId::new("test").unwrap(),
        trace: None,
        arrived: Instant::now(),
        cpu: CpuBudget::new(
            Owner::at(Ipv4Addr::LOCALHOST.into()),
            PipelineLimits::default().request_cost,
        ),
        session: None,
        credentials: None,
        tried: Attempts::default(),
        entries: Entries::default(),
    }
}

/// Returns a conversation with one picture.
pub fn picture() -> Prompt {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(PICTURE));
    about(url)
}

/// Returns a conversation with one picture that has a valid header and no more.
pub fn broken_picture() -> Prompt {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(&PICTURE[..700]));
    about(url)
}

fn about(url: String) -> Prompt {
    let content = ChatContent::Parts(vec![
        ChatPart::Media(Modality::Image),
        ChatPart::Text("what is this?".to_owned()),
    ]);
    let message =
        ChatMessage { role: "user".to_owned(), content: Some(content), ..ChatMessage::default() };
    let media = MediaRef {
        modality: Modality::Image,
        source: Some(MediaInput::Url(url.into())),
        uuid: None,
        field: "messages[0].content[0].image_url".to_owned(),
    };
    Prompt::Chat(Chat {
        messages: vec![message],
        media: vec![media],
        add_generation_prompt: true,
        ..Chat::default()
    })
}

/// Loads the model with these parsers of its answers, by vLLM's names of them.
pub fn model(tools: &str, reasoning: &str) -> Arc<ServedModel> {
    let model = ServedModel::load(Path::new(MODEL), "m", None).unwrap();
    Arc::new(model.with_parsers(&tools.parse().unwrap(), &reasoning.parse().unwrap()).unwrap())
}

/// The parsing of a model's answers to a conversation with tools.
pub struct TestReading {
    /// The model.
    pub model: Arc<ServedModel>,
    reading: Arc<Reading>,
}

impl TestReading {
    /// Reads the answers of a model that may call these tools.
    pub fn new(model: Arc<ServedModel>, tools: &ToolUse) -> Self {
        let (reading, _) = Reading::plan(&model, &Chat::default(), Some(tools), false).unwrap();
        Self { model, reading: reading.unwrap() }
    }

    /// Returns the deltas of an answer that comes in these pieces.
    pub fn read(&self, pieces: &[&str]) -> Vec<ChoiceDelta> {
        let mut reader = self.reading.begin(&self.model, &[]);
        let mut deltas = Vec::new();
        for piece in pieces {
            let mut delta = ChoiceDelta::default();
            reader.read(piece, &mut delta);
            deltas.push(delta);
        }
        let mut last = ChoiceDelta { finish: Some(Finish::Eos), ..ChoiceDelta::default() };
        reader.finish(&mut last);
        deltas.push(last);
        deltas
    }
}

/// Returns the whole answer of which these are the deltas.
pub fn whole(deltas: Vec<ChoiceDelta>) -> FinishedChoice {
    let mut whole = ChoiceDelta::default();
    deltas.into_iter().for_each(|delta| whole.append(delta));
    whole.into_finished().unwrap()
}
