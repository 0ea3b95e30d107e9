//! Request records: one log line per finished request, and its metrics, trace and entries on the
//! live page.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_api::openai::Usage;
use chiasm_backend::{MediaDelivery, RequestId};
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_pipeline::model::ServedModel;
use chiasm_pipeline::{LastRoute, PageEntries};
use chiasm_request::RouteOutcome;
use tokio::time::Instant;
use tracing::Span;

use crate::error::Refusal;
use crate::metrics::{Metrics, StreamEnd};
use crate::page::{Outcome, Page, TokenCounts};
use crate::traces::{ActiveTrace, FinishedRequest, Traces};

/// The status of a request whose client disconnected before it was answered, as nginx logs it.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// The parts of the server that record the end of a request.
pub(crate) struct Recorder {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) page: Option<Arc<Page>>,
    pub(crate) traces: Option<Arc<Traces>>,
    pub(crate) model: Arc<ServedModel>,
}

/// The facts about a request that become known while it is answered.
///
/// Clones share the record. When the last clone is dropped, the log line is written; for a streamed
/// answer that is the end of the stream.
#[derive(Clone)]
pub(crate) struct Record(Arc<RecordState>);

struct RecordState {
    endpoint: &'static str,
    started: Instant,
    span: Span,
    /// The request's id and trace, if the trace is recorded.
    trace: Option<(RequestId, ActiveTrace)>,
    recorder: Arc<Recorder>,
    /// The request's entries on the live page.
    entries: PageEntries,
    /// The latest route, for a request that ends before its answer begins.
    last_route: LastRoute,
    facts: Mutex<Facts>,
}

#[derive(Default)]
struct Facts {
    status: Option<u16>,
    /// The end of the stream, for a streamed answer.
    stream: Option<StreamEnd>,
    route: Option<RouteOutcome>,
    adapter: Option<Arc<ServedAdapter>>,
    /// The tokens of all prompts and answers; `None` until they are counted.
    usage: Option<Usage>,
    error: Option<String>,
    /// A word for the cause of the failure.
    cause: Option<&'static str>,
    /// The prompts with entries on the live page.
    shown: Vec<ShownPrompt>,
}

/// A prompt with an entry on the live page.
struct ShownPrompt {
    /// The entry's number.
    number: u64,
    first_token: Option<Duration>,
    usage: Option<Usage>,
}

impl Record {
    /// Creates the record of a request. `span` is the request's span.
    pub(crate) fn new(
        endpoint: &'static str,
        span: Span,
        trace: Option<(RequestId, ActiveTrace)>,
        recorder: Arc<Recorder>,
    ) -> Self {
        let entries =
            recorder.page.as_ref().map_or_else(PageEntries::default, |_| PageEntries::new());
        let started = Instant::now();
        Self(Arc::new(RecordState {
            endpoint,
            started,
            span,
            trace,
            recorder,
            entries,
            last_route: LastRoute::default(),
            facts: Mutex::default(),
        }))
    }

    /// Records the status sent to the client, and the error if the request was refused.
    pub(crate) fn set_response(&self, status: u16, refusal: Option<&Refusal>) {
        self.0.recorder.metrics.count_answer(self.0.endpoint, status);
        let mut facts = self.facts();
        facts.status = Some(status);
        facts.error = refusal.map(|Refusal(error)| error.message.clone());
        facts.cause = refusal.map(|Refusal(error)| error.code);
    }

    /// Records that a streamed answer failed after its status had been sent.
    pub(crate) fn fail_stream(&self, error: String) {
        let mut facts = self.facts();
        facts.stream = Some(StreamEnd::Failed);
        facts.error = Some(error);
    }

    /// Returns the request's entries on the live page.
    pub(crate) fn entries(&self) -> PageEntries {
        self.0.entries.clone()
    }

    /// Returns the request's latest route, which the pipeline sets.
    pub(crate) fn last_route(&self) -> LastRoute {
        self.0.last_route.clone()
    }

    /// Records a prompt's route. The log line has the route of the first prompt.
    pub(crate) fn set_route(&self, route: RouteOutcome) {
        let mut facts = self.facts();
        facts.route.get_or_insert(route);
        if let Some(number) = route.explanation_id {
            facts.shown.push(ShownPrompt { number, first_token: route.first_token, usage: None });
        }
    }

    /// Records the adapter that the request names, if any.
    pub(crate) fn set_adapter(&self, adapter: Option<&Arc<ServedAdapter>>) {
        if let Some(adapter) = adapter {
            self.facts().adapter = Some(adapter.clone());
        }
    }

    /// Records that the answer is a stream. If no end is recorded later, the client has
    /// disconnected.
    pub(crate) fn start_stream(&self) {
        self.facts().stream = Some(StreamEnd::Left);
    }

    /// Records that a streamed answer was sent completely.
    pub(crate) fn finish_stream(&self) {
        self.facts().stream = Some(StreamEnd::Finished);
    }

    /// Records the time from a forwarded request's arrival to its first token.
    pub(crate) fn set_first_token(&self, after: Duration) {
        let mut facts = self.facts();
        if let Some(route) = &mut facts.route {
            route.first_token.get_or_insert(after);
        }
        if let [prompt] = facts.shown.as_mut_slice() {
            prompt.first_token.get_or_insert(after);
        }
    }

    /// Records the tokens of all prompts so far.
    pub(crate) fn set_usage(&self, usage: Usage) {
        let mut facts = self.facts();
        facts.usage = Some(usage);
        if let [prompt] = facts.shown.as_mut_slice() {
            prompt.usage.get_or_insert(usage);
        }
    }

