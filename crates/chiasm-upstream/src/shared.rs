//! The state shared by a backend, its jobs and its tasks, and the task that checks the server.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{DeathReason, Job, JobError, Load, LoadSink, MediaDelivery, MediaObserver};
use futures_util::future::{BoxFuture, FutureExt};
use reqwest::header::HeaderMap;
use reqwest::{Response, StatusCode};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::gauges;
use crate::server::{RequestError, Server, fault};
use crate::sglang;
use crate::trtllm;
use crate::vllm_info::{CACHE_CONFIG, METRICS, MODELS};

/// The interval between requests for a server's load, which are also liveness probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// The time after which an unreachable server counts as gone. A server that is merely slow does
/// not.
const UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(4);

/// The protocol for requests to a server.
pub(crate) enum Mode {
    /// A `vllm serve` that receives tokens.
    Vllm {
        /// The number of the engine that gets them; `None` if the server chooses one.
        engine: Option<u64>,
    },
    /// An SGLang that receives tokens.
    Sglang(sglang::RequestRules),
    /// A server that receives requests unchanged, except for the model's name.
    Messages {
        /// The server's name of the model.
        model: Option<String>,
        /// `true` for `vllm serve`, which also reports its load in this mode.
        is_vllm: bool,
        /// The recent prompts of `trtllm-serve`, which explain the KV events it publishes.
        recent_prompts: Option<Arc<trtllm::RecentPrompts>>,
    },
}

/// The names of a server's load metrics.
pub(crate) struct Gauges {
    running: &'static str,
    waiting: &'static str,
    kv_usage: &'static str,
}

impl Mode {
    /// Returns the number of the server's engine that gets the requests; `None` if the server
    /// chooses.
    fn engine(&self) -> Option<u64> {
        match self {
            Self::Vllm { engine } => *engine,
            Self::Sglang(_) | Self::Messages { .. } => None,
        }
    }

    /// Returns the names of the load metrics; `None` for a server that does not report its load.
    pub(crate) fn gauges(&self) -> Option<Gauges> {
        match self {
            Self::Vllm { .. } | Self::Messages { is_vllm: true, .. } => Some(Gauges {
                running: "vllm:num_requests_running",
                waiting: "vllm:num_requests_waiting",
                kv_usage: "vllm:kv_cache_usage_perc",
            }),
            Self::Sglang(_) => Some(Gauges {
                running: "sglang:num_running_reqs",
                waiting: "sglang:num_queue_reqs",
                kv_usage: "sglang:token_usage",
            }),
            Self::Messages { .. } => None,
        }
    }
}

/// The state shared by a backend, its jobs and its tasks.
pub(crate) struct Shared {
    pub(crate) name: String,
    observer: Arc<dyn MediaObserver>,
    pub(crate) server: Server,
    pub(crate) mode: Mode,
    pub(crate) load: Mutex<Option<LoadSink>>,
    /// The number of forwarded requests in flight, for servers that do not report their load.
    pub(crate) forwarded: AtomicU64,
    /// The time since the server's last answer, in milliseconds.
    pub(crate) silent_ms: AtomicU64,
    pub(crate) ended: watch::Sender<Option<DeathReason>>,
    pub(crate) distrusted: watch::Sender<Option<String>>,
}

impl Shared {
    /// Creates the state of a server that has just been queried.
    pub(crate) fn new(
        name: String,
        server: Server,
        mode: Mode,
        observer: Arc<dyn MediaObserver>,
    ) -> Self {
        Self {
            name,
            observer,
            server,
            mode,
            load: Mutex::new(None),
            forwarded: AtomicU64::new(0),
            silent_ms: AtomicU64::new(0),
            ended: watch::Sender::new(None),
            distrusted: watch::Sender::new(None),
        }
    }

    /// Records the server's end; only the first call has an effect.
    pub(crate) fn end(&self, death: DeathReason) {
        set_once(&self.ended, death);
    }

    /// Records that a prompt did not expand as expected; only the first call has an effect.
    pub(crate) fn distrust(&self, why: String) {
        set_once(&self.distrusted, why);
    }

    /// Sends a job's request and returns the head of the answer.
    pub(crate) async fn send_job(
        &self,
        path: &'static str,
        body: Vec<u8>,
        headers: HeaderMap,
        job: &Job,
    ) -> Result<Response, JobError> {
        let response = self
            .server
            .post(path, body.into(), headers)
            .await
            .map_err(RequestError::into_job_error)?;
        if response.status() == StatusCode::OK {
            return Ok(response);
        }
        let refusal = self.server.refusal(response).await;
        // The path existed when the server was queried, so a 404 is about the model.
        let error = refusal.error(true);
        Err(error.unwrap_or_else(|| rejected(refusal.status.as_u16(), &refusal.message, job)))
    }

