//! A frontend before fake backends, for unit tests.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_backend::fake::{FakeBackend, FakeConnector};
use chiasm_backend::{Connector, RequestId};
use chiasm_media::{ByteBudget, MediaConfig, MediaDoor, MediaInput};
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use chiasm_router::{Policy, RouterConfig};
use chiasm_types::Modality;

use tokio::time::Instant;

use crate::cpu::CpuBudget;
use crate::fleet::{Fleet, Patience};
use crate::model::ServedModel;
use crate::owner::Owner;
use crate::page::{Entries, PageOptions};
use crate::pipeline::{
    Attempts, Caller, Chat, GenerateRequest, MediaRef, Prepared, Prompt, RequestError, Sampling, prepare,
};
use crate::{Frontend, Limits};

/// The demo's model: Qwen2-VL's template and processor, and a small tokenizer.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
/// A picture that the door takes.
const PICTURE: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/images/dawn.jpg"));

pub(crate) struct Stand {
    pub(crate) frontend: Arc<Frontend>,
    pub(crate) backends: Vec<FakeBackend>,
}

impl Stand {
    /// Workers in the order of these backends; requests go to the first that is not excluded.
    pub(crate) async fn with(backends: Vec<FakeBackend>) -> Self {
        Self::made(backends, Limits::default()).await
    }

    /// So many workers behind a frontend with these limits.
    pub(crate) async fn limited(limits: Limits, count: usize) -> Self {
        Self::made((0..count).map(|_| FakeBackend::new()).collect(), limits).await
    }

    async fn made(backends: Vec<FakeBackend>, limits: Limits) -> Self {
        let connector =
            |backend: &FakeBackend| Box::new(FakeConnector::new([Ok(backend.clone())])) as Box<dyn Connector>;
        let config = RouterConfig { policy: Policy::RoundRobin, ..RouterConfig::default() };
        let fleet = Fleet::start(backends.iter().map(connector).collect(), config, Patience::default()).unwrap();
        assert!(fleet.wait_ready(backends.len()).await);
        let model = Arc::new(ServedModel::load(Path::new(MODEL), "m", None).unwrap());
        let door = MediaDoor::new(MediaConfig::default(), ByteBudget::new(1 << 30)).unwrap();
        Self { frontend: Arc::new(Frontend::new(model, door, fleet, limits)), backends }
    }

    pub(crate) async fn of(count: usize) -> Self {
        Self::with((0..count).map(|_| FakeBackend::new()).collect()).await
    }

    /// The same with a live page. Nobody else may have the frontend yet.
    pub(crate) fn with_page(self) -> Self {
        let frontend = Arc::into_inner(self.frontend).unwrap().with_page(PageOptions::default());
        Self { frontend: Arc::new(frontend), ..self }
    }

    pub(crate) async fn prepare(&self, prompt: Prompt, sampling: Sampling) -> Result<Prepared, RequestError> {
        self.prepare_shown(prompt, sampling, Entries::default()).await
    }

    /// Prepares a request that the live page shows at these entries.
    pub(crate) async fn prepare_shown(
        &self,
        prompt: Prompt,
        sampling: Sampling,
        entries: Entries,
    ) -> Result<Prepared, RequestError> {
        let request =
            GenerateRequest { prompt, sampling, cache_salt: None, priority: 0, tools: None, without_reasoning: false };
        let caller = Caller { entries, ..caller() };
        prepare(&self.frontend, request, None, &caller, self.frontend.fleet.classes()).await
    }

    /// A prompt of some tokens.
    pub(crate) async fn text(&self, sampling: Sampling) -> Prepared {
        self.prepare(Prompt::Text("the quick brown fox jumps over the lazy dog".to_owned()), sampling).await.unwrap()
    }
}

fn caller() -> Caller {
    Caller {
        id: RequestId::new("test").unwrap(),
        trace: None,
        arrived: Instant::now(),
        cpu: CpuBudget::new(Owner::at(Ipv4Addr::LOCALHOST.into()), Limits::default().request_cost),
        session: None,
        credentials: None,
        tried: Attempts::default(),
        entries: Entries::default(),
    }
}

/// A conversation with one picture.
pub(crate) fn picture() -> Prompt {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(PICTURE));
    about(url)
}

/// A conversation with one picture that has a valid header and no more.
pub(crate) fn broken_picture() -> Prompt {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(&PICTURE[..700]));
    about(url)
}

fn about(url: String) -> Prompt {
    let content =
        ChatContent::Parts(vec![ChatPart::Media(Modality::Image), ChatPart::Text("what is this?".to_owned())]);
    let message = ChatMessage { role: "user".to_owned(), content: Some(content), ..ChatMessage::default() };
    let media = MediaRef {
        modality: Modality::Image,
        source: Some(MediaInput::Url(url.into())),
        uuid: None,
        field: "messages[0].content[0].image_url".to_owned(),
    };
    Prompt::Chat(Chat { messages: vec![message], media: vec![media], add_generation_prompt: true, ..Chat::default() })
}
