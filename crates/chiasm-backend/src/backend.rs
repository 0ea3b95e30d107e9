use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use chiasm_types::MmHash;
use futures_util::future::BoxFuture;

use crate::{
    Adapter, AdapterError, Capabilities, Death, Delivered, Embeddings, Forward, Forwarded, Job,
    JobError, KvSinkError, Left, MediaLoad, Output,
};

/// Whatever executes prepared requests: one connection to one start of one engine, or of something
/// like it.
///
/// A backend belongs to one life of what is behind it. When that is gone, every running job ends
/// with [`JobError::Dead`] and every later [`start`](Self::start) with [`JobError::NotTaken`]; its
/// worker's [`Connector`](crate::Connector) makes the next one.
pub trait Backend: Send + Sync + fmt::Debug + 'static {
    /// What this worker can do. Does not change during the backend's life.
    fn capabilities(&self) -> &Capabilities;

    /// Hands a job over, with the media items that the backend lacks, which it asks the items'
    /// sources for. Returns once the job is on its way, long before its first output. A backend
    /// elsewhere returns before that, and asks for items while the running job is polled.
    ///
    /// A backend that turns out not to hold an item after all mends that by itself, as long as the
    /// continuation has had no output. Dropping the future, or the running job, aborts what was
    /// started.
    ///
    /// # Errors
    /// [`JobError::NotTaken`], [`JobError::Overloaded`], [`JobError::KeyRefused`] and
    /// [`JobError::UnknownModel`] from a backend that did not begin, [`JobError::Dead`] and
    /// [`JobError::ServerFailed`] from one that may have: another one should be tried. Everything
    /// else is final for this job.
    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>>;

    /// Passes a request on as it came. Returns with the head of the answer.
    ///
    /// # Errors
    /// Those of [`start`](Self::start); [`JobError::NotTaken`] also from a worker that takes no
    /// messages. A 4xx that is the request's own fault is an answer, and passed on.
    fn forward(&self, _request: Forward) -> BoxFuture<'_, Result<Forwarded, JobError>> {
        Box::pin(async { Err(JobError::NotTaken(Death::new("it takes no requests as they come"))) })
    }

    /// Loads an adapter, so that jobs may name it. One that is loaded already is left as it is.
    ///
    /// # Errors
    /// [`AdapterError`] says why not. The backend goes on without the adapter, and must not be
    /// given a job that names it: an engine would die of what it now refuses.
    fn load_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>>;

    /// Forgets an adapter that no job will name any more, as far as the backend can.
    fn unload_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, ()>;

    /// Whether the backend would need no bytes of this media item now.
    fn holds(&self, item: &MmHash) -> bool;

    /// Reports the backend's load to `sink` from now on, each time it changes and from whichever
    /// thread learns of it. A second call replaces the first sink. The sink must be quick and must
    /// not call the backend.
    fn follow_load(&self, sink: LoadSink);

    /// Tells `sink` from now on what the KV cache holds, if
    /// [`KvSource::Backend`](crate::KvSource::Backend) is its source. Called once at most.
    fn follow_kv(&self, _sink: Box<dyn KvSink>) {}

    /// Returns once it has turned out that what is known of its KV cache can't be exact, and why.
    /// It is taken to hold what it was sent from then on, too.
    fn distrusted(&self) -> BoxFuture<'_, String> {
        Box::pin(std::future::pending())
    }

    /// Takes note that what is known of its KV cache can't be exact, for instance as a request that
    /// it was passed as it came has become another prompt than was expected. Then
    /// [`distrusted`](Self::distrusted) returns, with the first reason.
    fn distrust(&self, _why: String) {}

    /// Returns once the backend is gone, and how it went.
    fn ended(&self) -> BoxFuture<'_, Death>;

    /// How long the backend has said nothing although it was asked for a sign of life; zero while
    /// it answers, and for one that is never asked. A backend that is merely busy may be silent for
    /// as long as its longest step takes.
    fn silent_for(&self) -> Duration;

    /// Declares the backend gone, for instance because its process was seen to end before its
    /// connection was. Running jobs end with this cause unless another one is known already.
    fn declare_dead(&self, death: Death);

    /// The shared memory that tensors are handed over in; `None` if there is none.
    fn memory(&self) -> Option<MemoryUsage>;
}

