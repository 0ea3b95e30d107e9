//! Engines that are handed nothing: their jobs are kept.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, ConnectError, Connected, Connector, Content,
    Death, Delivered, Finish, Job, JobError, KvSource, LoadSink, MediaObserver, MemoryUsage,
    Output, RunningJob,
};
use chiasm_engine::EngineConnector;
use chiasm_types::{MmHash, TokenId, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, ready};

/// The engines of all workers, and the jobs that none of them got.
#[derive(Default)]
pub(crate) struct Kept {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    jobs: Vec<Arc<Job>>,
    backends: Vec<(WorkerId, Arc<dyn Backend>)>,
}

impl Kept {
    /// The jobs since the last call, in the order in which they came.
    pub(crate) fn take(&self) -> Vec<Arc<Job>> {
        std::mem::take(&mut self.state().jobs)
    }

    /// The engines, in the order of their workers.
    pub(crate) fn backends(&self) -> Vec<Arc<dyn Backend>> {
        let mut backends = self.state().backends.clone();
        backends.sort_by_key(|(worker, _)| worker.0);
        backends.into_iter().map(|(_, backend)| backend).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connects to a worker's engine, for those who replay; the frontend gets one that keeps its jobs.
pub(crate) struct Keeper {
    connector: EngineConnector,
    kept: Arc<Kept>,
}

impl Keeper {
    pub(crate) fn new(connector: EngineConnector, kept: Arc<Kept>) -> Self {
        Self { connector, kept }
    }
}

impl Connector for Keeper {
    fn connect(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let Connected { backend: engine, life } =
                self.connector.connect(worker, observer).await?;
            self.kept.state().backends.push((worker, engine.clone()));
            // Nobody is to follow what is in the engine's cache: that would take CPU time while
            // jobs are replayed.
            let kv = KvSource::Unknown { why: "jobs are kept".to_owned() };
            let capabilities = Capabilities { kv, ..engine.capabilities().clone() };
            let kept = self.kept.clone();
            Ok(Connected { backend: Arc::new(Keeping { engine, capabilities, kept }), life })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        self.connector.describe()
    }

    /// An engine that dies ends the measurement anyway.
    fn longest_pause(&self) -> Duration {
        self.connector.longest_pause()
    }
}

struct Keeping {
    engine: Arc<dyn Backend>,
    capabilities: Capabilities,
    kept: Arc<Kept>,
}

impl fmt::Debug for Keeping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeping").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Backend for Keeping {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        self.kept.state().jobs.push(job);
        ready(Ok(Box::new(OneToken { is_told: false }) as Box<dyn RunningJob>)).boxed()
    }

    fn load_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>> {
        self.engine.load_adapter(adapter)
    }

    fn unload_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, ()> {
        self.engine.unload_adapter(adapter)
    }

    fn holds(&self, item: &MmHash) -> bool {
        self.engine.holds(item)
    }

    fn follow_load(&self, sink: LoadSink) {
        self.engine.follow_load(sink);
    }

    fn ended(&self) -> BoxFuture<'_, Death> {
        self.engine.ended()
    }

    fn silent_for(&self) -> Duration {
        self.engine.silent_for()
    }

    fn declare_dead(&self, death: Death) {
        self.engine.declare_dead(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        self.engine.memory()
    }
}

/// The answer to a job that no engine gets.
struct OneToken {
    is_told: bool,
}

impl RunningJob for OneToken {
    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        let output = (!self.is_told).then(|| Output {
            choice: 0,
            content: Content::Tokens { tokens: vec![TokenId(1)], logprobs: None },
            finish: Some(Finish::Length),
            prefill: None,
            prompt_logprobs: None,
        });
        self.is_told = true;
        Poll::Ready(output.map(Ok))
    }

    fn stop(&mut self, _: usize) {}

    fn delivered(&self) -> Delivered {
        Delivered::default()
    }
}
