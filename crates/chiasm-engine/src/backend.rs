//! An engine as a [`Backend`]: jobs become requests on EngineCore's wire.

mod adapters;
mod arena_policy;
mod capabilities;
mod connector;
mod embedding_store;
mod format_policy;
mod host;
mod kv_connector;
mod launch_host;
mod media;
mod memory;
mod request;
mod running;
mod stage;

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, Death, Input, Job, JobError, Load, LoadSink,
    MediaObserver, MemoryUsage, Network, RunningJob, SourceError, TensorFormat,
};
use chiasm_transfer::Arena;
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};

pub use self::arena_policy::{ArenaPolicy, ShmTooSmall};
pub use self::connector::{EngineConnector, EngineOptions};
pub use self::embedding_store::{EcConnector, EmbeddingStore};
pub use self::format_policy::FormatPolicy;
pub use self::host::{AttachHost, EngineHost, KeptAs, RunningEngine};
pub use self::kv_connector::KvConnector;
pub use self::launch_host::LaunchHost;
pub use self::media::to_item;

use crate::EngineClient;
use crate::error::{DeathCause, EngineError};
use crate::launch::LastLines;

/// The connection to one start of an engine, as the pipeline sees it.
///
/// What an engine lacks of a job's media is sent with the request; if it turns out to lack more
/// than its mirror says, the continuation is sent again, with all data, before anybody learns of
/// it.
#[derive(Debug)]
pub(crate) struct EngineBackend {
    engine: Arc<Engine>,
    capabilities: Capabilities,
}

/// What a backend and its running jobs share.
struct Engine {
    client: EngineClient,
    format: TensorFormat,
    private_network: Option<Network>,
    /// Shared memory was wanted for the engine, whether or not it has some.
    wants_arena: bool,
    observer: Arc<dyn MediaObserver>,
    /// Where engines of its machine leave embeddings for each other, if they do.
    embeddings: Option<Arc<EmbeddingStore>>,
    /// The end of the engine's log, if this process reads it.
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
                // An EngineCore has one frontend, and no way to say that it is going to end.
                pending_tokens_of_others: 0,
                draining: false,
                media: None,
            });
        });
    }

    fn ended(&self) -> BoxFuture<'_, Death> {
        async { self.engine.client.closed().await.into() }.boxed()
    }

    fn silent_for(&self) -> Duration {
        self.engine.client.silent_for()
    }

    fn declare_dead(&self, death: Death) {
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

impl From<DeathCause> for Death {
    fn from(cause: DeathCause) -> Self {
        match cause {
            // Its words are those of whoever watched the process, and were given to us by them.
            DeathCause::Exited(how) => Self::new(how),
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
            // Nothing else comes of sending a request or reading its stream.
            error => Self::Source(SourceError::new(error)),
        }
    }
}
