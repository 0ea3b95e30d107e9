//! The backend of one start of a worker.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, DeathReason, Job, JobError, KvSink, LoadSink,
    MediaDelivery, MediaForm, MediaObserver, MemoryUsage, RunningJob,
};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt, join_all};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::blocks::Blocks;
use crate::directory::{Events, Worker};
use crate::following::Follower;
use crate::request;
use crate::response_listener::ResponseListener;
use crate::running::RunningDynamoJob;
use crate::shared::{InFlight, Shared};
use crate::tensors::ReadyTensors;
use crate::wire::{RequestError, Wire};

/// The refusal of another process at a worker's address, and of a worker that is shutting down.
const UNKNOWN_ENDPOINT: &str = "unknown endpoint";

/// One start of a worker.
pub(crate) struct DynamoBackend {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    images: Images,
    /// Passes the sink to the task that follows the KV cache, once.
    kv: Mutex<Option<oneshot::Sender<Box<dyn KvSink>>>>,
    /// The tasks that watch the worker. They end with the backend.
    _tasks: JoinSet<()>,
}

/// The form in which a worker gets images, if it accepts any.
pub(crate) enum Images {
    /// Only files.
    Encoded,
    /// Only files, because the worker runs on another machine and can't read the tensors.
    OtherMachine,
    /// Tensors in shared memory, and the files in case that the worker can't use the tensors.
    Tensors(ReadyTensors),
}

impl DynamoBackend {
    /// Creates the backend of a worker with these capabilities and starts to watch the worker.
    pub(crate) fn new(
        name: String,
        worker: Arc<Worker>,
        listener: ResponseListener,
        capabilities: Capabilities,
        images: Images,
        observer: Arc<dyn MediaObserver>,
    ) -> Self {
        let wire = Wire::new(&worker.endpoint.address, listener.clone());
        let shared = Arc::new(Shared::new(name, worker.clone(), wire, observer));
        let (kv, sink) = oneshot::channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(shared.clone().watch());
        if let Events::At(source) = &worker.events {
            let wire = Wire::new(&source.query.address, listener);
            let blocks =
                Blocks::new(source.worker_id, source.dp_rank, worker.block_size.get() as u32);
            // The workers' hashes of images are unknown, so blocks with images are unknown.
            let knows_all = capabilities.media == MediaForm::None;
            tasks.spawn(
                Follower::new(shared.clone(), source.clone(), wire, blocks, knows_all).follow(sink),
            );
        }
        Self { shared, capabilities, images, kv: Mutex::new(Some(kv)), _tasks: tasks }
    }

    /// Returns a future that completes once the worker is gone.
    pub(crate) fn when_ended(&self) -> BoxFuture<'static, DeathReason> {
        self.shared.when_ended()
    }

    async fn begin(&self, job: Arc<Job>) -> Result<RunningDynamoJob, JobError> {
        let shared = &self.shared;
        if let Some(death) = shared.ended.borrow().clone() {
            return Err(JobError::NotTaken(death));
        }
        let Worker { endpoint, model, .. } = &*shared.worker;
        let takes_images = self.capabilities.media != MediaForm::None;
        // Checked first, so that no tensors are made for a refused job.
        request::supported_tokens(&job, takes_images)?;
        let packed = match &self.images {
            Images::Encoded => None,
            Images::OtherMachine => {
                job.media.iter().for_each(|_| {
                    shared
                        .observer
                        .stepped_down("other_machine", &"the worker runs on another machine")
                });
                None
            }
            Images::Tensors(tensors) => tensors.pack(&job, &shared.observer).await?,
        };
        let bodies = request::build(&job, model, takes_images, packed.as_ref())?;
        let counted = InFlight::new(shared.clone());
        // A worker distinguishes requests only by their ids. A client's id may be shared: with
        // another client's request, or with the other prompts of one list.
        let nonce: u64 = rand::random();
        let send = |(choice, body): (usize, Vec<u8>)| {
            let id = format!("{}-{nonce:016x}-{choice}", job.id);
            async move { shared.wire.send(&endpoint.path, &id, &body).await }
        };
        // All acknowledgements are awaited: the worker may have begun with any accepted request.
        let sent = join_all(bodies.into_iter().enumerate().map(send)).await;
        let may_have_begun =
            sent.iter().any(|sent| sent.as_ref().err().is_none_or(|error| !error.is_unbegun()));
        // Accepted requests are aborted when their answers are dropped.
        let answers = sent.into_iter().collect::<Result<Vec<_>, _>>().map_err(|error| {
            let death = DeathReason::new(error.to_string());
            if matches!(&error, RequestError::Refused(why) if why.contains(UNKNOWN_ENDPOINT)) {
                shared.end(death.clone());
            }
            if may_have_begun { JobError::Dead(death) } else { JobError::NotTaken(death) }
        })?;
        let items = job.media.len();
        let delivered = match packed {
            Some(_) => MediaDelivery { shared_memory: items, ..MediaDelivery::default() },
            None => MediaDelivery { inline: items, ..MediaDelivery::default() },
        };
        if delivered != MediaDelivery::default() {
            shared.observer.delivered(delivered);
        }
        Ok(RunningDynamoJob::new(shared.clone(), job, answers, counted, delivered, packed))
    }
}

impl fmt::Debug for DynamoBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoBackend").field("worker", &self.shared.name).finish_non_exhaustive()
    }
}

impl Backend for DynamoBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        async move { Ok(Box::new(self.begin(job).await?) as Box<dyn RunningJob>) }.boxed()
    }

    fn load_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>> {
        async { Err(AdapterError::NotEnabled) }.boxed()
    }

    fn unload_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    fn holds(&self, _: &MmHash) -> bool {
        false
    }

    fn follow_load(&self, sink: LoadSink) {
        *self.shared.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    }

    fn follow_kv(&self, sink: Box<dyn KvSink>) {
        if let Some(kv) = self.kv.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // A worker without events has no task that receives the sink.
            let _ = kv.send(sink);
        }
    }

    fn distrusted(&self) -> BoxFuture<'_, String> {
        let mut distrusted = self.shared.distrusted.subscribe();
        async move {
            match distrusted.wait_for(Option::is_some).await.ok().and_then(|why| why.clone()) {
                Some(why) => why,
                None => std::future::pending().await,
            }
        }
        .boxed()
    }

    fn ended(&self) -> BoxFuture<'_, DeathReason> {
        self.shared.when_ended()
    }

    fn silent_for(&self) -> Duration {
        Duration::from_millis(self.shared.silent_ms.load(Relaxed))
    }

    fn declare_dead(&self, death: DeathReason) {
        self.shared.end(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        None
    }
}
