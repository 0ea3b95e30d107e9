//! A backend that does what a test tells it to: for unit tests of whoever gives jobs to backends.
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

use chiasm_types::{BlockSize, MmHash, Role, TokenId, WorkerId};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::{
    Activity, Adapter, AdapterError, Backend, Capabilities, ConnectError, Connected, Connector,
    Content, Death, Delivered, Finish, HandOff, InputForm, Job, JobError, KeyScheme, KvSource,
    Life, Load, LoadSink, Locality, MediaForm, MediaObserver, MemoryUsage, Output, PlaceholderForm,
    PlanClass, Prefill, RunningJob, Supports, TensorBytes, TensorFormat, TensorMemory, TensorOrder,
    VllmItems,
};

/// What a fake backend does with one job.
#[derive(Debug, Default)]
pub struct Script {
    /// Time before each output, on tokio's clock.
    pub pause: Duration,
    /// Outputs, in order, then the end.
    pub outputs: VecDeque<Output>,
    /// How the job ends after its outputs; `None` for an orderly end.
    pub error: Option<JobError>,
    /// The job is refused at once with `error`.
    pub refused: bool,
    /// The job says nothing after its outputs, for ever.
    pub hangs: bool,
    /// Outputs of a stopped continuation still come, like those that a connection had read before
    /// the stop.
    pub overtakes_stop: bool,
    /// How media items travelled is told with the first output and not before, and that this was
    /// how long it took.
    pub told_late: Option<Duration>,
}

impl Script {
    /// One output with these tokens for the first continuation, and no end.
    pub fn tokens(tokens: &[u32]) -> Self {
        Self { hangs: true, ..Self::default() }.then(0, tokens)
    }

    /// One more output with tokens for a continuation.
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

    /// The last output ends its continuation, and the job.
    #[must_use]
    pub fn finish(mut self, finish: Finish) -> Self {
        if let Some(last) = self.outputs.back_mut() {
            last.finish = Some(finish);
        }
        Self { hangs: false, ..self }
    }

    /// The job fails after its outputs.
    #[must_use]
    pub fn fail(self, error: JobError) -> Self {
        Self { error: Some(error), hangs: false, ..self }
    }

    /// The job is not taken.
    pub fn refuse(error: JobError) -> Self {
        Self { error: Some(error), refused: true, ..Self::default() }
    }
}

/// A backend whose jobs follow scripts. Clones are the same backend.
#[derive(Clone, Debug)]
pub struct FakeBackend {
    shared: Arc<Inner>,
}

struct Inner {
    capabilities: Capabilities,
    state: Mutex<State>,
    death: watch::Sender<Option<Death>>,
}

#[derive(Default)]
struct State {
    scripts: VecDeque<Script>,
    jobs: Vec<Arc<Job>>,
    aborted: usize,
    holds: HashSet<MmHash>,
    pulled: Vec<MmHash>,
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
    /// A backend with blocks of 16 tokens and a context of 4,096, which takes raw tensors inline
    /// and says nothing of its KV cache.
    pub fn new() -> Self {
        Self::with(fake_capabilities())
    }

    /// A backend that can do these things.
    pub fn with(capabilities: Capabilities) -> Self {
        let shared =
            Inner { capabilities, state: Mutex::default(), death: watch::Sender::new(None) };
        Self { shared: Arc::new(shared) }
    }

    /// The next job without a script follows this one. A job that finds none hangs.
    pub fn next_job(&self, script: Script) {
        self.state().scripts.push_back(script);
    }

    /// The jobs that were given so far.
    pub fn jobs(&self) -> Vec<Arc<Job>> {
        self.state().jobs.clone()
    }

    /// The items whose tensors were asked for so far.
    pub fn pulled(&self) -> Vec<MmHash> {
        self.state().pulled.clone()
    }

    /// How many jobs were dropped before their end.
    pub fn aborted(&self) -> usize {
        self.state().aborted
    }

    /// The adapters that it has, by name.
    pub fn adapters(&self) -> Vec<String> {
        self.state().adapters.iter().cloned().collect()
    }

    /// Refuses adapters from now on, or takes them again.
    pub fn refuse_adapters(&self, refuse: bool) {
        self.state().refuses_adapters = refuse;
    }

    /// Tells the load to whoever follows it.
    pub fn say(&self, load: Load) {
        if let Some(sink) = &self.state().load_sink {
            sink(load);
        }
    }

