//! One start of an engine of an agent, as a backend.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, Death, Input, Job, JobError, KvSink, KvSource,
    LoadSink, MediaObserver, MemoryUsage, RunningJob,
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
use crate::job;
use crate::proto::WatchEvent;

/// The connection to one start of an engine of an agent.
pub(super) struct AgentBackend {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    /// Takes whoever is to be told of the KV cache, once.
    kv: Mutex<Option<oneshot::Sender<Box<dyn KvSink>>>>,
    /// What follows the engine, and what keeps it admitted. They end with this.
    tasks: Mutex<JoinSet<()>>,
}

impl AgentBackend {
    /// The backend of the engine that `events` tell of.
    pub(super) fn new(
        link: AgentLink,
        jobs: Jobs,
        engine: u32,
        (life, fetches_media, images): (u64, bool, ImageForms),
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
            observer,
            load: Mutex::new(None),
            silent_ms: AtomicU64::new(0),
            jobs: Arc::new(jobs),
        });
        let (kv, sink) = oneshot::channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(watch(shared.clone(), events, sink));
        // Otherwise nobody will ask to be told.
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
                return Err(refused("input", "must be token ids: the engine takes nothing else"));
            };
            if let Some(death) = self.shared.jobs.ended() {
                return Err(JobError::NotTaken(death));
            }
            let image_tensors = self.shared.images.tensors();
            // Who wants an agent to get tensors does not want it to make them.
            let makes_none =
                self.shared.images.choice == AgentMedia::Tensors && image_tensors.is_some();
            let media =
                job::MediaTold { urls: self.shared.fetches_media && !makes_none, image_tensors };
            let told = job::to_message(&job, prompt, media);
            let told =
                told.ok_or_else(|| refused("messages", "has a media item that is too long"))?;
            let running = RunningAgentJob::start(self.shared.clone(), job, told)?;
            Ok(Box::new(running) as Box<dyn RunningJob>)
        }
        .boxed()
    }

    fn load_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>> {
        async { Err(AdapterError::NotOwn) }.boxed()
    }

    fn unload_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    // What the agent's engines hold is known to the agent alone, which is told of items and asks
    // for files.
    fn holds(&self, _: &MmHash) -> bool {
        false
    }

    fn follow_load(&self, sink: LoadSink) {
        *self.shared.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
        // Asked for by whoever has taken the engine among its workers.
        self.tasks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .spawn(self.shared.clone().admit());
    }

    fn follow_kv(&self, sink: Box<dyn KvSink>) {
        if let Some(kv) = self.kv.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Nobody takes it any more when the engine is gone.
            let _ = kv.send(sink);
        }
    }

    fn ended(&self) -> BoxFuture<'_, Death> {
        let mut ended = self.shared.jobs.when_ended();
        async move {
            let death = ended.wait_for(Option::is_some).await.ok().and_then(|death| death.clone());
            death.unwrap_or_else(|| Death::new("it was let go"))
        }
        .boxed()
    }

    fn silent_for(&self) -> Duration {
        Duration::from_millis(self.shared.silent_ms.load(Relaxed))
    }

    fn declare_dead(&self, death: Death) {
        self.shared.jobs.end(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        None
    }
}
