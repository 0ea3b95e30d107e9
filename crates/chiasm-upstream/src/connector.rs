//! Connects to a server, and reconnects whenever its backend ends.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    Capabilities, ConnectError, Connected, Connector, LargestItem, Locality, MediaObserver,
    RemoteLifecycle,
};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt};
use url::Host;

use crate::address::{Kind, Upstream};
use crate::backend::UpstreamBackend;
use crate::models::{Models, Names, ServedModel, truncated};
use crate::plain::PlainInfo;
use crate::server::Server;
use crate::server_key::UpstreamKey;
use crate::setup_error::SetupError;
use crate::sglang::SglangInfo;
use crate::shared::Mode;
use crate::trtllm::{RecentPrompts, TrtllmInfo};
use crate::unusable::Unusable;
use crate::vllm_info::{VllmInfo, check_accepts_tokens};

/// The maximum pause between two connection attempts. Someone else starts the server, so the pause
/// is short.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(5);

/// Connects to one server.
pub struct UpstreamConnector {
    upstream: Upstream,
    server: Server,
    names: Names,
    /// The last unexpected model name that was logged.
    warned_name: Mutex<Option<String>>,
    processor: Arc<[u8]>,
    largest_item: LargestItem,
}

impl UpstreamConnector {
    /// Creates a connector and reads the files that `upstream` names. `processor` identifies the
    /// processor of the model served here.
    ///
    /// # Errors
    /// Returns a [`SetupError`] if a file can't be used.
    pub fn new(upstream: Upstream, processor: Arc<[u8]>) -> Result<Self, SetupError> {
        let server = Server::new(&upstream)?;
        let names = Names { configured: upstream.model.clone(), local: Vec::new() };
        Ok(Self {
            upstream,
            server,
            names,
            warned_name: Mutex::default(),
            processor,
            largest_item: LargestItem::unknown(),
        })
    }

    /// Sets the largest item of the model. Servers do not report the size of their encoder cache.
    #[must_use]
    pub fn with_largest_item(self, largest_item: LargestItem) -> Self {
        Self { largest_item, ..self }
    }

    /// Sets the local names of the model, which select a model in the server's list.
    #[must_use]
    pub fn with_names(self, local: Vec<String>) -> Self {
        Self { names: Names { local, ..self.names }, ..self }
    }

    /// Returns the API key for the server, if there is one.
    pub fn key(&self) -> Option<Arc<UpstreamKey>> {
        self.server.key()
    }

    /// Queries a server of an unknown kind, and uses what it supports.
    ///
    /// # Errors
    /// Returns [`Unusable`] if the server can't be used, or does not answer now.
    async fn detect(&self, locality: Locality) -> Result<Description, Unusable> {
        let Self { upstream, server, .. } = self;
        let models = PlainInfo::fetch_models(server).await?;
        if models.is_none() {
            tracing::warn!(
                %upstream,
                "the server has no list of models (/v1/models): is it a server of OpenAI's API? \
                 It gets requests anyway"
            );
        }
        let kind = kind_from(models.as_ref());
        let known = self.fetch(kind, locality.clone()).await;
        let known = match known {
            Err(Unusable::NoTokens) => self.fetch(Kind::VllmMessages, locality.clone()).await,
            known => known,
        };
        match known {
            Ok(description) => {
                let engine = &description.capabilities.engine;
                tracing::info!(%upstream, engine, "detected the kind of the server");
                Ok(description)
            }
            // A proxy in front of the server may hide the paths that its kind needs.
            Err(error) if error.is_about_kind() => {
                tracing::warn!(
                    %upstream, %error,
                    "the server looks like {}, but can't be used as one; it gets requests \
                     unchanged, and the contents of its KV cache are unknown", kind.software()
                );
                self.fetch(Kind::Messages, locality).await
            }
            Err(error) => Err(error),
        }
    }

