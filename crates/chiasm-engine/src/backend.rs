//! An engine as a [`Backend`]: jobs are sent as requests on EngineCore's wire.

mod adapters;
mod arena_policy;
mod capabilities;
mod connector;
mod embedding_store;
mod engine_record;
mod format_policy;
mod group_host;
mod host;
mod kv_connector;
mod launch_host;
mod media;
mod request;
mod running;
mod stage;

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, DeathReason, Input, Job, JobError, Load,
    LoadSink, MediaObserver, MemoryUsage, Network, RunningJob, SourceError, TensorFormat,
};
use chiasm_transfer::Arena;
use chiasm_types::{Dtype, MmHash};
use futures_util::future::{BoxFuture, FutureExt};

pub use self::arena_policy::{ArenaPolicy, ShmTooSmall};
pub use self::connector::{EngineConnector, EngineOptions};
pub use self::embedding_store::{EcConnector, EmbeddingStore};
pub use self::format_policy::FormatPolicy;
pub use self::group_host::GroupHost;
pub use self::host::{AttachHost, EngineHost, RecordName, RunningEngine};
pub use self::kv_connector::KvConnector;
pub use self::launch_host::LaunchHost;
pub use self::media::to_item;

use crate::EngineClient;
use crate::error::{DeathCause, EngineError};
use crate::launch::LastLines;

/// One start of an engine, as a backend.
///
/// Media items that the engine does not hold are sent with the request. If the engine lacks more
/// than its mirror predicts, the continuation is sent again with the data, invisibly to the caller.
#[derive(Debug)]
pub(crate) struct EngineBackend {
    engine: Arc<Engine>,
    capabilities: Capabilities,
}

/// The state that a backend and its running jobs share.
struct Engine {
    client: EngineClient,
    format: TensorFormat,
    /// The element type of the model, if tensors can have it.
    model_dtype: Option<Dtype>,
    private_network: Option<Network>,
    /// `true` if the engine steps together with others.
    is_in_group: bool,
    /// `true` if the engine should have an arena, even if it has none.
    wants_arena: bool,
    observer: Arc<dyn MediaObserver>,
    /// The store through which engines of one machine share embeddings, if any.
    embeddings: Option<Arc<EmbeddingStore>>,
    /// The last lines of the engine's log, if this process reads it.
    log: Option<LastLines>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("client", &self.client)
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}

impl Backend for EngineBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        async move {
            let Input::Tokens(prompt) = &job.input else {
                let message = "must be token ids: the engine takes nothing else".to_owned();
                return Err(JobError::Refused { field: "input".to_owned(), message });
            };
            let prompt = prompt.clone();
            let running =
                running::RunningEngineJob::start(self.engine.clone(), job, prompt).await?;
            Ok(Box::new(running) as Box<dyn RunningJob>)
        }
        .boxed()
    }

    fn load_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>> {
        adapters::load(&self.engine.client, adapter).boxed()
    }

    fn unload_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, ()> {
        adapters::unload(&self.engine.client, adapter).boxed()
    }

    fn holds(&self, item: &MmHash) -> bool {
        self.engine.client.holds(&item.to_string())
    }

    fn follow_load(&self, sink: LoadSink) {
        self.engine.client.follow_stats(move |stats| {
            sink(Load {
                running: stats.num_running_reqs,
                waiting: stats.num_waiting_reqs,
                kv_usage: stats.kv_cache_usage,
                // An EngineCore has one frontend, and does not announce that it shuts down.
                pending_tokens_of_others: 0,
                draining: false,
                media: None,
            });
        });
    }

    fn ended(&self) -> BoxFuture<'_, DeathReason> {
        async { self.engine.client.closed().await.into() }.boxed()
    }

    fn silent_for(&self) -> Duration {
        self.engine.client.silent_for()
    }

    fn declare_dead(&self, death: DeathReason) {
        self.engine.client.mark_dead(DeathCause::Exited(death.to_string()));
    }

    fn memory(&self) -> Option<MemoryUsage> {
        let usage = self.engine.client.arena().map(Arena::usage)?;
        Some(MemoryUsage {
            reserved: usage.reserved,
            used: usage.used,
            slots: usage.slots,
            leases: usage.leases,
        })
    }
}

impl From<DeathCause> for DeathReason {
    fn from(cause: DeathCause) -> Self {
        match cause {
            // The text is already the report of the process's owner.
            DeathCause::Exited(report) => Self::new(report),
            cause => Self::new(cause.to_string()),
        }
    }
}

impl From<EngineError> for JobError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::InvalidRequest { field, message } => Self::Refused { field, message },
            EngineError::NotSent { cause } => Self::NotTaken(cause.into()),
            EngineError::Dead { cause } => Self::Dead(cause.into()),
            EngineError::Ended => Self::Unfinished,
            EngineError::Unread => Self::Unread,
            // Submitting a request and reading its stream have no other errors.
            error => Self::Source(SourceError::new(error)),
        }
    }
}
