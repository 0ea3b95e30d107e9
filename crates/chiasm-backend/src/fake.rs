//! A backend that follows a script, for unit tests of code that gives jobs to backends.
//!
//! ```
//! use std::sync::Arc;
//!
//! use chiasm_backend::fake::{FakeBackend, Script};
//! use chiasm_backend::{Backend, Finish};
//!
//! let backend = FakeBackend::new();
//! backend.next_job(Script::tokens(&[5, 6]).finish(Finish::Eos));
//! assert_eq!(backend.capabilities().max_model_len, 4096);
//! ```

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use chiasm_types::{BlockSize, Dtype, MmHash, Role, TokenId, WorkerId};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::{
    Activity, Adapter, AdapterError, Backend, BackendLifecycle, Capabilities, ConnectError,
    Connected, Connector, Content, DeathReason, Finish, HandOff, InputForm, Job, JobError,
    KeyScheme, KvSource, Load, LoadSink, Locality, MediaDelivery, MediaForm, MediaObserver,
    MemoryUsage, Output, PlaceholderForm, PlanClass, Prefill, RunningJob, Supports, TensorBytes,
    TensorFormat, TensorMemory, TensorRequest, VllmItems,
};

/// The script of one job of a fake backend.
#[derive(Debug, Default)]
pub struct Script {
    /// The pause before each output, on tokio's clock.
    pub pause: Duration,
    /// The outputs, in order.
    pub outputs: VecDeque<Output>,
    /// The error after the outputs; `None` for an orderly end.
    pub error: Option<JobError>,
    /// `true` if the job is refused immediately with `error`.
    pub refused: bool,
    /// `true` if the job never ends after its outputs.
    pub hangs: bool,
    /// `true` if outputs of a stopped continuation still arrive, like outputs that a connection had
    /// received before the stop.
    pub overtakes_stop: bool,
    /// The time of the hand-over, if the job reports it and its [`MediaDelivery`] only with the
    /// first output.
    pub late_delivery: Option<Duration>,
}

impl Script {
    /// Creates a script with one output with these tokens for the first continuation, and no end.
    pub fn tokens(tokens: &[u32]) -> Self {
        Self { hangs: true, ..Self::default() }.then(0, tokens)
    }

    /// Adds an output with tokens for a continuation.
    #[must_use]
    pub fn then(mut self, choice: usize, tokens: &[u32]) -> Self {
        let content = Content::Tokens {
            tokens: tokens.iter().copied().map(TokenId).collect(),
            logprobs: None,
        };
        let prefill = self.outputs.is_empty().then(Prefill::default);
        self.outputs.push_back(Output {
            choice,
            content,
            finish: None,
            prefill,
            prompt_logprobs: None,
        });
        self
    }

    /// Makes the last output end its continuation and the job.
    #[must_use]
    pub fn finish(mut self, finish: Finish) -> Self {
        if let Some(last) = self.outputs.back_mut() {
            last.finish = Some(finish);
        }
        Self { hangs: false, ..self }
    }

    /// Makes the job fail after its outputs.
    #[must_use]
    pub fn fail(self, error: JobError) -> Self {
        Self { error: Some(error), hangs: false, ..self }
    }

    /// Creates a script in which the job is refused.
    pub fn refuse(error: JobError) -> Self {
        Self { error: Some(error), refused: true, ..Self::default() }
    }
}

/// A backend whose jobs follow scripts. Clones share the backend.
#[derive(Clone, Debug)]
pub struct FakeBackend {
    shared: Arc<Inner>,
}

struct Inner {
    capabilities: Capabilities,
    state: Mutex<State>,
    death: watch::Sender<Option<DeathReason>>,
}

#[derive(Default)]
struct State {
    scripts: VecDeque<Script>,
    jobs: Vec<Arc<Job>>,
    aborted: usize,
    holds: HashSet<MmHash>,
    requested_items: Vec<MmHash>,
    load_sink: Option<LoadSink>,
    silent_since: Option<Instant>,
    adapters: BTreeSet<String>,
    refuses_adapters: bool,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeBackend").finish_non_exhaustive()
    }
}

impl Default for FakeBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeBackend {
    /// Creates a backend with blocks of 16 tokens and a context of 4,096 tokens. It takes raw
    /// tensors inline and reports no KV events.
    pub fn new() -> Self {
        Self::with_capabilities(fake_capabilities())
    }

    /// Creates a backend with these capabilities.
    pub fn with_capabilities(capabilities: Capabilities) -> Self {
        let shared =
            Inner { capabilities, state: Mutex::default(), death: watch::Sender::new(None) };
        Self { shared: Arc::new(shared) }
    }

    /// Queues the script of a job. Jobs take scripts in order; a job without a script hangs.
    pub fn next_job(&self, script: Script) {
        self.state().scripts.push_back(script);
    }

