use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use chiasm_types::MmHash;
use futures_util::future::BoxFuture;

use crate::{
    Adapter, AdapterError, Capabilities, DeathReason, ForwardRequest, ForwardResponse, Job,
    JobError, KvSinkError, KvTransferParams, MediaDelivery, MediaLoad, Output, StoredEmbeddings,
};

/// An executor of prepared requests: one connection to one start of an engine or a server.
///
/// A backend does not outlive that start. When the engine is gone, every running job ends with
/// [`JobError::Dead`] and every later [`start`](Self::start) with [`JobError::NotTaken`]. The
/// worker's [`Connector`](crate::Connector) makes the next backend.
pub trait Backend: Send + Sync + fmt::Debug + 'static {
    /// Returns the worker's capabilities, which never change.
    fn capabilities(&self) -> &Capabilities;

    /// Hands a job over, with the media items that the backend lacks, which it requests from their
    /// sources. Returns once the job has been sent, long before its first output. A remote backend
    /// returns earlier and requests items while the running job is polled.
    ///
    /// A backend that turns out to lack an item which it should hold requests the item again by
    /// itself, as long as the continuation has no output. Dropping the future or the running job
    /// aborts the job.
    ///
    /// # Errors
    /// [`JobError::NotTaken`], [`JobError::Overloaded`], [`JobError::KeyRefused`] and
    /// [`JobError::UnknownModel`] if the backend did not start the job, [`JobError::Dead`] and
    /// [`JobError::ServerFailed`] if it may have started it: another backend should be tried. All
    /// other errors are final for this job.
    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>>;

    /// Passes a request on unchanged. Returns once the head of the response has arrived.
    ///
    /// # Errors
    /// The errors of [`start`](Self::start), and [`JobError::NotTaken`] from a worker that takes no
    /// messages. A 4xx response is returned as a response, so that the client gets it, if the
    /// request is at fault.
    fn forward(
        &self,
        _request: ForwardRequest,
    ) -> BoxFuture<'_, Result<ForwardResponse, JobError>> {
        Box::pin(async {
            Err(JobError::NotTaken(DeathReason::new("it accepts no forwarded requests")))
        })
    }

    /// Loads an adapter, so that jobs may name it. Does nothing if it is already loaded.
    ///
    /// # Errors
    /// [`AdapterError`] if the adapter can't be loaded. The backend keeps running without it and
    /// must not get a job that names it: an engine would die of such a job.
    fn load_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>>;

    /// Unloads an adapter that no further job will name, as far as the backend supports that.
    fn unload_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, ()>;

    /// Returns `true` if the backend holds this media item and needs no bytes of it at present.
    fn holds(&self, item: &MmHash) -> bool;

    /// Reports the backend's load to `sink` from now on, at every change and from any thread. A
    /// second call replaces the sink. The sink must return quickly and must not call the backend.
    fn follow_load(&self, sink: LoadSink);

    /// Reports the contents of the KV cache to `sink` from now on, if the worker's source is
    /// [`KvSource::Backend`](crate::KvSource::Backend). Called at most once.
    fn follow_kv(&self, _sink: Box<dyn KvSink>) {}

    /// Waits until the knowledge of the KV cache turns out to be inexact, and returns the reason.
    /// From then on, the router also assumes that the worker holds the prompts that it was sent.
    fn distrusted(&self) -> BoxFuture<'_, String> {
        Box::pin(std::future::pending())
    }

    /// Marks the knowledge of the KV cache as inexact, for instance because a forwarded request has
    /// become another prompt than predicted. [`distrusted`](Self::distrusted) then returns the
    /// first reason.
    fn distrust(&self, _reason: String) {}

    /// Waits until the backend is dead, and returns the reason.
    fn ended(&self) -> BoxFuture<'_, DeathReason>;

    /// Returns the time for which the backend has not responded to a liveness probe; zero while it
    /// responds, and for backends that are never probed. A busy backend may be silent for as long
    /// as its longest step takes.
    fn silent_for(&self) -> Duration;

    /// Declares the backend dead, for instance because its process has ended but its connection has
    /// not. Running jobs end with this reason. Does nothing if the backend is already dead.
    fn declare_dead(&self, reason: DeathReason);

    /// Returns the usage of the shared memory for tensors; `None` if there is no such memory.
    fn memory(&self) -> Option<MemoryUsage>;
}

/// The streamed answer to a job. Dropping it aborts the continuations that have not ended.
pub trait RunningJob: Send {
    /// Polls for the next output of any continuation; `None` once all have ended or were stopped.
    ///
    /// Nothing follows an error. Before the first output, the error may be one of
    /// [`Backend::start`]: a remote backend may not have responded before `start` returned.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>>;

