//! Connects to a server, and reconnects whenever its backend ends.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    ConnectError, Connected, Connector, LargestItem, Locality, MediaObserver, RemoteLifecycle,
};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt};
use url::Host;

use crate::address::{Kind, Upstream};
use crate::backend::UpstreamBackend;
use crate::models::{Names, ServedModel, truncated};
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
    warned_of: Mutex<Option<String>>,
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
            warned_of: Mutex::default(),
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

    /// Logs once per name that the server's model may be another one.
    fn warn_of(&self, name: String) {
        let mut warned_of = self.warned_of.lock().unwrap_or_else(PoisonError::into_inner);
        if warned_of.as_ref() == Some(&name) {
            return;
        }
        tracing::warn!(
            upstream = %self.upstream, model = name, here = self.names.local.join(", "),
            "this server calls its model otherwise; it gets requests all the same. If it is the \
             same model, model=NAME behind the address says so"
        );
        *warned_of = Some(name);
    }
}

impl Connector for UpstreamConnector {
    fn connect(
        &self,
        _worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let Self { upstream, server, names, processor, largest_item, .. } = self;
            let failed = |reason: Unusable| ConnectError::new(format!("{upstream}: {reason}"));
            let locality = locality(upstream).await;
            let (mut capabilities, mode, model) = match upstream.kind {
                Kind::VllmTokens => {
                    let info = VllmInfo::fetch(server, names, &locality).await.map_err(failed)?;
                    check_accepts_tokens(server).await.map_err(failed)?;
                    let model = info.model.clone();
                    (
                        info.into_token_mode(processor.clone(), largest_item, locality),
                        Mode::Vllm,
                        Some(model),
                    )
                }
                Kind::VllmMessages => {
                    let info = VllmInfo::fetch(server, names, &locality).await.map_err(failed)?;
                    let model = info.model.clone();
                    let mode = Mode::Messages {
                        model: Some(model.name.clone()),
                        is_vllm: true,
                        recent_prompts: None,
                    };
                    (
                        info.into_chat_mode(processor.clone(), largest_item, locality),
                        mode,
                        Some(model),
                    )
                }
                Kind::SglangTokens => {
                    let info = SglangInfo::fetch(server, names, &locality).await.map_err(failed)?;
                    let rules = info.request_rules();
                    let model = info.model.clone();
                    (
                        info.into_capabilities(processor.clone(), largest_item, locality),
                        Mode::Sglang(rules),
                        Some(model),
                    )
                }
                Kind::Trtllm { block_size } => {
                    let info = TrtllmInfo::fetch(server, names).await.map_err(failed)?;
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
                Kind::Messages => {
                    let info = PlainInfo::fetch(server, names).await.map_err(failed)?;
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
            if let Some(model) = model.filter(|model| !model.is_expected) {
                let name = truncated(&model.name);
                capabilities.engine =
                    format!("{}, with a model that it calls {name}", capabilities.engine);
                self.warn_of(name);
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
