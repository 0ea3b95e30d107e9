//! One start of a worker as a backend.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, Death, Delivered, Job, JobError, KvSink,
    LoadSink, MediaForm, MediaObserver, MemoryUsage, RunningJob,
};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt, join_all};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::blocks::Blocks;
use crate::call_home::CallHome;
use crate::directory::{Events, Worker};
use crate::following::Follower;
use crate::request;
use crate::running::RunningDynamoJob;
use crate::shared::{InFlight, Shared};
use crate::tensors::ReadyTensors;
use crate::wire::{AskError, Wire};

/// The answer of another process at a worker's address, and of a worker that is going down.
const NOT_THERE: &str = "unknown endpoint";

/// One start of a worker.
pub(crate) struct DynamoBackend {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    images: Images,
    /// Takes whoever is to be told of the KV cache, once.
    kv: Mutex<Option<oneshot::Sender<Box<dyn KvSink>>>>,
    /// The tasks that watch the worker. They end with the backend.
    _tasks: JoinSet<()>,
}

/// In which form a worker is given images, if it takes any.
pub(crate) enum Images {
    /// The files alone.
    AsTheyCame,
    /// The files alone, as it is on another machine than the tensors would be on.
    OfAnotherMachine,
    /// Tensors in shared memory, and the files in case that it can't use those.
    Tensors(ReadyTensors),
}

impl DynamoBackend {
    /// The backend of a worker that was found to be like this.
    pub(crate) fn new(
        name: String,
        worker: Arc<Worker>,
        home: CallHome,
        capabilities: Capabilities,
        images: Images,
        observer: Arc<dyn MediaObserver>,
    ) -> Self {
        let wire = Wire::new(&worker.place.address, home.clone());
        let shared = Arc::new(Shared::new(name, worker.clone(), wire, observer));
        let (kv, sink) = oneshot::channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(shared.clone().watch());
        if let Events::At(source) = &worker.events {
            let wire = Wire::new(&source.query.address, home);
            let blocks =
                Blocks::new(source.worker_id, source.dp_rank, worker.block_size.get() as u32);
            // What its hashes of images are made of is not known here.
            let knows_all = capabilities.media == MediaForm::None;
            tasks.spawn(
                Follower::new(shared.clone(), source.clone(), wire, blocks, knows_all).follow(sink),
            );
        }
        Self { shared, capabilities, images, kv: Mutex::new(Some(kv)), _tasks: tasks }
    }

    /// Returns once the worker is gone.
    pub(crate) fn when_ended(&self) -> BoxFuture<'static, Death> {
        self.shared.when_ended()
    }

    async fn begin(&self, job: Arc<Job>) -> Result<RunningDynamoJob, JobError> {
        let shared = &self.shared;
        if let Some(death) = shared.ended.borrow().clone() {
            return Err(JobError::NotTaken(death));
        }
        let Worker { place, model, .. } = &*shared.worker;
        let takes_images = self.capabilities.media != MediaForm::None;
        // Nothing is made for what is refused.
        request::taken(&job, takes_images)?;
        let packed = match &self.images {
            Images::AsTheyCame => None,
            Images::OfAnotherMachine => {
                job.media.iter().for_each(|_| {
                    shared.observer.stepped_down("other_machine", &"its worker runs elsewhere")
                });
                None
            }
            Images::Tensors(tensors) => tensors.pack(&job, &shared.observer).await?,
        };
        let bodies = request::of(&job, model, takes_images, packed.as_ref())?;
        let counted = InFlight::new(shared.clone());
        // A worker tells requests apart by their ids alone. A client's id may be shared: with
        // another client's request, or with the other prompts of one list.
        let mark: u64 = rand::random();
        let ask = |(choice, body): (usize, Vec<u8>)| {
            let id = format!("{}-{mark:016x}-{choice}", job.id);
            async move { shared.wire.ask(&place.path, &id, &body).await }
        };
        // All answers are awaited: the worker may have begun with any request that it took.
        let asked = join_all(bodies.into_iter().enumerate().map(ask)).await;
        let may_have_begun =
            asked.iter().any(|asked| asked.as_ref().err().is_none_or(|error| !error.is_unbegun()));
        // Requests that were taken are aborted when their answers are dropped.
        let answers = asked.into_iter().collect::<Result<Vec<_>, _>>().map_err(|error| {
            let death = Death::new(error.to_string());
            if matches!(&error, AskError::Refused(words) if words.contains(NOT_THERE)) {
                shared.end(death.clone());
            }
            if may_have_begun { JobError::Dead(death) } else { JobError::NotTaken(death) }
        })?;
        let items = job.media.len();
        let delivered = match packed {
            Some(_) => Delivered { shared_memory: items, ..Delivered::default() },
            None => Delivered { inline: items, ..Delivered::default() },
        };
        if delivered != Delivered::default() {
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
            // Nobody takes it where there are no events.
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

    fn ended(&self) -> BoxFuture<'_, Death> {
        self.shared.when_ended()
    }

    fn silent_for(&self) -> Duration {
        Duration::from_millis(self.shared.silent_ms.load(Relaxed))
    }

    fn declare_dead(&self, death: Death) {
        self.shared.end(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        None
    }
}
