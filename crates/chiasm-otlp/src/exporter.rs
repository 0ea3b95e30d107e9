//! The queue, and the task that empties it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::InstrumentationScope;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans};
use prost::Message;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_TYPE, HeaderValue};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::endpoint::{Endpoint, Headers};
use crate::span::{Span, attribute};

/// Traces that wait to be sent.
const QUEUE: usize = 2048;
/// Traces in one message.
const BATCH: usize = 512;
/// How long the first trace of a message waits for others.
const GATHERING: Duration = Duration::from_millis(500);
/// What the collector may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The most bytes of an answer that are read. It holds a number and, if spans are rejected, a
/// reason.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Why a message was not taken.
#[derive(Debug, thiserror::Error)]
enum PostError {
    #[error("{0}")]
    Http(#[source] reqwest::Error),
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error("its answer has more than {MAX_ANSWER_BYTES} bytes")]
    LongAnswer,
    #[error("it rejected {0} spans of a message")]
    Rejected(u64),
}

/// There can be no exporter.
#[derive(Debug, thiserror::Error)]
#[error("no connection to a collector can be made: {0}")]
pub struct ExportError(#[from] reqwest::Error);

/// Spans so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportCounts {
    /// The collector has taken them.
    pub sent: u64,
    /// Too many were waiting.
    pub full: u64,
    /// The collector was not there, did not answer in time or did not take them, or not all of a
    /// message. Spans that still wait when [`Exporter::finish`] runs out of time are counted here
    /// too.
    pub refused: u64,
}

/// Sends spans to a collector. Dropping it gives up what waits: see [`Exporter::finish`].
#[derive(Debug)]
pub struct Exporter {
    /// `None` once it is to end.
    queue: Mutex<Option<Sender<Vec<Span>>>>,
    counts: Arc<Counts>,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Spans that were queued.
    queued: AtomicU64,
    sent: AtomicU64,
    full: AtomicU64,
    refused: AtomicU64,
    /// A failure was logged, and nothing was sent since.
    is_failing: AtomicBool,
}

/// What sends.
struct Sending {
    client: reqwest::Client,
    endpoint: Endpoint,
    headers: Headers,
    resource: Resource,
    counts: Arc<Counts>,
}

impl Exporter {
    /// Sends spans of this service from now on. Needs a runtime.
    ///
    /// # Errors
    /// The system's certificates can't be had, or the like.
    pub fn start(
        endpoint: Endpoint,
        headers: Headers,
        service: &str,
        version: &str,
    ) -> Result<Self, ExportError> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(TIMEOUT)
            .redirect(reqwest::redirect::Policy::none());
        let (sender, receiver) = mpsc::channel(QUEUE);
        let counts = Arc::new(Counts::default());
        let attributes = [("service.name", service), ("service.version", version)];
        let attributes =
            attributes.map(|(name, value)| attribute(name, Value::StringValue(value.to_owned())));
        let resource = Resource { attributes: attributes.into(), ..Resource::default() };
        let sending = Sending {
            client: client.build()?,
            endpoint,
            headers,
            resource,
            counts: counts.clone(),
        };
        let task = tokio::spawn(sending.run(receiver));
        Ok(Self { queue: Mutex::new(Some(sender)), counts, task: Mutex::new(Some(task)) })
    }

    /// Sends the spans of a trace, some time. If too many wait they are dropped.
    pub fn send(&self, spans: Vec<Span>) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(queue) = &*queue else { return };
        let count = spans.len() as u64;
        let counter =
            if queue.try_send(spans).is_ok() { &self.counts.queued } else { &self.counts.full };
        counter.fetch_add(count, Ordering::Relaxed);
    }

    /// What was counted so far.
    pub fn counts(&self) -> ExportCounts {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { sent, full, refused, .. } = &*self.counts;
        ExportCounts { sent: count(sent), full: count(full), refused: count(refused) }
    }

    /// Sends what waits, for `patience` at most, and takes no more.
    pub async fn finish(&self, patience: Duration) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut task) = task
            && timeout(patience, &mut task).await.is_err()
        {
            task.abort();
            // Until it has ended it may count a last message.
            let _ = task.await;
            let ExportCounts { sent, refused, .. } = self.counts();
            let spans = self.counts.queued.load(Ordering::Relaxed) - sent - refused;
            self.counts.refused.fetch_add(spans, Ordering::Relaxed);
            tracing::warn!(spans, "the last traces were not sent: the collector does not answer");
        }
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if let Some(task) = self.task.get_mut().unwrap_or_else(PoisonError::into_inner) {
            task.abort();
        }
    }
}

