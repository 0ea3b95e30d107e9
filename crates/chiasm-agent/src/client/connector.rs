//! Connecting to one engine of an agent, again after each of the engine's ends.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{ConnectError, Connected, Connector, MediaObserver, RemoteLifecycle};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt};
use tonic::Status;

use super::backend::{AgentBackend, EngineStart};
use super::images::ImageForms;
use super::jobs::Jobs;
use super::{AgentLink, AgentMedia, describe};
use crate::capabilities;
use crate::cuts::AcceptedCuts;
use crate::proto::watch_event::Event;
use crate::proto::{WatchEvent, WatchRequest};

/// The maximum pause between attempts. It is short because agents, and not frontends, start
/// engines.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(2);

/// Connects to one engine of an agent.
pub struct AgentConnector {
    link: AgentLink,
    engine: u32,
    /// The processor that the engine's items must be made with, so that plans made here are right.
    processor: Arc<[u8]>,
    media: AgentMedia,
}

impl AgentConnector {
    /// Creates a connector for the agent's engine of this number, counted from 0. `processor` is
    /// that of the served model: an engine with another one is refused.
    pub fn new(link: AgentLink, engine: u32, processor: Arc<[u8]>) -> Self {
        Self { link, engine, processor, media: AgentMedia::default() }
    }

    /// Returns a connector that sends images in this form.
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
                let reason = format!("the agent at {} has {engines} engines", link.address);
                return Err(ConnectError::new(reason));
            }
            let failed = |reason: String| {
                ConnectError::new(format!("the agent at {}: {reason}", link.address))
            };
            let call_failed = |status: Status| failed(describe(&status));
            let mut watches = link.watches.clone();
            let request = WatchRequest { engine: *engine, frontend: link.frontend };
            let mut events = watches.watch(request).await.map_err(call_failed)?.into_inner();
            // Takes as long as the engine needs to start.
            let ready = match events.message().await.map_err(call_failed)? {
                Some(WatchEvent { event: Some(Event::Ready(ready)) }) => ready,
                _ => return Err(failed("it did not describe its engine".to_owned())),
            };
            let images = ImageForms {
                choice: *media,
                format: capabilities::image_tensors(&ready),
                max_bytes: ready.most_tensor_bytes,
            };
            let cuts =
                AcceptedCuts { slots: ready.video_slots, max_bytes: ready.most_tensor_bytes };
            let start =
                EngineStart { life: ready.life, fetches_media: ready.fetches_media, images, cuts };
            let capabilities = capabilities::from_message(ready, link.ip)
                .ok_or_else(|| failed("the description of its engine is malformed".to_owned()))?;
            if capabilities.class.processor != *processor {
                let other = "it serves another model than this frontend, \
                             or uses other settings of the model's processor";
                return Err(failed(other.to_owned()));
            }
            let jobs = Jobs::open(link, *engine, start.life).await.map_err(call_failed)?;
            let backend = AgentBackend::new(
                link.clone(),
                jobs,
                *engine,
                start,
                capabilities,
                observer,
                events,
            );
            Ok(Connected { backend: Arc::new(backend), lifecycle: Box::new(RemoteLifecycle) })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        format!("engine {} of the agent at {}", self.engine, self.link.address)
    }

    fn max_retry_pause(&self) -> Duration {
        MAX_RETRY_PAUSE
    }
}
