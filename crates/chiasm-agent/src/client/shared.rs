//! The state that a backend, its jobs and the task that watches the engine share.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use chiasm_backend::{LoadSink, MediaObserver};

use super::AgentLink;
use super::images::ImageForms;
use super::jobs::Jobs;
use crate::proto::AdmitRequest;

/// What a backend, its jobs and what watches the engine share.
pub(super) struct Shared {
    pub(super) link: AgentLink,
    pub(super) engine: u32,
    pub(super) life: u64,
    /// Whether the agent is told where media items are.
    pub(super) fetches_media: bool,
    /// How it is sent images.
    pub(super) images: ImageForms,
    pub(super) observer: Arc<dyn MediaObserver>,
    pub(super) load: Mutex<Option<LoadSink>>,
    /// The time in which the engine has said nothing, in milliseconds.
    pub(super) silent_ms: AtomicU64,
    /// Knows of the engine's end, too.
    pub(super) jobs: Arc<Jobs>,
}

impl Shared {
    /// Lets the agent know that this frontend gives the engine jobs, for as long as this is not
    /// dropped and the engine lives.
    pub(super) async fn admit(self: Arc<Self>) {
        let mut watches = self.link.watches.clone();
        let admitted = watches.admit(AdmitRequest { engine: self.engine, life: self.life }).await;
        let ended = match admitted {
            Ok(admission) => admission.into_inner().message().await.err(),
            Err(status) => Some(status),
        };
        if let Some(status) = ended {
            tracing::debug!(agent = %self.link.address, engine = self.engine, %status, "an admission is over");
        }
    }
}