    /// Records the tokens so far of the prompt with this entry on the live page.
    pub(crate) fn set_prompt_usage(&self, explanation_id: Option<u64>, usage: Usage) {
        let Some(number) = explanation_id else { return };
        if let Some(shown) = self.facts().shown.iter_mut().find(|shown| shown.number == number) {
            shown.usage = Some(usage);
        }
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.0.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RecordState {
    fn drop(&mut self) {
        let mut facts =
            std::mem::take(&mut *self.facts.lock().unwrap_or_else(PoisonError::into_inner));
        facts.route = facts.route.or_else(|| self.last_route.get());
        let metrics = &self.recorder.metrics;
        if facts.status.is_none() {
            metrics.count_answer(self.endpoint, CLIENT_CLOSED_REQUEST);
        }
        if let Some(end) = facts.stream {
            metrics.count_stream_end(end);
        }
        metrics.observe_duration(self.endpoint, self.started.elapsed());
        let cause = facts.cause();
        if let Some(page) = &self.recorder.page {
            self.show(page, &facts, cause);
        }
        if let (Some(traces), Some((id, trace))) = (&self.recorder.traces, &self.trace) {
            let model =
                facts.adapter.as_ref().map_or(&self.recorder.model.name, |adapter| &adapter.name);
            let finished = FinishedRequest {
                endpoint: self.endpoint,
                model,
                id: id.as_str(),
                status: facts.status.unwrap_or(CLIENT_CLOSED_REQUEST),
                failure: cause.map(|cause| (cause, facts.error.as_deref())),
                route: facts.route.as_ref(),
                usage: facts.usage.unwrap_or_default(),
                duration: self.started.elapsed(),
            };
            traces.end(trace, &finished);
        }
        let Facts { status, stream, route, usage, error, .. } = facts;
        let milliseconds = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
        // Dynamo logs the same text with the same contents, and its users search for it.
        let message = match route {
            Some(RouteOutcome { worker, overlap_blocks, total_blocks, .. }) => {
                format!(
                    "[ROUTING] best: {worker} with {overlap_blocks}/{total_blocks} blocks overlap"
                )
            }
            None => "not routed".to_owned(),
        };
        // Servers that take whole requests report usage only if the client asks for it, so the
        // predicted prompt length is the fallback.
        let predicted = route.map(|route| route.prompt_tokens).filter(|&tokens| tokens > 0);
        let delivered = route.map(|route| route.delivered);
        let encoded = route.and_then(|route| route.encoded);
        let prefilled = route.and_then(|route| route.prefilled);
        let fetch_time = route
            .filter(|route| route.delivered != MediaDelivery::default())
            .map(|route| route.stage_times.fetch);
        tracing::info!(
            parent: &self.span,
            endpoint = self.endpoint,
            status = status.unwrap_or(CLIENT_CLOSED_REQUEST),
            streamed = stream.is_some(),
            stream_end = stream.map(StreamEnd::name),
            prompt_tokens = usage.map(|usage| usage.prompt_tokens).or(predicted),
            cached_tokens = usage.map(|usage| usage.cached_tokens),
            completion_tokens = usage.map(|usage| usage.completion_tokens),
            media_cached = delivered.map(|by| by.cached).filter(|&items| items > 0),
            media_shm = delivered.map(|by| by.shared_memory).filter(|&items| items > 0),
            media_inline = delivered.map(|by| by.inline).filter(|&items| items > 0),
            encode_worker = encoded.map(|by| tracing::field::display(by.worker)),
            encode_ms = encoded.map(|by| milliseconds(by.duration)),
            prefill_worker = prefilled.map(|by| tracing::field::display(by.worker)),
            prefill_ms = prefilled.map(|by| milliseconds(by.duration)),
            moves = route.map(|route| route.moves).filter(|&moves| moves > 0),
            fetch_ms = fetch_time.map(milliseconds),
            plan_ms = route.map(|route| route.stage_times.plan).map(milliseconds),
            hand_off_ms = route.map(|route| route.hand_off).map(milliseconds),
            queue_ms = route.and_then(|route| route.prefill.queued).map(milliseconds),
            ttft_ms = route.and_then(|route| route.first_token).map(milliseconds),
            total_ms = milliseconds(self.started.elapsed()),
            error,
            "{message}"
        );
    }
}

impl Facts {
    /// Returns a word for the failure of the request; `None` if it was answered completely.
    fn cause(&self) -> Option<&'static str> {
        match (self.status, self.stream) {
            (None, _) | (_, Some(StreamEnd::Left)) => Some("client_left"),
            (_, Some(StreamEnd::Failed)) => Some("stream_failed"),
            _ => self.cause,
        }
    }
}

impl RecordState {
    /// Shows the end of the request on the live page, for each of its prompts.
    fn show(&self, page: &Page, facts: &Facts, cause: Option<&'static str>) {
        if let Some(cause) = cause {
            page.count_failure(cause);
        }
        let total = self.started.elapsed().as_secs_f64();
        for number in self.entries.take() {
            // A request that was refused after routing has an entry but no prompt.
            let shown = facts.shown.iter().find(|shown| shown.number == number);
            let usage = shown.and_then(|shown| shown.usage);
            let outcome = Outcome {
                endpoint: self.endpoint,
                status: facts.status.unwrap_or(CLIENT_CLOSED_REQUEST),
                stream: facts.stream.map(StreamEnd::name),
                found: usage.map(|usage| TokenCounts {
                    cached_tokens: usage.cached_tokens,
                    completion_tokens: usage.completion_tokens,
                }),
                ttft: shown.and_then(|shown| shown.first_token).map(|time| time.as_secs_f64()),
                total,
            };
            page.requests.finish(number, outcome);
        }
    }
}
