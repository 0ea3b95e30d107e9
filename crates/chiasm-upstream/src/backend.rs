//! One server as a backend, and the task that watches it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, Death, Delivered, Forward, Forwarded, Job, JobError, KvSink,
    KvSource, Load, LoadSink, MediaObserver, MemoryUsage, RunningJob,
};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::found::{GENERATE, METRICS};
use crate::gauges;
use crate::plain;
use crate::request;
use crate::running::RunningUpstreamJob;
use crate::server::{AskError, Server, message, whole};
use crate::trtllm;

/// How often a server is asked for its load, which is also its sign of life.
const PERIOD: Duration = Duration::from_secs(1);
/// A server that nobody could connect to for so long is gone. One that is merely slow says nothing, and is not.
const GONE: Duration = Duration::from_secs(4);

/// One server, from when it was found to when it is gone.
pub(crate) struct UpstreamBackend {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    /// What watches the server. It ends with this.
    tasks: Mutex<JoinSet<()>>,
}

/// How a server is asked.
pub(crate) enum Mode {
    /// It is given tokens.
    Tokens,
    /// It is given requests as they come, with this name of the model, and asked at this path how it is.
    Messages { model: Option<String>, status: &'static str },
}

impl Mode {
    /// Where a server is asked how it is.
    fn status(&self) -> &'static str {
        match self {
            Self::Tokens => METRICS,
            Self::Messages { status, .. } => status,
        }
    }
}

/// What a backend, its jobs and what watches the server share.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) observer: Arc<dyn MediaObserver>,
    pub(crate) server: Server,
    mode: Mode,
    load: Mutex<Option<LoadSink>>,
    /// The time in which the server has said nothing, in milliseconds.
    silent_ms: AtomicU64,
    ended: watch::Sender<Option<Death>>,
    distrusted: watch::Sender<Option<String>>,
}

impl Shared {
    /// Takes note of the server's end, unless one is known.
    fn end(&self, death: Death) {
        set_once(&self.ended, death);
    }

    /// Takes note of a prompt that has become another one than was expected.
    pub(crate) fn distrust(&self, why: String) {
        set_once(&self.distrusted, why);
    }

    /// Returns once the server is gone.
    pub(crate) fn when_ended(&self) -> BoxFuture<'static, Death> {
        let mut ended = self.ended.subscribe();
        async move {
            let death = ended.wait_for(Option::is_some).await.ok().and_then(|death| death.clone());
            death.unwrap_or_else(|| Death::new("it was let go"))
        }
        .boxed()
    }

    fn tell_load(&self, load: Load) {
        if let Some(sink) = &*self.load.lock().unwrap_or_else(PoisonError::into_inner) {
            sink(load);
        }
    }

    /// Asks the server now and then how it is, until it is gone.
    async fn watch(self: Arc<Self>) {
        let mut heard = Instant::now();
        let mut unreachable_since = None;
        loop {
            sleep(PERIOD).await;
            self.silent_ms.store(heard.elapsed().as_millis() as u64, Relaxed);
            let path = self.mode.status();
            match self.server.get(path).await {
                Ok(text) => {
                    (heard, unreachable_since) = (Instant::now(), None);
                    if path == METRICS {
                        self.tell_load(load(&String::from_utf8_lossy(&text)));
                    }
                }
                // It is there, and is its operator's affair.
                Err(AskError::Refused { .. } | AskError::Unreadable { .. }) => {
                    (heard, unreachable_since) = (Instant::now(), None);
                }
                Err(AskError::Unreachable(why)) => {
                    let since = *unreachable_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= GONE {
                        return self.end(Death::new(format!("{} can't be reached: {why}", self.name)));
                    }
                }
            }
            self.silent_ms.store(heard.elapsed().as_millis() as u64, Relaxed);
        }
    }
}

fn set_once<T>(cell: &watch::Sender<Option<T>>, value: T) {
    cell.send_if_modified(|known| {
        let is_new = known.is_none();
        known.get_or_insert(value);
        is_new
    });
}

