//! Backends that record jobs instead of running them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, ConnectError, Connected, Connector, Content,
    DeathReason, Finish, Job, JobError, KvSource, LoadSink, MediaDelivery, MediaObserver,
    MemoryUsage, Output, RunningJob,
};
use chiasm_engine::EngineConnector;
use chiasm_types::{MmHash, TokenId, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, ready};

/// The engines of all workers, and the recorded jobs.
#[derive(Default)]
pub(crate) struct Recorder {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    jobs: Vec<Arc<Job>>,
    backends: Vec<(WorkerId, Arc<dyn Backend>)>,
}

impl Recorder {
    /// Takes the jobs recorded since the last call, in order of arrival.
    pub(crate) fn take_jobs(&self) -> Vec<Arc<Job>> {
        std::mem::take(&mut self.state().jobs)
    }

    /// Returns the engines, ordered by worker.
    pub(crate) fn backends(&self) -> Vec<Arc<dyn Backend>> {
        let mut backends = self.state().backends.clone();
        backends.sort_by_key(|(worker, _)| worker.0);
        backends.into_iter().map(|(_, backend)| backend).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connector that keeps a worker's engine for the replay, and gives the frontend a backend that
/// records jobs.
pub(crate) struct RecordingConnector {
    connector: EngineConnector,
    recorder: Arc<Recorder>,
}

impl RecordingConnector {
    pub(crate) fn new(connector: EngineConnector, recorder: Arc<Recorder>) -> Self {
        Self { connector, recorder }
    }
}

impl Connector for RecordingConnector {
    fn connect(
        &self,
        worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let Connected { backend: engine, lifecycle } =
                self.connector.connect(worker, observer).await?;
            self.recorder.state().backends.push((worker, engine.clone()));
            // The frontend must not follow KV events, which would take CPU time during the replay.
            let kv = KvSource::Unknown { why: "jobs are recorded".to_owned() };
            let capabilities = Capabilities { kv, ..engine.capabilities().clone() };
            let recorder = self.recorder.clone();
            let backend = Arc::new(RecordingBackend { engine, capabilities, recorder });
            Ok(Connected { backend, lifecycle })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        self.connector.describe()
    }

    /// Not used: an engine that dies ends the measurement.
    fn max_retry_pause(&self) -> Duration {
        self.connector.max_retry_pause()
    }
}

struct RecordingBackend {
    engine: Arc<dyn Backend>,
    capabilities: Capabilities,
    recorder: Arc<Recorder>,
}

impl fmt::Debug for RecordingBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordingBackend").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl Backend for RecordingBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        self.recorder.state().jobs.push(job);
        ready(Ok(Box::new(OneTokenJob { is_done: false }) as Box<dyn RunningJob>)).boxed()
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

    fn ended(&self) -> BoxFuture<'_, DeathReason> {
        self.engine.ended()
    }

    fn silent_for(&self) -> Duration {
        self.engine.silent_for()
    }

    fn declare_dead(&self, death: DeathReason) {
        self.engine.declare_dead(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        self.engine.memory()
    }
}

/// A job whose answer is one token.
struct OneTokenJob {
    is_done: bool,
}

impl RunningJob for OneTokenJob {
    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        let output = (!self.is_done).then(|| Output {
            choice: 0,
            content: Content::Tokens { tokens: vec![TokenId(1)], logprobs: None },
            finish: Some(Finish::Length),
            prefill: None,
            prompt_logprobs: None,
        });
        self.is_done = true;
        Poll::Ready(output.map(Ok))
    }

    fn stop(&mut self, _: usize) {}

    fn delivered(&self) -> MediaDelivery {
        MediaDelivery::default()
    }
}