    /// Queries a server of this kind.
    ///
    /// # Errors
    /// Returns [`Unusable`] if the server can't be used.
    async fn fetch(&self, kind: Kind, locality: Locality) -> Result<Description, Unusable> {
        let Self { server, names, processor, largest_item, .. } = self;
        let (capabilities, mode, model) = match kind {
            Kind::VllmTokens => {
                let info = VllmInfo::fetch(server, names, &locality, self.upstream.rank).await?;
                check_accepts_tokens(server).await?;
                let model = info.model.clone();
                let engine = info.engine.map(|engine| engine.number);
                (
                    info.into_token_mode(processor.clone(), largest_item, locality),
                    Mode::Vllm { engine },
                    Some(model),
                )
            }
            Kind::VllmMessages => {
                let info = VllmInfo::fetch(server, names, &locality, None).await?;
                let model = info.model.clone();
                let mode = Mode::Messages {
                    model: Some(model.name.clone()),
                    is_vllm: true,
                    recent_prompts: None,
                };
                (info.into_chat_mode(processor.clone(), largest_item, locality), mode, Some(model))
            }
            Kind::SglangTokens => {
                let info = SglangInfo::fetch(server, names, &locality).await?;
                if self.upstream.kind == Kind::Detected && info.images_need_text {
                    return Err(Unusable::ImagesNeedText);
                }
                let rules = info.request_rules();
                let model = info.model.clone();
                (
                    info.into_capabilities(processor.clone(), largest_item, locality),
                    Mode::Sglang(rules),
                    Some(model),
                )
            }
            Kind::Trtllm { block_size } => {
                let info = TrtllmInfo::fetch(server, names).await?;
                let capabilities = info.capabilities(processor.clone(), block_size, locality);
                let model = info.plain.model;
                (
                    capabilities,
                    Mode::Messages {
                        model: name_in_requests(names, model.as_ref()),
                        is_vllm: false,
                        recent_prompts: Some(Arc::new(RecentPrompts::new(block_size))),
                    },
                    model,
                )
            }
            Kind::Messages | Kind::Detected => {
                let info = PlainInfo::fetch(server, names).await?;
                let capabilities = info.capabilities(locality);
                let model = info.model;
                (
                    capabilities,
                    Mode::Messages {
                        model: name_in_requests(names, model.as_ref()),
                        is_vllm: false,
                        recent_prompts: None,
                    },
                    model,
                )
            }
        };
        Ok(Description { capabilities, mode, model })
    }

    /// Logs that the server's model may be another one, unless this name was logged last.
    fn warn_about_name(&self, name: String) {
        let mut warned_name = self.warned_name.lock().unwrap_or_else(PoisonError::into_inner);
        if warned_name.as_ref() == Some(&name) {
            return;
        }
        tracing::warn!(
            upstream = %self.upstream, model = name, local_names = self.names.local.join(", "),
            "the server's model has another name; it gets requests anyway. If it is the same \
             model, add model=NAME after the address"
        );
        *warned_name = Some(name);
    }
}

/// A server, as a backend needs it.
struct Description {
    capabilities: Capabilities,
    mode: Mode,
    /// The model that gets the requests; `None` if the server lists none.
    model: Option<ServedModel>,
}

/// Returns the kind of a server, which its list of models states: `owned_by` is a constant in vLLM
/// (`entrypoints/serve/engine/protocol.py`), SGLang (`srt/entrypoints/openai/protocol.py`) and
/// TensorRT-LLM (`serve/openai_protocol.py`).
fn kind_from(models: Option<&Models>) -> Kind {
    match models.and_then(Models::software) {
        Some("vllm") => Kind::VllmTokens,
        Some("sglang") => Kind::SglangTokens,
        Some("tensorrt_llm") => Kind::TRTLLM,
        _ => Kind::Messages,
    }
}

impl Connector for UpstreamConnector {
    fn connect(
        &self,
        _worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let Self { upstream, server, .. } = self;
            let failed = |reason: Unusable| ConnectError::new(format!("{upstream}: {reason}"));
            let locality = locality(upstream).await;
            let Description { mut capabilities, mode, model } = match upstream.kind {
                Kind::Detected => self.detect(locality).await.map_err(failed)?,
                kind => self.fetch(kind, locality).await.map_err(failed)?,
            };
            if let Some(model) = model.filter(|model| !model.is_expected) {
                let name = truncated(&model.name);
                capabilities.engine = format!("{}, with a model named {name}", capabilities.engine);
                self.warn_about_name(name);
            }
            let backend = UpstreamBackend::new(
                upstream.to_string(),
                server.clone(),
                mode,
                capabilities,
                observer,
            );
            Ok(Connected { backend: Arc::new(backend), lifecycle: Box::new(RemoteLifecycle) })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        format!("the server at {}", self.upstream)
    }

    fn max_retry_pause(&self) -> Duration {
        MAX_RETRY_PAUSE
    }
}

/// Returns the model's name in requests. The operator's name also applies if the server lists no
/// models.
fn name_in_requests(names: &Names, model: Option<&ServedModel>) -> Option<String> {
    model.map(|model| model.name.clone()).or_else(|| names.configured.clone())
}

/// Returns the locality of a server. A host name counts as its first address.
async fn locality(upstream: &Upstream) -> Locality {
    let address = match upstream.base.host() {
        Some(Host::Ipv4(address)) => Some(IpAddr::V4(address)),
        Some(Host::Ipv6(address)) => Some(IpAddr::V6(address)),
        Some(Host::Domain(name)) => {
            let port = upstream.base.port_or_known_default().unwrap_or_default();
            let addresses = tokio::net::lookup_host((name, port)).await.ok();
            addresses.and_then(|mut addresses| addresses.next()).map(|address| address.ip())
        }
        None => None,
    };
    match address {
        Some(address) if address.is_loopback() => Locality::Here,
        Some(address) => Locality::Host(address),
        None => Locality::Unknown,
    }
}