/// The answer to one job, as it comes. Dropping it aborts the continuations that have not ended.
pub trait RunningJob: Send {
    /// The next output of any continuation; `None` when all have ended or were stopped. After an
    /// error there is nothing more. Before the first output that may be one of
    /// [`Backend::start`]'s: a backend elsewhere need not have been heard by then.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>>;

    /// Ends one continuation early. Outputs that the backend had read by then may still come.
    fn stop(&mut self, choice: usize);

    /// How the job's media items reached the backend, over all continuations. May change until the
    /// first output, as items that the backend turned out to lack are sent again.
    fn delivered(&self) -> Delivered;

    /// How long the backend took to take the job, with the media items that it lacked, if
    /// [`Backend::start`] did not wait for that. May change until the first output.
    fn hand_off(&self) -> Duration {
        Duration::ZERO
    }

    /// What a job of [`Stage::Prefill`](crate::Stage::Prefill) has left for another backend, once
    /// it has ended; `None` if it left nothing.
    fn left(&mut self) -> Option<Left> {
        None
    }

    /// What a job of [`Stage::Encode`](crate::Stage::Encode) has left for other backends, once it
    /// has ended.
    fn embeddings(&mut self) -> Vec<Embeddings> {
        Vec::new()
    }
}

impl dyn RunningJob {
    /// Waits for [`poll_next`](RunningJob::poll_next). Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Output, JobError>> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }
}

/// Takes what a backend says of its KV cache, in the order in which it came about. Some calls take
/// as long as reading all of a cache, so none is made on an async thread.
pub trait KvSink: Send {
    /// All that the cache holds, as `chiasm-kv` writes snapshots; `history_known` says whether
    /// events told of all of that.
    ///
    /// # Errors
    /// [`KvSinkError::Snapshot`].
    fn snapshot(&mut self, snapshot: &[u8], history_known: bool) -> Result<(), KvSinkError>;

    /// The engine's next batch of events, as it published it.
    ///
    /// # Errors
    /// [`KvSinkError::Batch`].
    fn batch(&mut self, payload: &[u8], history_known: bool) -> Result<(), KvSinkError>;

    /// What was told is void: the cache is taken to be empty.
    fn reset(&mut self);

    /// Whether everything that there is to be told has been told.
    fn set_caught_up(&mut self, caught_up: bool);

    /// What other frontends have the engine do.
    fn others(&mut self, event: OthersEvent);
}

/// Something that jobs of other frontends come to. Numbers name them among those of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OthersEvent {
    /// The engine was given a job.
    Begun(u64, OthersJob),
    /// The engine has computed its prompt.
    Computed(u64),
    /// The job is over, or lost.
    Ended(u64),
    /// None is known any more; those that there are will be told of again.
    Forget,
}

/// What a router has to know of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OthersJob {
    /// Keys of the prompt's full blocks, as `chiasm-kv` numbers them; none if nothing that is held
    /// is of use to it.
    pub keys: Vec<u128>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Its media items.
    pub media: Vec<OthersItem>,
}

/// A media item of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OthersItem {
    /// Its identity.
    pub hash: MmHash,
    /// Index of the prompt token after its placeholder.
    pub end: usize,
    /// Embeddings that the encoder makes of it, in tokens.
    pub embeds: usize,
    /// Elements of its tensors.
    pub elements: u64,
}

/// Takes what a backend says about its load.
pub type LoadSink = Box<dyn Fn(Load) + Send + Sync>;

/// What a backend last said about itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests in the running batch.
    pub running: u64,
    /// Requests that wait to be run.
    pub waiting: u64,
    /// Part of the KV cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Prompt tokens that the backend has to compute for requests of other frontends before those
    /// have their first tokens; 0 where this frontend is the only one.
    pub pending_tokens_of_others: u64,
    /// The backend finishes what it has and should get nothing new.
    pub draining: bool,
    /// What its machine has to do with media items; `None` where that is this one, or is not told.
    pub media: Option<MediaLoad>,
}

/// Shared memory of one backend, in bytes and pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Bytes that were taken from the system.
    pub reserved: u64,
    /// Bytes that tensors take.
    pub used: u64,
    /// Tensors.
    pub slots: usize,
    /// Tensors that the backend has not given back.
    pub leases: usize,
}
