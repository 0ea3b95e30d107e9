//! The state that a backend, its jobs and its tasks share, and the task that watches the server.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{Death, Delivered, Job, JobError, Load, LoadSink, MediaObserver};
use futures_util::future::{BoxFuture, FutureExt};
use reqwest::header::HeaderMap;
use reqwest::{Response, StatusCode};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::found::{METRICS, MODELS};
use crate::gauges;
use crate::server::{AskError, Server, fault};
use crate::sglang;
use crate::trtllm;

/// The interval at which a server is asked for its load, which is also its sign of life.
const PERIOD: Duration = Duration::from_secs(1);
/// The time after which a server that can't be connected to is gone. A server that is merely slow
/// is not.
const GONE: Duration = Duration::from_secs(4);

/// The protocol for requests to a server.
pub(crate) enum Mode {
    /// It is `vllm serve`, and given tokens.
    Vllm,
    /// It is SGLang, and given tokens.
    Sglang(sglang::Manner),
    /// It is given requests as they come, with this name of the model. `vllm serve` tells its load
    /// then too, and of `trtllm-serve` it is kept what it was asked, to understand what it tells of
    /// its KV cache.
    Messages { model: Option<String>, is_vllm: bool, asked: Option<Arc<trtllm::Asked>> },
}

/// The names of a server's load in its metrics.
pub(crate) struct Gauges {
    running: &'static str,
    waiting: &'static str,
    kv_usage: &'static str,
}

impl Mode {
    /// `None` for a server that does not tell its load.
    pub(crate) fn gauges(&self) -> Option<Gauges> {
        match self {
            Self::Vllm | Self::Messages { is_vllm: true, .. } => Some(Gauges {
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

/// The state that a backend, its jobs and its tasks share.
pub(crate) struct Shared {
    pub(crate) name: String,
    observer: Arc<dyn MediaObserver>,
    pub(crate) server: Server,
    pub(crate) mode: Mode,
    pub(crate) load: Mutex<Option<LoadSink>>,
    /// The number of passed-on requests in flight, for servers that don't tell their load.
    pub(crate) passed_on: AtomicU64,
    /// The time in which the server has said nothing, in milliseconds.
    pub(crate) silent_ms: AtomicU64,
    pub(crate) ended: watch::Sender<Option<Death>>,
    pub(crate) distrusted: watch::Sender<Option<String>>,
}

impl Shared {
    /// Creates the state of a server that was found just now.
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
            passed_on: AtomicU64::new(0),
            silent_ms: AtomicU64::new(0),
            ended: watch::Sender::new(None),
            distrusted: watch::Sender::new(None),
        }
    }

    /// Notes the server's end, unless an earlier one is known.
    pub(crate) fn end(&self, death: Death) {
        set_once(&self.ended, death);
    }

    /// Notes that a prompt became another one than was expected.
    pub(crate) fn distrust(&self, why: String) {
        set_once(&self.distrusted, why);
    }

    /// Sends a job's request. Returns with the head of the answer.
    pub(crate) async fn ask(
        &self,
        path: &'static str,
        body: Vec<u8>,
        headers: HeaderMap,
        job: &Job,
    ) -> Result<Response, JobError> {
        let response =
            self.server.post(path, body.into(), headers).await.map_err(AskError::of_job)?;
        if response.status() == StatusCode::OK {
            return Ok(response);
        }
        let refusal = self.server.refusal(response).await;
        // The path was there when the server was found, so a 404 is about the model.
        let error = refusal.error(true);
        Err(error.unwrap_or_else(|| rejected(refusal.status.as_u16(), &refusal.message, job)))
    }

    /// Returns the error of a job whose server reports an HTTP status in the middle of its answer.
    pub(crate) fn refusal(&self, status: u16, message: &str, job: &Job) -> JobError {
        let message = self.server.redact(message);
        fault(status, None, &message, true).unwrap_or_else(|| rejected(status, &message, job))
    }

    /// Notes the number of items that were sent.
    pub(crate) fn delivered(&self, items: usize) -> Delivered {
        let delivered = Delivered { inline: items, ..Delivered::default() };
        if delivered != Delivered::default() {
            self.observer.delivered(delivered);
        }
        delivered
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

    pub(crate) fn tell_load(&self, load: Load) {
        if let Some(sink) = &*self.load.lock().unwrap_or_else(PoisonError::into_inner) {
            sink(load);
        }
    }

    /// Asks the server now and then how it is, until it is gone.
    pub(crate) async fn watch(self: Arc<Self>) {
        let mut heard = Instant::now();
        let mut unreachable_since = None;
        loop {
            sleep(PERIOD).await;
            self.silent_ms.store(heard.elapsed().as_millis() as u64, Relaxed);
            let gauges = self.mode.gauges();
            match self.server.get(if gauges.is_some() { METRICS } else { MODELS }).await {
                Ok(text) => {
                    heard = Instant::now();
                    unreachable_since = None;
                    if let Some(gauges) = gauges {
                        self.tell_load(load(&String::from_utf8_lossy(&text), &gauges));
                    }
                }
                // It is there. Why it refuses is for its operator to find out.
                Err(AskError::Refused { .. } | AskError::Unreadable { .. }) => {
                    heard = Instant::now();
                    unreachable_since = None;
                }
                // It is there, and slow. The fleet decides how long it may be silent.
                Err(AskError::Late) => unreachable_since = None,
                Err(error @ (AskError::NotConnected(_) | AskError::Lost(_))) => {
                    let since = *unreachable_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= GONE {
                        return self.end(Death::new(format!("the server: {error}")));
                    }
                }
            }
            self.silent_ms.store(heard.elapsed().as_millis() as u64, Relaxed);
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
        message: format!("the server answers: {message}"),
    }
}

fn set_once<T>(cell: &watch::Sender<Option<T>>, value: T) {
    cell.send_if_modified(|known| {
        let is_new = known.is_none();
        known.get_or_insert(value);
        is_new
    });
}

/// Parses a server's load out of its metrics.
fn load(text: &str, names: &Gauges) -> Load {
    let sum = |name| gauges::sum(text, name).unwrap_or(0.0).max(0.0) as u64;
    let kv_usage = gauges::mean(text, names.kv_usage).unwrap_or(0.0).clamp(0.0, 1.0);
    server_load(sum(names.running), sum(names.waiting), kv_usage)
}

/// Returns the load of a server that tells this much of itself.
pub(crate) fn server_load(running: u64, waiting: u64, kv_usage: f64) -> Load {
    // No server tells the rest.
    Load { running, waiting, kv_usage, pending_tokens_of_others: 0, draining: false, media: None }
}
