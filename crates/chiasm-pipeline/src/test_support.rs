//! A pipeline in front of fake backends, for unit tests.

#![allow(clippy::unwrap_used, reason = "for tests alone")]

pub mod videos;

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::fake::{FakeBackend, FakeConnector};
use chiasm_backend::{Connector, Finish, RequestId};
use chiasm_fleet::{Fleet, Patience};
use chiasm_limit::Owner;
use chiasm_media::{ByteBudget, MediaConfig, MediaInput, MediaLoader};
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use chiasm_request::{
    Chat, ChoiceDelta, ClientSampling, FinishedChoice, GenerateRequest, MediaRef, Prompt, ToolUse,
};
use chiasm_router::{Policy, RouterConfig};
use chiasm_types::Modality;
use tokio::time::Instant;

use super::output_parsing::OutputParsing;
use super::{
    Attempts, LastRoute, PageEntries, Pipeline, PipelineLimits, Prepared, RequestContext,
    RequestError, RouteObserver, prepare,
};
use crate::model::ServedModel;
use chiasm_cpu::CpuBudget;

/// The demo's model: Qwen2-VL's template and processor, and a small tokenizer.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
/// A picture that the loader accepts.
const PICTURE: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/images/dawn.jpg"));

/// A pipeline in front of fake backends.
pub struct TestPipeline {
    /// The pipeline.
    pub pipeline: Arc<Pipeline>,
    /// The backends, in the order of their workers' ids.
    pub backends: Vec<FakeBackend>,
}

impl TestPipeline {
    /// Creates a pipeline in front of `workers` workers.
    pub async fn new(workers: usize) -> Self {
        Self::limited(PipelineLimits::default(), workers).await
    }

    /// Creates a pipeline with these limits in front of `workers` workers.
    pub async fn limited(limits: PipelineLimits, workers: usize) -> Self {
        Self::build((0..workers).map(|_| FakeBackend::new()).collect(), limits, None).await
    }

    /// Creates a pipeline in front of these backends. The workers are picked in turn.
    pub async fn with(backends: Vec<FakeBackend>) -> Self {
        Self::build(backends, PipelineLimits::default(), None).await
    }

    /// Creates a pipeline in front of `workers` workers, with an observer.
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
        let media = MediaLoader::new(MediaConfig::default(), ByteBudget::new(1 << 30)).unwrap();
        let pipeline = Pipeline { observer, ..Pipeline::new(model, media, fleet, limits) };
        Self { pipeline: Arc::new(pipeline), backends }
    }

    /// Prepares a request of this prompt.
    pub async fn prepare(
        &self,
        prompt: Prompt,
        sampling: ClientSampling,
    ) -> Result<Prepared, RequestError> {
        self.prepare_with_entries(prompt, sampling, PageEntries::default()).await
    }

    /// Prepares a request with these entries of an observer.
    pub async fn prepare_with_entries(
        &self,
        prompt: Prompt,
        sampling: ClientSampling,
        entries: PageEntries,
    ) -> Result<Prepared, RequestError> {
        let request = GenerateRequest {
            prompt,
            sampling,
            cache_salt: None,
            priority: 0,
            tools: None,
            without_reasoning: false,
        };
        let context = RequestContext { entries, ..context() };
        prepare(&self.pipeline, request, None, &context, self.pipeline.fleet.classes()).await
    }

    /// Prepares a request with a short text prompt.
    pub async fn text(&self, sampling: ClientSampling) -> Prepared {
        self.prepare(
            Prompt::Text("the quick brown fox jumps over the lazy dog".to_owned()),
            sampling,
        )
        .await
        .unwrap()
    }
}

fn context() -> RequestContext {
    RequestContext {
        id: RequestId::new("test").unwrap(),
        trace: None,
        arrived: Instant::now(),
        cpu: CpuBudget::new(
            Owner::from_address(Ipv4Addr::LOCALHOST.into()),
            PipelineLimits::default().request_cost,
        ),
        session: None,
        credentials: None,
        attempts: Attempts::default(),
        entries: PageEntries::default(),
        last_route: LastRoute::default(),
    }
}

/// Returns a conversation with one picture.
pub fn picture() -> Prompt {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(PICTURE));
    picture_prompt(url)
}

/// Returns a conversation with one picture that is cut off after its header.
pub fn broken_picture() -> Prompt {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(&PICTURE[..700]));
    picture_prompt(url)
}

fn picture_prompt(url: String) -> Prompt {
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

/// Loads the model with these parsers of its answers, by vLLM's names.
pub fn model(tools: &str, reasoning: &str) -> Arc<ServedModel> {
    let model = ServedModel::load(Path::new(MODEL), "m", None).unwrap();
    Arc::new(model.with_parsers(&tools.parse().unwrap(), &reasoning.parse().unwrap()).unwrap())
}

/// The parsing of a model's answers to a conversation with tools.
pub struct TestOutputParsing {
    /// The model.
    pub model: Arc<ServedModel>,
    parsing: Arc<OutputParsing>,
}

impl TestOutputParsing {
    /// Creates the parsing of the answers of a model that may call these tools.
    pub fn new(model: Arc<ServedModel>, tools: &ToolUse) -> Self {
        let (parsing, _) =
            OutputParsing::plan(&model, &Chat::default(), Some(tools), false).unwrap();
        Self { model, parsing: parsing.unwrap() }
    }

    /// Returns the deltas of an answer that arrives in these pieces.
    pub fn parse(&self, pieces: &[&str]) -> Vec<ChoiceDelta> {
        let mut parser = self.parsing.parser(&self.model, &[]);
        let mut deltas = Vec::new();
        for piece in pieces {
            let mut delta = ChoiceDelta::default();
            parser.push(piece, &mut delta);
            deltas.push(delta);
        }
        let mut last = ChoiceDelta { finish: Some(Finish::Eos), ..ChoiceDelta::default() };
        parser.finish(&mut last);
        deltas.push(last);
        deltas
    }
}

/// Joins the deltas of an answer.
pub fn whole(deltas: Vec<ChoiceDelta>) -> FinishedChoice {
    let mut whole = ChoiceDelta::default();
    deltas.into_iter().for_each(|delta| whole.append(delta));
    whole.into_finished().unwrap()
}
