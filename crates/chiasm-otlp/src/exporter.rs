//! The queue, and the task that sends its spans.

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
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::endpoint::{Endpoint, Headers};
use crate::span::{Span, attribute};

/// The capacity of the queue, in traces.
const QUEUE_TRACES: usize = 2048;
/// The maximum number of traces per message.
const BATCH_TRACES: usize = 512;
/// The time for which the first trace of a message waits for others.
const BATCH_DELAY: Duration = Duration::from_millis(500);
/// The timeout of a request to the collector.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum size of a response. It contains a number and, if spans are rejected, a reason.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// The reason why a message was not accepted.
#[derive(Debug, thiserror::Error)]
enum PostError {
    #[error("{0}")]
    Http(#[source] reqwest::Error),
    #[error("the collector responded with {0}")]
    Status(StatusCode),
    #[error("the response has more than {MAX_RESPONSE_BYTES} bytes")]
    TooLargeResponse,
    #[error("the collector rejected {0} spans of a message")]
    Rejected(u64),
}

/// The reason why no exporter can be created.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client for the collector can't be created: {0}")]
pub struct ExportError(#[from] reqwest::Error);

/// The number of spans so far, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportCounts {
    /// Spans that the collector has accepted.
    pub sent: u64,
    /// Spans that were dropped because the queue was full.
    pub full: u64,
    /// Spans that the collector did not accept: it was down, did not respond in time, or refused a
    /// message or a part of it. Also spans that are still queued when [`Exporter::finish`] times
    /// out.
    pub refused: u64,
}

/// An exporter of spans to a collector. Dropping it discards queued spans: see
/// [`Exporter::finish`].
#[derive(Debug)]
pub struct Exporter {
    /// `None` once [`Exporter::finish`] was called.
    queue: Mutex<Option<Sender<Vec<Span>>>>,
    counts: Arc<Counts>,
    task: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Counts {
    /// The number of spans that were queued.
    queued: AtomicU64,
    sent: AtomicU64,
    full: AtomicU64,
    refused: AtomicU64,
    /// `true` if the last message failed. Further failures are not logged until a success.
    is_failing: AtomicBool,
}

/// The background task that sends spans.
struct SendTask {
    client: reqwest::Client,
    endpoint: Endpoint,
    headers: Headers,
    resource: Resource,
    counts: Arc<Counts>,
}

impl Exporter {
    /// Starts an exporter for spans of this service. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`ExportError`] if no HTTP client can be created, for instance because the system's
    /// certificates can't be loaded.
    pub fn start(
        endpoint: Endpoint,
        headers: Headers,
        service: &str,
        version: &str,
    ) -> Result<Self, ExportError> {
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(REQUEST_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none());
        let (sender, receiver) = mpsc::channel(QUEUE_TRACES);
        let counts = Arc::new(Counts::default());
        let attributes = [("service.name", service), ("service.version", version)];
        let attributes =
            attributes.map(|(name, value)| attribute(name, Value::StringValue(value.to_owned())));
        let resource = Resource { attributes: attributes.into(), ..Resource::default() };
        let task = SendTask {
            client: client.build()?,
            endpoint,
            headers,
            resource,
            counts: counts.clone(),
        };
        let task = tokio::spawn(task.run(receiver));
        Ok(Self { queue: Mutex::new(Some(sender)), counts, task: Mutex::new(Some(task)) })
    }

    /// Queues the spans of a trace. Drops them if the queue is full.
    pub fn send(&self, spans: Vec<Span>) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(queue) = &*queue else { return };
        let count = spans.len() as u64;
        let counter =
            if queue.try_send(spans).is_ok() { &self.counts.queued } else { &self.counts.full };
        counter.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the number of spans so far, by outcome.
    pub fn counts(&self) -> ExportCounts {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counts { sent, full, refused, .. } = &*self.counts;
        ExportCounts { sent: load(sent), full: load(full), refused: load(refused) }
    }

    /// Sends the queued spans within `max_wait`, and accepts no more.
    pub async fn finish(&self, max_wait: Duration) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut task) = task
            && timeout(max_wait, &mut task).await.is_err()
        {
            task.abort();
            // The task may count a last message before it ends.
            let _ = task.await;
            let ExportCounts { sent, refused, .. } = self.counts();
            let spans = self.counts.queued.load(Ordering::Relaxed) - sent - refused;
            self.counts.refused.fetch_add(spans, Ordering::Relaxed);
            tracing::warn!(
                spans,
                "the last traces were not sent: the collector did not respond in time"
            );
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

impl SendTask {
    async fn run(self, mut queue: Receiver<Vec<Span>>) {
        let mut traces = Vec::new();
        while queue.recv_many(&mut traces, BATCH_TRACES).await > 0 {
            if traces.len() < BATCH_TRACES {
                let gather = async {
                    while traces.len() < BATCH_TRACES {
                        let room = BATCH_TRACES - traces.len();
                        if queue.recv_many(&mut traces, room).await == 0 {
                            break;
                        }
                    }
                };
                // The timeout is the usual end, not an error.
                let _ = timeout(BATCH_DELAY, gather).await;
            }
            self.send(traces.drain(..).flatten().collect()).await;
        }
    }

    /// Sends spans as one message and counts them.
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
            tracing::warn!(
                endpoint = %self.endpoint,
                %error,
                cause,
                "cannot send traces; further failures are not logged until the next success"
            );
        }
    }

    /// Posts a message. Returns the number of spans that the collector rejected.
    async fn post(&self, message: Vec<u8>) -> Result<u64, PostError> {
        // The URL is stripped: it may contain secrets.
        let http = |error: reqwest::Error| PostError::Http(error.without_url());
        let request = self.client.post(self.endpoint.0.clone()).headers(self.headers.0.clone());
        let request = request
            .header(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"))
            .body(message);
        let mut response = request.send().await.map_err(http)?;
        // Redirects are not followed, so their targets have not received the spans.
        if !response.status().is_success() {
            return Err(PostError::Status(response.status()));
        }
        // The body is read to its end, so that the connection can be reused.
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(http)? {
            if body.len() + piece.len() > MAX_RESPONSE_BYTES {
                return Err(PostError::TooLargeResponse);
            }
            body.extend_from_slice(&piece);
        }
        // A success with another body means that all spans were accepted.
        let response = ExportTraceServiceResponse::decode(&*body).unwrap_or_default();
        let rejected = response.partial_success.map_or(0, |partial| partial.rejected_spans);
        Ok(u64::try_from(rejected).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests;
