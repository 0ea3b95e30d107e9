//! One line in the log per finished request: what it was, where it went, and what it took.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_api::openai::Usage;
use chiasm_backend::{Delivered, RequestId};
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_pipeline::Entries;
use chiasm_pipeline::model::ServedModel;
use chiasm_request::RouteOutcome;
use tokio::time::Instant;
use tracing::Span;

use crate::error::Refusal;
use crate::metrics::{Metrics, StreamEnd};
use crate::page::{Found, Outcome, Page};
use crate::traces::{Over, Traced, Traces};

/// The status of a request whose client left before it had an answer, as other servers log it.
const CLIENT_LEFT: u16 = 499;

/// Everything that notes the end of a request.
pub(crate) struct Recorder {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) page: Option<Arc<Page>>,
    pub(crate) traces: Option<Arc<Traces>>,
    pub(crate) model: Arc<ServedModel>,
}

/// The facts about a request that become known while it is answered. Clones are the same record;
/// the line is written when the last of them is dropped, which for a streamed answer is the end of
/// its stream.
#[derive(Clone)]
pub(crate) struct Record(Arc<Line>);

struct Line {
    endpoint: &'static str,
    started: Instant,
    span: Span,
    /// The request's identity and trace, if that is recorded.
    traced: Option<(RequestId, Traced)>,
    recorder: Arc<Recorder>,
    /// The request's entries on the live page.
    entries: Entries,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    status: Option<u16>,
    /// The end of the stream, for a streamed answer.
    stream: Option<StreamEnd>,
    attempted: Option<RouteOutcome>,
    adapter: Option<Arc<ServedAdapter>>,
    /// The tokens of all prompts and answers; `None` as long as nobody has counted them.
    usage: Option<Usage>,
    error: Option<String>,
    /// A word for why it failed.
    cause: Option<&'static str>,
    /// The prompts that the live page shows.
    shown: Vec<ShownPrompt>,
}

/// A prompt that the live page shows.
struct ShownPrompt {
    /// The number of its entry.
    number: u64,
    first_token: Option<Duration>,
    usage: Option<Usage>,
}

impl Record {
    /// A record of the request that this span is of.
    pub(crate) fn new(
        endpoint: &'static str,
        span: Span,
        traced: Option<(RequestId, Traced)>,
        recorder: Arc<Recorder>,
    ) -> Self {
        let entries = recorder.page.as_ref().map_or_else(Entries::default, |_| Entries::new());
        let started = Instant::now();
        let known = Mutex::default();
        Self(Arc::new(Line { endpoint, started, span, traced, recorder, entries, known }))
    }

    /// The client was given this status, and this message if it is an error.
    pub(crate) fn answered(&self, status: u16, refusal: Option<&Refusal>) {
        self.0.recorder.metrics.answered(self.0.endpoint, status);
        let mut known = self.known();
        known.status = Some(status);
        (known.error, known.cause) =
            refusal.map(|Refusal(error)| (error.message.clone(), error.code)).unzip();
    }

    /// Notes that a streamed answer failed after its status had been sent.
    pub(crate) fn stream_failed(&self, error: String) {
        let mut known = self.known();
        known.stream = Some(StreamEnd::Failed);
        known.error = Some(error);
    }

    /// Returns the request's entries on the live page.
    pub(crate) fn entries(&self) -> Entries {
        self.0.entries.clone()
    }

    /// Notes where a prompt went. The log has the first of several prompts.
    pub(crate) fn attempted(&self, attempted: RouteOutcome) {
        let mut known = self.known();
        known.attempted.get_or_insert(attempted);
        if let Some(number) = attempted.explained {
            known.shown.push(ShownPrompt {
                number,
                first_token: attempted.first_token,
                usage: None,
            });
        }
    }

    /// The adapter that it names, if it names one.
    pub(crate) fn adapter(&self, adapter: Option<&Arc<ServedAdapter>>) {
        if let Some(adapter) = adapter {
            self.known().adapter = Some(adapter.clone());
        }
    }

    /// The answer is a stream, which the client has left unless something else is told of its end.
    pub(crate) fn streamed(&self) {
        self.known().stream = Some(StreamEnd::Left);
    }

    /// A streamed answer came to its end.
    pub(crate) fn finished(&self) {
        self.known().stream = Some(StreamEnd::Finished);
    }

    /// Notes the time from the arrival of a request that was passed on to its first token.
    pub(crate) fn first_token(&self, after: Duration) {
        let mut known = self.known();
        if let Some(attempted) = &mut known.attempted {
            attempted.first_token.get_or_insert(after);
        }
        if let [only] = known.shown.as_mut_slice() {
            only.first_token.get_or_insert(after);
        }
    }

    /// Notes the tokens of all prompts so far.
    pub(crate) fn used(&self, usage: Usage) {
        let mut known = self.known();
        known.usage = Some(usage);
        if let [only] = known.shown.as_mut_slice() {
            only.usage.get_or_insert(usage);
        }
    }