/// A server's load, by the names that vLLM has for it.
fn load(text: &str) -> Load {
    let sum = |name| gauges::sum(text, name).unwrap_or(0.0).max(0.0) as u64;
    Load {
        running: sum("vllm:num_requests_running"),
        waiting: sum("vllm:num_requests_waiting"),
        kv_usage: gauges::mean(text, "vllm:kv_cache_usage_perc").unwrap_or(0.0).clamp(0.0, 1.0),
        ..Load::default()
    }
}

impl UpstreamBackend {
    /// The backend of a server that was found to be like this.
    pub(crate) fn new(
        name: String,
        server: Server,
        mode: Mode,
        capabilities: Capabilities,
        observer: Arc<dyn MediaObserver>,
    ) -> Self {
        let shared = Arc::new(Shared {
            name,
            observer,
            server,
            mode,
            load: Mutex::new(None),
            silent_ms: AtomicU64::new(0),
            ended: watch::Sender::new(None),
            distrusted: watch::Sender::new(None),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(shared.clone().watch());
        Self { shared, capabilities, tasks: Mutex::new(tasks) }
    }

    async fn begin(&self, job: Arc<Job>) -> Result<RunningUpstreamJob, JobError> {
        let shared = &self.shared;
        if !matches!(shared.mode, Mode::Tokens) {
            return Err(JobError::NotTaken(Death::new(format!("{} takes requests only as they come", shared.name))));
        }
        if let Some(death) = shared.ended.borrow().clone() {
            return Err(JobError::NotTaken(death));
        }
        let (body, headers) = request::of(&job)?;
        let not_taken = |error: AskError| JobError::NotTaken(Death::new(format!("{}: {error}", shared.name)));
        let response = shared.server.post(GENERATE, body, headers).await.map_err(not_taken)?;
        let status = response.status().as_u16();
        if status == 200 {
            let delivered = Delivered { inline: job.media.len(), ..Delivered::default() };
            if delivered != Delivered::default() {
                shared.observer.delivered(delivered);
            }
            return Ok(RunningUpstreamJob::new(shared.clone(), job, response, delivered));
        }
        let body = whole(response, GENERATE).await.map_err(not_taken)?;
        let message = format!("{} answers: {}", shared.name, message(&body));
        Err(match status {
            400 | 413 | 422 => JobError::Refused { field: refused_field(&job).to_owned(), message },
            // Another server may do better, but not any number of them.
            _ => JobError::Dead(Death::new(format!("{message} ({status})"))),
        })
    }
}

/// The field that a refusal is most likely about: a server does not tell it in terms of the client's request.
fn refused_field(job: &Job) -> &'static str {
    job.sampling.structured.as_ref().map_or("body", |structured| structured.field)
}

impl fmt::Debug for UpstreamBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamBackend").field("server", &self.shared.name).finish_non_exhaustive()
    }
}

impl Backend for UpstreamBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        async move { Ok(Box::new(self.begin(job).await?) as Box<dyn RunningJob>) }.boxed()
    }

    fn forward(&self, request: Forward) -> BoxFuture<'_, Result<Forwarded, JobError>> {
        let shared = &self.shared;
        async move {
            let Mode::Messages { model, .. } = &shared.mode else {
                return Err(JobError::NotTaken(Death::new(format!("{} takes tokens alone", shared.name))));
            };
            if let Some(death) = shared.ended.borrow().clone() {
                return Err(JobError::NotTaken(death));
            }
            plain::forward(&shared.server, &shared.name, model.as_deref(), request).await
        }
        .boxed()
    }

    fn load_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>> {
        async { Err(AdapterError::NotEnabled) }.boxed()
    }

    fn unload_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    // What its caches hold is known to the server alone, which is given each item again.
    fn holds(&self, _: &MmHash) -> bool {
        false
    }

    fn follow_load(&self, sink: LoadSink) {
        *self.shared.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    }

    fn follow_kv(&self, sink: Box<dyn KvSink>) {
        if matches!(self.capabilities.kv, KvSource::Backend) {
            let following = trtllm::follow(self.shared.clone(), self.capabilities.class.block_size, sink);
            self.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(following);
        }
    }

    fn distrust(&self, why: String) {
        self.shared.distrust(why);
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
