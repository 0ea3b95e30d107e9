//! Connecting to one engine of an agent, again after each of its ends.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{ConnectError, Connected, Connector, Elsewhere, MediaObserver};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt};

use super::backend::AgentBackend;
use super::images::ImageForms;
use super::jobs::Jobs;
use super::{AgentLink, AgentMedia, words};
use crate::capabilities;
use crate::proto::watch_event::Event;
use crate::proto::{WatchEvent, WatchRequest};

/// Agents are asked again soon: they and not we start engines.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Connects to one engine of an agent.
pub struct AgentConnector {
    link: AgentLink,
    engine: u32,
    /// What the engine's items have to be made with for plans that are made here to be right.
    processor: Arc<[u8]>,
    media: AgentMedia,
}

impl AgentConnector {
    /// A connector for the agent's engine of this number, counted from 0. `processor` is that of
    /// the model that is served here: an engine with another one is refused.
    pub fn new(link: AgentLink, engine: u32, processor: Arc<[u8]>) -> Self {
        Self { link, engine, processor, media: AgentMedia::default() }
    }

    /// The same, which sends images in this form.
    #[must_use]
    pub fn with_media(self, media: AgentMedia) -> Self {
        Self { media, ..self }
    }
}

impl Connector for AgentConnector {
    fn connect(
        &self,
        _worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let Self { link, engine, processor, media } = self;
            let engines = link.greet().await.map_err(ConnectError::new)?.engines;
            if *engine >= engines {
                return Err(ConnectError::new(format!("the agent at {} has {engines} engines", link.address)));
            }
            let failed = |reason: String| ConnectError::new(format!("the agent at {}: {reason}", link.address));
            let mut watches = link.watches.clone();
            let events = watches.watch(WatchRequest { engine: *engine, frontend: link.frontend }).await;
            let mut events = events.map_err(|status| failed(words(&status)))?.into_inner();
            // Takes as long as the engine needs to start.
            let ready = match events.message().await.map_err(|status| failed(words(&status)))? {
                Some(WatchEvent { event: Some(Event::Ready(ready)) }) => ready,
                _ => return Err(failed("it tells of no engine".to_owned())),
            };
            let (life, fetches_media) = (ready.life, ready.fetches_media);
            let format = capabilities::image_tensors(&ready);
            let images = ImageForms { choice: *media, format, most_bytes: ready.most_tensor_bytes };
            let capabilities = capabilities::from_message(ready, link.ip);
            let capabilities = capabilities.ok_or_else(|| failed("it tells nonsense of its engine".to_owned()))?;
            if capabilities.class.processor != *processor {
                let other = "it serves another model than this frontend, or with other settings of its processor";
                return Err(failed(other.to_owned()));
            }
            let jobs = Jobs::open(link, *engine, life).await.map_err(|status| failed(words(&status)))?;
            let start = (life, fetches_media, images);
            let backend = AgentBackend::new(link.clone(), jobs, *engine, start, capabilities, observer, events);
            Ok(Connected { backend: Arc::new(backend), life: Box::new(Elsewhere) })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        format!("engine {} of the agent at {}", self.engine, self.link.address)
    }

    fn longest_pause(&self) -> Duration {
        LONGEST_PAUSE
    }
}