    /// Returns the jobs that were started so far.
    pub fn jobs(&self) -> Vec<Arc<Job>> {
        self.state().jobs.clone()
    }

    /// Returns the items whose tensors were requested so far.
    pub fn requested_items(&self) -> Vec<MmHash> {
        self.state().requested_items.clone()
    }

    /// Lets the backend hold an item, so that it requests no tensors of it.
    pub fn hold(&self, item: MmHash) {
        self.state().holds.insert(item);
    }

    /// Returns the number of jobs that were dropped before their end.
    pub fn aborted(&self) -> usize {
        self.state().aborted
    }

    /// Returns the names of the loaded adapters.
    pub fn adapters(&self) -> Vec<String> {
        self.state().adapters.iter().cloned().collect()
    }

    /// Sets whether the backend refuses to load adapters.
    pub fn refuse_adapters(&self, refuse: bool) {
        self.state().refuses_adapters = refuse;
    }

    /// Reports the load to the sink, if there is one.
    pub fn report_load(&self, load: Load) {
        if let Some(sink) = &self.state().load_sink {
            sink(load);
        }
    }

    /// Sets whether the backend stops responding to liveness probes. Jobs continue to follow their
    /// scripts.
    pub fn set_silent(&self, silent: bool) {
        self.state().silent_since = silent.then(Instant::now);
    }

    /// Kills the backend. Only the first reason counts.
    pub fn die(&self, reason: DeathReason) {
        self.shared.death.send_if_modified(|death| {
            let is_first = death.is_none();
            death.get_or_insert(reason);
            is_first
        });
    }

    /// Returns the reason of the backend's death; `None` while it lives.
    pub fn death(&self) -> Option<DeathReason> {
        self.shared.death.borrow().clone()
    }

    /// Waits until the backend dies.
    async fn wait_for_death(self) -> DeathReason {
        let death = self
            .shared
            .death
            .subscribe()
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|death| death.clone());
        death.unwrap_or_else(|| DeathReason::new("the fake backend was dropped"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const BLOCK_SIZE: BlockSize = match BlockSize::new(16) {
    Some(size) => size,
    None => panic!("16 is not 0"),
};

/// Returns the capabilities of [`FakeBackend::new`].
pub fn fake_capabilities() -> Capabilities {
    Capabilities {
        engine: "fake".to_owned(),
        class: PlanClass {
            processor: b"fake"[..].into(),
            vllm_items: VllmItems::Any,
            placeholders: PlaceholderForm::Expanded,
            keys: KeyScheme::Chiasm,
            block_size: BLOCK_SIZE,
        },
        role: Role::Aggregated,
        embedding_store_bytes: 0,
        max_model_len: 4096,
        max_batched_tokens: 2048,
        max_running: 8,
        total_blocks: 1000,
        encoder_cache_tokens: 2048,
        receiver_cache_bytes: 1 << 20,
        max_loras: 0,
        adapters: BTreeMap::new(),
        supports: Supports::EVERYTHING,
        input: InputForm::Tokens,
        media: MediaForm::Tensors(TensorFormat::Raw),
        hand_off: HandOff::Inline,
        locality: Locality::Here,
        private_network: None,
        kv: KvSource::Unknown { why: "a fake backend reports none".to_owned() },
    }
}

/// No shared memory: all tensors are in this process's own memory.
struct OwnMemory;

impl TensorMemory for OwnMemory {
    fn reserve(&self, _bytes: usize) -> Option<chiasm_transfer::SlotWriter> {
        None
    }

    fn takes(&self, bytes: &TensorBytes) -> bool {
        matches!(bytes, TensorBytes::Here(_))
    }
}

impl Backend for FakeBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    /// Requests the tensors of the items that the backend does not hold, as an engine does.
    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        async move {
            if let Some(death) = self.death() {
                return Err(JobError::NotTaken(death));
            }
            let mut delivered = MediaDelivery::default();
            for item in job.media.iter() {
                if self.holds(&item.hash) {
                    delivered.cached += 1;
                    continue;
                }
                self.state().requested_items.push(item.hash);
                let request = TensorRequest {
                    format: TensorFormat::Raw,
                    model_dtype: Some(Dtype::BF16),
                    memory: Arc::new(OwnMemory),
                    is_still_needed: Arc::new(|| true),
                };
                item.source.tensors(request).await.map_err(JobError::Source)?;
                self.state().holds.insert(item.hash);
                delivered.inline += 1;
            }
            let mut state = self.state();
            state.jobs.push(job);
            let mut script =
                state.scripts.pop_front().unwrap_or(Script { hangs: true, ..Script::default() });
            if script.refused
                && let Some(error) = script.error.take()
            {
                return Err(error);
            }
            let running = FakeJob {
                death: self.clone().wait_for_death().boxed(),
                backend: self.clone(),
                script,
                delivered,
                sleep: None,
                stopped: HashSet::new(),
                had_output: false,
                ended: false,
            };
            Ok(Box::new(running) as Box<dyn RunningJob>)
        }
        .boxed()
    }

    fn load_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>> {
        async {
            if let Some(death) = self.death() {
                return Err(AdapterError::Gone(death));
            }
            if self.shared.capabilities.max_loras == 0 {
                return Err(AdapterError::NotEnabled);
            }
            let mut state = self.state();
            if state.refuses_adapters {
                return Err(AdapterError::Refused("refused by the fake backend".to_owned()));
            }
            state.adapters.insert(adapter.name.clone());
            Ok(())
        }
        .boxed()
    }

    fn unload_adapter<'a>(&'a self, adapter: &'a Adapter) -> BoxFuture<'a, ()> {
        async {
            self.state().adapters.remove(&adapter.name);
        }
        .boxed()
    }

    fn holds(&self, item: &MmHash) -> bool {
        self.state().holds.contains(item)
    }

    fn follow_load(&self, sink: LoadSink) {
        self.state().load_sink = Some(sink);
    }

    fn ended(&self) -> BoxFuture<'_, DeathReason> {
        self.clone().wait_for_death().boxed()
    }