    /// Returns the error for an HTTP status that a server reports in the middle of its answer.
    pub(crate) fn refusal(&self, status: u16, message: &str, job: &Job) -> JobError {
        let message = self.server.redact(message);
        fault(status, None, &message, true).unwrap_or_else(|| rejected(status, &message, job))
    }

    /// Reports the number of items that were sent to the observer.
    pub(crate) fn delivered(&self, items: usize) -> MediaDelivery {
        let delivered = MediaDelivery { inline: items, ..MediaDelivery::default() };
        if delivered != MediaDelivery::default() {
            self.observer.delivered(delivered);
        }
        delivered
    }

    /// Returns a future that completes once the server is gone.
    pub(crate) fn when_ended(&self) -> BoxFuture<'static, DeathReason> {
        let mut ended = self.ended.subscribe();
        async move {
            let death = ended.wait_for(Option::is_some).await.ok().and_then(|death| death.clone());
            death.unwrap_or_else(|| DeathReason::new("the connection was closed"))
        }
        .boxed()
    }

    /// Passes the server's load to the sink, if one is set.
    pub(crate) fn report_load(&self, load: Load) {
        if let Some(sink) = &*self.load.lock().unwrap_or_else(PoisonError::into_inner) {
            sink(load);
        }
    }

    /// Probes the server at intervals until it is gone.
    pub(crate) async fn watch(self: Arc<Self>) {
        let mut last_answer = Instant::now();
        let mut unreachable_since = None;
        loop {
            sleep(PROBE_INTERVAL).await;
            self.silent_ms.store(last_answer.elapsed().as_millis() as u64, Relaxed);
            let gauges = self.mode.gauges();
            match self.server.get(if gauges.is_some() { METRICS } else { MODELS }).await {
                Ok(text) => {
                    last_answer = Instant::now();
                    unreachable_since = None;
                    if let Some(gauges) = gauges {
                        let engine = self.mode.engine();
                        match load(&String::from_utf8_lossy(&text), &gauges, engine) {
                            Some(load) => self.report_load(load),
                            // It was started again with other engines, faster than a probe.
                            None => {
                                return self.end(DeathReason::new("the server lacks the engine"));
                            }
                        }
                    }
                }
                // The server is alive. Its operator has to find out why it refuses the probe.
                Err(RequestError::Refused { .. } | RequestError::Unreadable { .. }) => {
                    last_answer = Instant::now();
                    unreachable_since = None;
                }
                // The server is reachable but slow. The fleet decides how long it may be silent.
                Err(RequestError::Late) => unreachable_since = None,
                Err(error @ (RequestError::NotConnected(_) | RequestError::Lost(_))) => {
                    let since = *unreachable_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= UNREACHABLE_TIMEOUT {
                        return self.end(DeathReason::new(format!("the server: {error}")));
                    }
                }
            }
            self.silent_ms.store(last_answer.elapsed().as_millis() as u64, Relaxed);
        }
    }
}

/// Builds the error for a 4xx that is the request's own fault.
fn rejected(status: u16, message: &str, job: &Job) -> JobError {
    // The server does not name a field of the client's request, so this is a guess.
    let field = job.sampling.structured.as_ref().map_or("body", |structured| structured.field);
    JobError::Rejected {
        status,
        field: field.to_owned(),
        message: format!("the server refused the request: {message}"),
    }
}

fn set_once<T>(cell: &watch::Sender<Option<T>>, value: T) {
    cell.send_if_modified(|known| {
        let is_new = known.is_none();
        known.get_or_insert(value);
        is_new
    });
}

/// Parses the load of a server, or of one of its engines, from the server's metrics. Returns `None`
/// if it does not have the engine.
fn load(text: &str, names: &Gauges, engine: Option<u64>) -> Option<Load> {
    if engine.is_some_and(|engine| !gauges::engines(text, CACHE_CONFIG).contains(&engine)) {
        return None;
    }
    // A gauge of load may be missing until the first request.
    let sum = |name| gauges::sum(text, name, engine).unwrap_or(0.0).max(0.0) as u64;
    let kv_usage = gauges::mean(text, names.kv_usage, engine).unwrap_or(0.0).clamp(0.0, 1.0);
    Some(server_load(sum(names.running), sum(names.waiting), kv_usage))
}

/// Returns the load of a server that reports only these values.
pub(crate) fn server_load(running: u64, waiting: u64, kv_usage: f64) -> Load {
    // No server reports the other values.
    Load { running, waiting, kv_usage, pending_tokens_of_others: 0, draining: false, media: None }
}
