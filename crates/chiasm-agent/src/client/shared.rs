//! The state shared by a backend, its jobs and the task that watches the engine.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use chiasm_backend::{LoadSink, MediaObserver};

use super::AgentLink;
use super::images::ImageForms;
use super::jobs::Jobs;
use crate::cuts::AcceptedCuts;
use crate::proto::AdmitRequest;

/// The state shared by a backend, its jobs and the task that watches the engine.
pub(super) struct Shared {
    pub(super) link: AgentLink,
    pub(super) engine: u32,
    pub(super) life: u64,
    /// `true` if the agent fetches media items, so that URLs are sent.
    pub(super) fetches_media: bool,
    /// The forms in which images are sent.
    pub(super) images: ImageForms,
    /// The videos whose cuts the agent accepts.
    pub(super) cuts: AcceptedCuts,
    pub(super) observer: Arc<dyn MediaObserver>,
    pub(super) load: Mutex<Option<LoadSink>>,
    /// The time since the engine's last sign of life, in milliseconds.
    pub(super) silent_ms: AtomicU64,
    /// The running jobs, and the engine's end.
    pub(super) jobs: Arc<Jobs>,
}

impl Shared {
    /// Tells the agent that this frontend has admitted the engine, until this future is dropped or
    /// the engine ends.
    pub(super) async fn admit(self: Arc<Self>) {
        let mut watches = self.link.watches.clone();
        let admitted = watches.admit(AdmitRequest { engine: self.engine, life: self.life }).await;
        let ended = match admitted {
            Ok(admission) => admission.into_inner().message().await.err(),
            Err(status) => Some(status),
        };
        if let Some(status) = ended {
            tracing::debug!(
                agent = %self.link.address,
                engine = self.engine,
                %status,
                "the admission of an engine ended"
            );
        }
    }
}
