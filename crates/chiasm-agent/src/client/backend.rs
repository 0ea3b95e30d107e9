//! One start of an agent's engine, as a backend.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, DeathReason, Input, Job, JobError, KvSink,
    KvSource, LoadSink, MediaObserver, MemoryUsage, RunningJob,
};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tonic::Streaming;

use super::images::ImageForms;
use super::jobs::Jobs;
use super::running::RunningAgentJob;
use super::shared::Shared;
use super::watching::watch;
use super::{AgentLink, AgentMedia};
use crate::cuts::AcceptedCuts;
use crate::job;
use crate::proto::WatchEvent;

/// The connection to one start of an agent's engine.
pub(super) struct AgentBackend {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    /// Takes the sink of the KV cache's events, once.
    kv: Mutex<Option<oneshot::Sender<Box<dyn KvSink>>>>,
    /// The tasks that watch the engine and keep it admitted. They end when this is dropped.
    tasks: Mutex<JoinSet<()>>,
}

/// The facts about one start of an engine.
pub(super) struct EngineStart {
    /// The id of the start.
    pub(super) life: u64,
    /// `true` if the agent fetches media items.
    pub(super) fetches_media: bool,
    /// The forms in which the engine can be sent images.
    pub(super) images: ImageForms,
    /// The videos whose cuts the agent accepts.
    pub(super) cuts: AcceptedCuts,
}

impl AgentBackend {
    /// Creates the backend of the engine that `events` are about.
    pub(super) fn new(
        link: AgentLink,
        jobs: Jobs,
        engine: u32,
        EngineStart { life, fetches_media, images, cuts }: EngineStart,
        capabilities: Capabilities,
        observer: Arc<dyn MediaObserver>,
        events: Streaming<WatchEvent>,
    ) -> Self {
        let shared = Arc::new(Shared {
            link,
            engine,
            life,
            fetches_media,
            images,
            cuts,
            observer,
            load: Mutex::new(None),
            silent_ms: AtomicU64::new(0),
            jobs: Arc::new(jobs),
        });
        let (kv, sink) = oneshot::channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(watch(shared.clone(), events, sink));
        // Otherwise there is nothing to subscribe to.
        let kv = Mutex::new((capabilities.kv == KvSource::Backend).then_some(kv));
        Self { shared, capabilities, kv, tasks: Mutex::new(tasks) }
    }
}

impl fmt::Debug for AgentBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentBackend")
            .field("agent", &self.shared.link.address)
            .field("engine", &self.shared.engine)
            .finish_non_exhaustive()
    }
}

impl Backend for AgentBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        async move {
            let refused = |field: &str, message: &str| JobError::Refused {
                field: field.into(),
                message: message.into(),
            };
            let Input::Tokens(prompt) = &job.input else {
                return Err(refused("input", "must be token ids, the only input of the engine"));
            };
            if let Some(death) = self.shared.jobs.ended() {
                return Err(JobError::NotTaken(death));
            }
            let image_tensors = self.shared.images.tensors();
            // Without URLs the agent can't make tensors itself, which `AgentMedia::Tensors` rules
            // out.
            let sends_tensors =
                self.shared.images.choice == AgentMedia::Tensors && image_tensors.is_some();
            let media = job::MediaDetails {
                urls: self.shared.fetches_media && !sends_tensors,
                image_tensors,
                cuts: self.shared.cuts,
            };
            let message = job::to_message(&job, prompt, media)
                .ok_or_else(|| refused("messages", "has a media item that is too long"))?;
            let running = RunningAgentJob::start(self.shared.clone(), job, message)?;
            Ok(Box::new(running) as Box<dyn RunningJob>)
        }
        .boxed()
    }

    fn load_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>> {
        async { Err(AdapterError::NotPreloaded) }.boxed()
    }

    fn unload_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    // Only the agent knows which items its engines hold; it requests the files that it lacks.
    fn holds(&self, _: &MmHash) -> bool {
        false
    }

    fn follow_load(&self, sink: LoadSink) {
        *self.shared.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
        // Called once the fleet has the engine among its workers.
        self.tasks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .spawn(self.shared.clone().admit());
    }

    fn follow_kv(&self, sink: Box<dyn KvSink>) {
        if let Some(kv) = self.kv.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Fails if the engine has ended.
            let _ = kv.send(sink);
        }
    }

    fn ended(&self) -> BoxFuture<'_, DeathReason> {
        let mut ended = self.shared.jobs.watch_end();
        async move {
            let death = ended.wait_for(Option::is_some).await.ok().and_then(|death| death.clone());
            death.unwrap_or_else(|| DeathReason::new("the connection was closed"))
        }
        .boxed()
    }

    fn silent_for(&self) -> Duration {
        Duration::from_millis(self.shared.silent_ms.load(Relaxed))
    }

    fn declare_dead(&self, death: DeathReason) {
        self.shared.jobs.end(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        None
    }
}