    /// Notes the tokens so far of the prompt whose entry on the live page has this number.
    pub(crate) fn used_by(&self, explained: Option<u64>, usage: Usage) {
        let Some(number) = explained else { return };
        if let Some(shown) = self.known().shown.iter_mut().find(|shown| shown.number == number) {
            shown.usage = Some(usage);
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        let known = std::mem::take(&mut *self.known.lock().unwrap_or_else(PoisonError::into_inner));
        let metrics = &self.recorder.metrics;
        if known.status.is_none() {
            metrics.answered(self.endpoint, CLIENT_LEFT);
        }
        if let Some(how) = known.stream {
            metrics.stream_ended(how);
        }
        metrics.over(self.endpoint, self.started.elapsed());
        let cause = known.cause();
        if let Some(page) = &self.recorder.page {
            self.show(page, &known, cause);
        }
        if let (Some(traces), Some((id, traced))) = (&self.recorder.traces, &self.traced) {
            let model =
                known.adapter.as_ref().map_or(&self.recorder.model.name, |adapter| &adapter.name);
            let over = Over {
                endpoint: self.endpoint,
                model,
                id: id.as_str(),
                status: known.status.unwrap_or(CLIENT_LEFT),
                failure: cause.map(|cause| (cause, known.error.as_deref())),
                attempted: known.attempted.as_ref(),
                usage: known.usage.unwrap_or_default(),
                took: self.started.elapsed(),
            };
            traces.end(traced, &over);
        }
        let Known { status, stream, attempted, usage, error, .. } = known;
        let milliseconds = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
        // The line that Dynamo's users look for; what they look for it for comes with it.
        let message = match attempted {
            Some(RouteOutcome { worker, overlap_blocks, total_blocks, .. }) => {
                format!(
                    "[ROUTING] best: {worker} with {overlap_blocks}/{total_blocks} blocks overlap"
                )
            }
            None => "not routed".to_owned(),
        };
        // Servers that are given messages count tokens only for clients that ask for the count.
        let foreseen = attempted.map(|it| it.prompt_tokens).filter(|&tokens| tokens > 0);
        tracing::info!(
            parent: &self.span,
            endpoint = self.endpoint,
            status = status.unwrap_or(CLIENT_LEFT),
            streamed = stream.is_some(),
            stream_end = stream.map(StreamEnd::name),
            prompt_tokens = usage.map(|usage| usage.prompt_tokens).or(foreseen),
            cached_tokens = usage.map(|usage| usage.cached_tokens),
            completion_tokens = usage.map(|usage| usage.completion_tokens),
            media_cached = attempted.map(|it| it.delivered.cached).filter(|&items| items > 0),
            media_shm = attempted.map(|it| it.delivered.shared_memory).filter(|&items| items > 0),
            media_inline = attempted.map(|it| it.delivered.inline).filter(|&items| items > 0),
            encode_worker = attempted.and_then(|it| it.encoded).map(|by| tracing::field::display(by.worker)),
            encode_ms = attempted.and_then(|it| it.encoded).map(|by| milliseconds(by.took)),
            prefill_worker = attempted.and_then(|it| it.prefilled).map(|by| tracing::field::display(by.worker)),
            prefill_ms = attempted.and_then(|it| it.prefilled).map(|by| milliseconds(by.took)),
            moves = attempted.map(|it| it.moves).filter(|&moves| moves > 0),
            fetch_ms = attempted.filter(|it| it.delivered != Delivered::default()).map(|it| milliseconds(it.took.fetch)),
            plan_ms = attempted.map(|it| it.took.plan).map(milliseconds),
            hand_off_ms = attempted.map(|it| it.hand_off).map(milliseconds),
            queue_ms = attempted.and_then(|it| it.prefill.queued).map(milliseconds),
            ttft_ms = attempted.and_then(|it| it.first_token).map(milliseconds),
            total_ms = milliseconds(self.started.elapsed()),
            error,
            "{message}"
        );
    }
}

impl Known {
    /// Why it ended otherwise than its client had hoped, in a word.
    fn cause(&self) -> Option<&'static str> {
        match (self.status, self.stream) {
            (None, _) | (_, Some(StreamEnd::Left)) => Some("client_left"),
            (_, Some(StreamEnd::Failed)) => Some("stream_failed"),
            _ => self.cause,
        }
    }
}

impl Line {
    /// Shows the end of the request on the live page, for each of its prompts.
    fn show(&self, page: &Page, known: &Known, cause: Option<&'static str>) {
        if let Some(cause) = cause {
            page.failed(cause);
        }
        let total = self.started.elapsed().as_secs_f64();
        for number in self.entries.take() {
            // Not found for a request that was refused after it had been routed.
            let shown = known.shown.iter().find(|shown| shown.number == number);
            let usage = shown.and_then(|shown| shown.usage);
            let outcome = Outcome {
                endpoint: self.endpoint,
                status: known.status.unwrap_or(CLIENT_LEFT),
                stream: known.stream.map(StreamEnd::name),
                found: usage.map(|usage| Found {
                    cached_tokens: usage.cached_tokens,
                    completion_tokens: usage.completion_tokens,
                }),
                ttft: shown.and_then(|shown| shown.first_token).map(|time| time.as_secs_f64()),
                total,
            };
            page.requests.ended(number, outcome);
        }
    }
}