    fn silent_for(&self) -> Duration {
        self.state().silent_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn declare_dead(&self, reason: DeathReason) {
        self.die(reason);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        None
    }
}

struct FakeJob {
    backend: FakeBackend,
    script: Script,
    delivered: MediaDelivery,
    death: BoxFuture<'static, DeathReason>,
    sleep: Option<BoxFuture<'static, ()>>,
    stopped: HashSet<usize>,
    had_output: bool,
    ended: bool,
}

impl RunningJob for FakeJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        // Death ends every wait.
        if let Poll::Ready(death) = self.death.poll_unpin(context) {
            self.ended = true;
            return Poll::Ready(Some(Err(JobError::Dead(death))));
        }
        if !self.script.pause.is_zero() {
            let pause = self.script.pause;
            let sleep = self.sleep.get_or_insert_with(|| tokio::time::sleep(pause).boxed());
            std::task::ready!(sleep.poll_unpin(context));
            self.sleep = None;
        }
        while let Some(output) = self.script.outputs.pop_front() {
            if self.script.overtakes_stop || !self.stopped.contains(&output.choice) {
                self.had_output = true;
                return Poll::Ready(Some(Ok(output)));
            }
        }
        if let Some(error) = self.script.error.take() {
            self.ended = true;
            return Poll::Ready(Some(Err(error)));
        }
        if self.script.hangs {
            return Poll::Pending;
        }
        self.ended = true;
        Poll::Ready(None)
    }

    fn stop(&mut self, choice: usize) {
        self.stopped.insert(choice);
    }

    fn delivered(&self) -> MediaDelivery {
        let is_reported = self.had_output || self.script.late_delivery.is_none();
        if is_reported { self.delivered } else { MediaDelivery::default() }
    }

    fn hand_off(&self) -> Duration {
        self.script.late_delivery.filter(|_| self.had_output).unwrap_or_default()
    }
}

impl Drop for FakeJob {
    fn drop(&mut self) {
        if !self.ended {
            self.backend.state().aborted += 1;
        }
    }
}

/// A connector to the backends of a test, one after the other. After the last backend, it never
/// connects again.
pub struct FakeConnector {
    backends: Mutex<VecDeque<Result<FakeBackend, ConnectError>>>,
    /// The number of attempts to connect.
    pub attempts: watch::Sender<usize>,
}

impl FakeConnector {
    /// Creates a connector to these backends; an error is a failed attempt.
    pub fn new(backends: impl IntoIterator<Item = Result<FakeBackend, ConnectError>>) -> Self {
        Self {
            backends: Mutex::new(backends.into_iter().collect()),
            attempts: watch::Sender::new(0),
        }
    }
}

impl Connector for FakeConnector {
    fn connect(
        &self,
        _: WorkerId,
        _: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async {
            self.attempts.send_modify(|attempts| *attempts += 1);
            let next = self.backends.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match next {
                Some(Ok(backend)) => {
                    Ok(Connected { backend: Arc::new(backend), lifecycle: Box::new(FakeLifecycle) })
                }
                Some(Err(error)) => Err(error),
                None => std::future::pending().await,
            }
        }
        .boxed()
    }

    fn describe(&self) -> String {
        "connecting to a fake".to_owned()
    }

    fn max_retry_pause(&self) -> Duration {
        Duration::from_secs(60)
    }
}

struct FakeLifecycle;

impl BackendLifecycle for FakeLifecycle {
    fn ended(&mut self) -> BoxFuture<'_, DeathReason> {
        std::future::pending().boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        std::future::ready(None).boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        std::future::ready(()).boxed()
    }
}
