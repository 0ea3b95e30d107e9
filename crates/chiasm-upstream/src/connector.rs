//! Connecting to a server, again after each of its ends.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    ConnectError, Connected, Connector, Elsewhere, LargestItem, Locality, MediaObserver,
};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt};
use url::Host;

use crate::address::{Kind, Upstream};
use crate::backend::UpstreamBackend;
use crate::found::{Found, can_generate};
use crate::models::{self, Names, shown};
use crate::plain::FoundPlain;
use crate::server::Server;
use crate::server_key::UpstreamKey;
use crate::setup_error::SetupError;
use crate::sglang;
use crate::shared::Mode;
use crate::trtllm::{Asked, FoundTrtllm};
use crate::unusable::Unusable;

/// Somebody else starts it: it is looked for soon again.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Connects to one server.
pub struct UpstreamConnector {
    upstream: Upstream,
    server: Server,
    names: Names,
    /// The last name of a model that was warned of.
    warned_of: Mutex<Option<String>>,
    processor: Arc<[u8]>,
    largest_item: LargestItem,
}

impl UpstreamConnector {
    /// A connector for the server of this address. Its files are read now. `processor` is that of
    /// the model that is served here.
    ///
    /// # Errors
    /// [`SetupError`] if a file can't be used.
    pub fn new(upstream: Upstream, processor: Arc<[u8]>) -> Result<Self, SetupError> {
        let server = Server::new(&upstream)?;
        let names = Names { told: upstream.model.clone(), here: Vec::new() };
        let (warned_of, largest_item) = (Mutex::default(), LargestItem::unknown());
        Ok(Self { upstream, server, names, warned_of, processor, largest_item })
    }

    /// The same for a model whose largest item is known: servers don't tell what their encoder
    /// cache holds.
    #[must_use]
    pub fn with_largest_item(self, largest_item: LargestItem) -> Self {
        Self { largest_item, ..self }
    }

    /// The same for a model that has these names here, by which it is found among those that the
    /// server lists.
    #[must_use]
    pub fn with_names(self, here: Vec<String>) -> Self {
        Self { names: Names { here, ..self.names }, ..self }
    }

    /// Returns the key that the server is shown, if it is shown one.
    pub fn key(&self) -> Option<Arc<UpstreamKey>> {
        self.server.key()
    }

    /// Says that the server's model may be another one, once for each that it has.
    fn warn_of(&self, name: String) {
        let mut warned_of = self.warned_of.lock().unwrap_or_else(PoisonError::into_inner);
        if warned_of.as_ref() == Some(&name) {
            return;
        }
        tracing::warn!(
            upstream = %self.upstream, model = name, here = self.names.here.join(", "),
            "this server calls its model otherwise; it gets requests all the same. If it is the same model, \
             model=NAME behind the address says so"
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
                    let found = Found::ask(server, names, &locality).await.map_err(failed)?;
                    can_generate(server).await.map_err(failed)?;
                    let model = found.model.clone();
                    (
                        found.given_tokens(processor.clone(), largest_item, locality),
                        Mode::Vllm,
                        Some(model),
                    )
                }
                Kind::VllmMessages => {
                    let found = Found::ask(server, names, &locality).await.map_err(failed)?;
                    let model = found.model.clone();
                    let mode = Mode::Messages {
                        model: Some(model.name.clone()),
                        is_vllm: true,
                        asked: None,
                    };
                    (
                        found.given_messages(processor.clone(), largest_item, locality),
                        mode,
                        Some(model),
                    )
                }
                Kind::SglangTokens => {
                    let found =
                        sglang::Found::ask(server, names, &locality).await.map_err(failed)?;
                    let manner = found.manner();
                    let model = found.model.clone();
                    (
                        found.capabilities(processor.clone(), largest_item, locality),
                        Mode::Sglang(manner),
                        Some(model),
                    )
                }
                Kind::Trtllm { block_size } => {
                    let found = FoundTrtllm::ask(server, names).await.map_err(failed)?;
                    let capabilities = found.capabilities(processor.clone(), block_size, locality);
                    let asked = Some(Arc::new(Asked::new(block_size)));
                    let model = found.plain.model;
                    (
                        capabilities,
                        Mode::Messages {
                            model: sent(names, model.as_ref()),
                            is_vllm: false,
                            asked,
                        },
                        model,
                    )
                }
                Kind::Messages => {
                    let found = FoundPlain::ask(server, names).await.map_err(failed)?;
                    let capabilities = found.capabilities(locality);
                    let model = found.model;
                    (
                        capabilities,
                        Mode::Messages {
                            model: sent(names, model.as_ref()),
                            is_vllm: false,
                            asked: None,
                        },
                        model,
                    )
                }
            };
            if let Some(model) = model.filter(|model| !model.is_expected) {
                let name = shown(&model.name);
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
            Ok(Connected { backend: Arc::new(backend), life: Box::new(Elsewhere) })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        format!("the server at {}", self.upstream)
    }

    fn longest_pause(&self) -> Duration {
        LONGEST_PAUSE
    }
}

/// The model's name in requests: the operator's, also where the server lists none.
fn sent(names: &Names, model: Option<&models::Found>) -> Option<String> {
    model.map(|model| model.name.clone()).or_else(|| names.told.clone())
}

/// Returns the place of a server. A name stands for its first address.
async fn locality(upstream: &Upstream) -> Locality {
    let address = match upstream.base.host() {
        Some(Host::Ipv4(address)) => Some(IpAddr::V4(address)),
        Some(Host::Ipv6(address)) => Some(IpAddr::V6(address)),
        Some(Host::Domain(name)) => {
            let port = upstream.base.port_or_known_default().unwrap_or_default();
            let found = tokio::net::lookup_host((name, port)).await.ok();
            found.and_then(|mut found| found.next()).map(|address| address.ip())
        }
        None => None,
    };
    match address {
        Some(address) if address.is_loopback() => Locality::Here,
        Some(address) => Locality::Host(address),
        None => Locality::Unknown,
    }
}