impl Sending {
    async fn run(self, mut queue: Receiver<Vec<Span>>) {
        let mut traces = Vec::new();
        while queue.recv_many(&mut traces, BATCH).await > 0 {
            if traces.len() < BATCH {
                let gather = async {
                    while traces.len() < BATCH {
                        let room = BATCH - traces.len();
                        if queue.recv_many(&mut traces, room).await == 0 {
                            break;
                        }
                    }
                };
                // Usually the end of the time ends it, and is no error.
                let _ = timeout(GATHERING, gather).await;
            }
            self.send(traces.drain(..).flatten().collect()).await;
        }
    }

    async fn send(&self, spans: Vec<Span>) {
        let count = spans.len() as u64;
        let scope =
            InstrumentationScope { name: "chiasm".to_owned(), ..InstrumentationScope::default() };
        let spans = spans.into_iter().map(|span| span.0).collect();
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
        let resource_spans = vec![ResourceSpans {
            resource: Some(self.resource.clone()),
            scope_spans,
            ..ResourceSpans::default()
        }];
        let body = ExportTraceServiceRequest { resource_spans }.encode_to_vec();
        let (rejected, error) = match self.post(body).await {
            Ok(0) => (0, None),
            Ok(rejected) => (rejected.min(count), Some(PostError::Rejected(rejected))),
            Err(error) => (count, Some(error)),
        };
        self.counts.sent.fetch_add(count - rejected, Ordering::Relaxed);
        self.counts.refused.fetch_add(rejected, Ordering::Relaxed);
        let was_failing = self.counts.is_failing.swap(error.is_some(), Ordering::Relaxed);
        if let Some(error) = error.filter(|_| !was_failing) {
            let cause = std::error::Error::source(&error)
                .and_then(std::error::Error::source)
                .map(ToString::to_string);
            tracing::warn!(endpoint = %self.endpoint, %error, cause, "traces are lost; told once until one is sent again");
        }
    }

    /// Sends a message. Returns the number of its spans that the collector rejects.
    async fn post(&self, message: Vec<u8>) -> Result<u64, PostError> {
        // The error's own words would tell the address with what is secret in it.
        let http = |error: reqwest::Error| PostError::Http(error.without_url());
        let request = self.client.post(self.endpoint.0.clone()).headers(self.headers.0.clone());
        let request = request
            .header(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"))
            .body(message);
        let mut answer = request.send().await.map_err(http)?;
        // Redirects are not followed, and what they lead to has not taken the spans.
        if !answer.status().is_success() {
            return Err(PostError::Status(answer.status()));
        }
        // Read to its end, the connection serves for the next message.
        let mut body = Vec::new();
        while let Some(piece) = answer.chunk().await.map_err(http)? {
            if body.len() + piece.len() > MAX_ANSWER_BYTES {
                return Err(PostError::LongAnswer);
            }
            body.extend_from_slice(&piece);
        }
        // A collector that answers something else has taken them all the same.
        let answer = ExportTraceServiceResponse::decode(&*body).unwrap_or_default();
        let rejected = answer.partial_success.map_or(0, |partial| partial.rejected_spans);
        Ok(u64::try_from(rejected).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests;