    /// Ends a continuation early. Outputs that have already been received may still follow.
    fn stop(&mut self, choice: usize);

    /// Returns how the job's media items reached the backend, over all continuations. May change
    /// until the first output, because items that the backend turns out to lack are sent again.
    fn delivered(&self) -> MediaDelivery;

    /// Returns the time that the hand-over of the job and its missing media items took, if
    /// [`Backend::start`] did not wait for that. May change until the first output.
    fn hand_off(&self) -> Duration {
        Duration::ZERO
    }

    /// Takes the parameters with which another backend loads the prompt that this job of
    /// [`Stage::Prefill`](crate::Stage::Prefill) has computed. Available once the job has ended;
    /// `None` if it stored nothing.
    fn kv_transfer_params(&mut self) -> Option<KvTransferParams> {
        None
    }

    /// Takes the embeddings that this job of [`Stage::Encode`](crate::Stage::Encode) has stored for
    /// other backends. Available once the job has ended.
    fn stored_embeddings(&mut self) -> Vec<StoredEmbeddings> {
        Vec::new()
    }
}

impl dyn RunningJob {
    /// Waits for the next output, as [`poll_next`](RunningJob::poll_next). Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Output, JobError>> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }
}

/// A receiver of a backend's KV events, in the order in which they occurred. A call may take as
/// long as reading a whole cache, so calls are never made on async threads.
pub trait KvSink: Send {
    /// Replaces the contents of the cache with a snapshot in the format of `chiasm-kv`.
    /// `history_known` is `true` if events have reported everything in the snapshot.
    ///
    /// # Errors
    /// [`KvSinkError::Snapshot`] if the snapshot is malformed.
    fn snapshot(&mut self, snapshot: &[u8], history_known: bool) -> Result<(), KvSinkError>;

    /// Applies the engine's next batch of events, encoded as it was published.
    ///
    /// # Errors
    /// [`KvSinkError::Batch`] if the batch is malformed.
    fn batch(&mut self, payload: &[u8], history_known: bool) -> Result<(), KvSinkError>;

    /// Discards everything that was reported: the cache is assumed to be empty.
    fn reset(&mut self);

    /// Sets whether all events so far have been reported.
    fn set_caught_up(&mut self, caught_up: bool);

    /// Reports a change of another frontend's job on the engine.
    fn foreign_job(&mut self, event: ForeignJobEvent);
}

/// A change of another frontend's job. Jobs are numbered per engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForeignJobEvent {
    /// The engine has received a job.
    Started(u64, ForeignJob),
    /// The engine has computed the job's prompt.
    PromptComputed(u64),
    /// The job has ended or is lost.
    Ended(u64),
    /// The known jobs are discarded. Jobs that still exist are reported again.
    Reset,
}

/// The data of another frontend's job that the router needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForeignJob {
    /// The keys of the prompt's full blocks, as in `chiasm-kv`. Empty if cached blocks are of no
    /// use to the job.
    pub keys: Vec<u128>,
    /// The number of prompt tokens.
    pub prompt_tokens: usize,
    /// The media items.
    pub media: Vec<ForeignMediaItem>,
}

/// A media item of another frontend's job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignMediaItem {
    /// The identity.
    pub hash: MmHash,
    /// The index of the prompt token after the item's placeholder.
    pub end: usize,
    /// The number of embeddings that the encoder makes of the item, in tokens.
    pub embeds: usize,
    /// The number of elements in the item's tensors.
    pub elements: u64,
}

/// A receiver of a backend's load.
pub type LoadSink = Box<dyn Fn(Load) + Send + Sync>;

/// The load that a backend last reported.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// The number of requests in the running batch.
    pub running: u64,
    /// The number of queued requests.
    pub waiting: u64,
    /// The fraction of the KV cache that is in use, 0 to 1.
    pub kv_usage: f64,
    /// The number of prompt tokens that the backend has to compute before every waiting request of
    /// other frontends has its first token; 0 if this frontend is the only one.
    pub pending_tokens_of_others: u64,
    /// `true` if the backend drains: it finishes its jobs and should get no new ones.
    pub draining: bool,
    /// The media work on the backend's machine; `None` if that is this machine, or if it is not
    /// reported.
    pub media: Option<MediaLoad>,
}

/// The usage of a backend's shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// The number of bytes that were taken from the system.
    pub reserved: u64,
    /// The number of bytes that tensors use.
    pub used: u64,
    /// The number of tensors.
    pub slots: usize,
    /// The number of leases that the backend has not returned.
    pub leases: usize,
}