    /// Stops to answer, or answers again. Jobs go on as their scripts say.
    pub fn fall_silent(&self, silent: bool) {
        self.state().silent_since = silent.then(Instant::now);
    }

    /// Ends the backend.
    pub fn die(&self, death: Death) {
        self.shared.death.send_if_modified(|known| {
            let first = known.is_none();
            known.get_or_insert(death);
            first
        });
    }

    /// How the backend went, if it did.
    pub fn death(&self) -> Option<Death> {
        self.shared.death.borrow().clone()
    }

    async fn death_to_come(self) -> Death {
        let known = self
            .shared
            .death
            .subscribe()
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|known| known.clone());
        known.unwrap_or_else(|| Death::new("it was forgotten"))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const SIXTEEN: BlockSize = match BlockSize::new(16) {
    Some(size) => size,
    None => panic!("16 is not 0"),
};

/// What [`FakeBackend::new`] can do.
pub fn fake_capabilities() -> Capabilities {
    Capabilities {
        engine: "fake".to_owned(),
        class: PlanClass {
            processor: b"fake"[..].into(),
            vllm_items: VllmItems::Any,
            placeholders: PlaceholderForm::Expanded,
            keys: KeyScheme::Chiasm,
            block_size: SIXTEEN,
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
        kv: KvSource::Unknown { why: "it is a fake".to_owned() },
    }
}

/// Everything in this process.
struct NoMemory;

impl TensorMemory for NoMemory {
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

    /// Asks for the tensors of the items that it does not hold, as an engine does.
    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        async move {
            if let Some(death) = self.death() {
                return Err(JobError::NotTaken(death));
            }
            let mut delivered = Delivered::default();
            for item in job.media.iter() {
                if self.holds(&item.hash) {
                    delivered.cached += 1;
                    continue;
                }
                self.state().pulled.push(item.hash);
                let order = TensorOrder {
                    format: TensorFormat::Raw,
                    memory: Arc::new(NoMemory),
                    still_wanted: Arc::new(|| true),
                };
                item.source.tensors(order).await.map_err(JobError::Source)?;
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
                death: self.clone().death_to_come().boxed(),
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
                return Err(AdapterError::Refused("it was told to".to_owned()));
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

    fn ended(&self) -> BoxFuture<'_, Death> {
        self.clone().death_to_come().boxed()
    }

    fn silent_for(&self) -> Duration {
        self.state().silent_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn declare_dead(&self, death: Death) {
        self.die(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        None
    }
}

struct FakeJob {
    backend: FakeBackend,
    script: Script,
    delivered: Delivered,
    death: BoxFuture<'static, Death>,
    sleep: Option<BoxFuture<'static, ()>>,
    stopped: HashSet<usize>,
    had_output: bool,
    ended: bool,
}

impl RunningJob for FakeJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        // A death ends whatever is waited for.
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

    fn delivered(&self) -> Delivered {
        let is_told = self.had_output || self.script.told_late.is_none();
        if is_told { self.delivered } else { Delivered::default() }
    }

    fn hand_off(&self) -> Duration {
        self.script.told_late.filter(|_| self.had_output).unwrap_or_default()
    }
}

impl Drop for FakeJob {
    fn drop(&mut self) {
        if !self.ended {
            self.backend.state().aborted += 1;
        }
    }
}

/// Connects to backends that a test made, one after the other; after the last it waits for ever.
pub struct FakeConnector {
    backends: Mutex<VecDeque<Result<FakeBackend, ConnectError>>>,
    /// How many connections were asked for.
    pub asked: watch::Sender<usize>,
}

impl FakeConnector {
    /// A connector to these backends; an error is a failed try.
    pub fn new(backends: impl IntoIterator<Item = Result<FakeBackend, ConnectError>>) -> Self {
        Self { backends: Mutex::new(backends.into_iter().collect()), asked: watch::Sender::new(0) }
    }
}

impl Connector for FakeConnector {
    fn connect(
        &self,
        _: WorkerId,
        _: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async {
            self.asked.send_modify(|asked| *asked += 1);
            let next = self.backends.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match next {
                Some(Ok(backend)) => {
                    Ok(Connected { backend: Arc::new(backend), life: Box::new(FakeLife) })
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

    fn longest_pause(&self) -> Duration {
        Duration::from_secs(60)
    }
}

struct FakeLife;

impl Life for FakeLife {
    fn ended(&mut self) -> BoxFuture<'_, Death> {
        std::future::pending().boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        std::future::ready(None).boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        std::future::ready(()).boxed()
    }
}
