//! Streamed answers and their token counts: for `usage` in chunks, and for metrics and the log when
//! the stream ends or is dropped.

use std::cell::Cell;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use chiasm_api::ApiError;
use chiasm_api::openai::{StreamOptions, Usage};
use chiasm_pipeline::RequestError;
use chiasm_request::{ChoiceDelta, RouteOutcome};
use futures_util::stream::{Stream, StreamExt};
use tracing::Span;

use crate::admission::Admission;
use crate::endpoint_state::EndpointState;
use crate::error::HttpError;
use crate::poll_epoch::PollEpoch;

/// The token counts of one streamed answer. Holds the request's slot.
pub(crate) struct Meter {
    state: Arc<EndpointState>,
    options: StreamOptions,
    usages: Vec<Usage>,
    /// The ids of the prompts' entries on the live page.
    explanation_ids: Vec<Option<u64>>,
    admission: Admission,
}

impl Meter {
    /// Creates the counts of an answer before its first token. `routes` has the route of each
    /// prompt; `reads_reasoning` is `true` if some tokens may be reasoning.
    pub(crate) fn new(
        state: &Arc<EndpointState>,
        options: StreamOptions,
        routes: Vec<RouteOutcome>,
        admission: Admission,
        reads_reasoning: bool,
    ) -> Self {
        admission.record.start_stream();
        routes.iter().for_each(|route| admission.record.set_route(*route));
        let usage = |route| Usage::for_prompt(route, reads_reasoning);
        let options = if state.usage_in_all_streams { StreamOptions::ALL_USAGE } else { options };
        let usages = routes.iter().map(usage).collect();
        let explanation_ids = routes.iter().map(|route| route.explanation_id).collect();
        Self { state: state.clone(), options, usages, explanation_ids, admission }
    }

    /// Counts a delta. Returns the prompt's usage so far if the client wants it in every chunk.
    pub(crate) fn count(&mut self, prompt: usize, delta: &ChoiceDelta) -> Option<Usage> {
        let usage = &mut self.usages[prompt];
        usage.completion_tokens += delta.tokens.len();
        if let Some(prefill) = delta.prefill {
            usage.set_prefill(prefill);
        }
        usage.reasoning_tokens =
            usage.reasoning_tokens.map(|tokens| tokens + delta.reasoning_tokens);
        self.chunk_usage(prompt)
    }

    /// Returns the prompt's usage so far if the client wants it in every chunk.
    pub(crate) fn chunk_usage(&self, prompt: usize) -> Option<Usage> {
        self.options.continuous_usage.then(|| self.usages[prompt])
    }

    /// Returns the usage of all prompts together.
    pub(crate) fn total(&self) -> Usage {
        let mut total = Usage::default();
        self.usages.iter().for_each(|&usage| total += usage);
        total
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        for (id, usage) in self.explanation_ids.iter().zip(&self.usages) {
            self.admission.record.set_prompt_usage(*id, *usage);
        }
        self.admission.record.set_usage(self.total());
        self.state.metrics.count_tokens(self.total());
    }
}

/// The size in bytes from which a batch of events is sent without waiting for more deltas.
const MAX_BATCH_BYTES: usize = 16 << 10;

/// The largest capacity, in bytes, of a write buffer that a thread keeps.
const MAX_KEPT_BUFFER_BYTES: usize = 4 * MAX_BATCH_BYTES;

/// A streamed answer, with deltas turned into events. Each item batches every event that is ready,
/// so slow readers and several concurrent continuations need fewer writes.
pub(crate) struct EventStream<S, W, E> {
    /// `None` once all events have been written.
    running: Option<Running<S, W, E>>,
    /// The events before those of the deltas.
    begin: Vec<u8>,
    /// The epoch in which the deltas were last pending.
    pending_in: Option<PollEpoch>,
}

thread_local! {
    /// The buffer in which events are written before they are copied to memory of their exact size,
    /// so that streams keep no buffers of their own.
    static WRITE_BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

struct Running<S, W, E> {
    deltas: S,
    meter: Meter,
    write: W,
    end: E,
    span: Span,
}

/// Returns the stream of an answer's events, which begins with `begin`.
///
/// `write` appends the events of a delta, or of the error that ends the deltas and with it the
/// stream. `end` appends the last events if there was no error; it gets the total usage if the
/// client wants it.
pub(crate) fn events<D, S, W, E>(
    begin: Vec<u8>,
    deltas: S,
    meter: Meter,
    write: W,
    end: E,
) -> EventStream<S, W, E>
where
    S: Stream<Item = Result<D, RequestError>> + Unpin,
    W: FnMut(Result<D, ApiError>, &mut Meter, &mut Vec<u8>) + Unpin,
    E: FnOnce(Option<Usage>, &mut Vec<u8>) + Unpin,
{
    let span = tracing::debug_span!("stream");
    let running = Running { deltas, meter, write, end, span };
    EventStream { running: Some(running), begin, pending_in: None }
}

impl<D, S, W, E> Stream for EventStream<S, W, E>
where
    S: Stream<Item = Result<D, RequestError>> + Unpin,
    W: FnMut(Result<D, ApiError>, &mut Meter, &mut Vec<u8>) + Unpin,
    E: FnOnce(Option<Usage>, &mut Vec<u8>) + Unpin,
{
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.pending_in.is_some() && self.pending_in == PollEpoch::current() {
            return Poll::Pending;
        }
        let mut events = WRITE_BUFFER.take();
        events.extend_from_slice(&std::mem::take(&mut self.begin));
        let is_over = self.write_ready(context, &mut events).is_ready();
        let written = (!events.is_empty()).then(|| Bytes::copy_from_slice(&events));
        if events.capacity() <= MAX_KEPT_BUFFER_BYTES {
            events.clear();
            WRITE_BUFFER.set(events);
        }
        match written {
            Some(written) => Poll::Ready(Some(written)),
            None if is_over => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

impl<D, S, W, E> EventStream<S, W, E>
where
    S: Stream<Item = Result<D, RequestError>> + Unpin,
    W: FnMut(Result<D, ApiError>, &mut Meter, &mut Vec<u8>) + Unpin,
    E: FnOnce(Option<Usage>, &mut Vec<u8>) + Unpin,
{
    /// Appends the events of the deltas that are ready, up to [`MAX_BATCH_BYTES`]. Ready once all
    /// events have been written.
    fn write_ready(&mut self, context: &mut Context<'_>, events: &mut Vec<u8>) -> Poll<()> {
        while let Some(Running { deltas, meter, write, span, .. }) = &mut self.running {
            if events.len() >= MAX_BATCH_BYTES {
                return Poll::Pending;
            }
            let entered = span.enter();
            match deltas.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(delta))) => write(Ok(delta), meter, events),
                Poll::Ready(Some(Err(error))) => {
                    meter.admission.record.fail_stream(error.to_string());
                    write(Err(HttpError::from(error).error), meter, events);
                    drop(entered);
                    // Dropping the deltas aborts the answer's other jobs.
                    self.running = None;
                }
                Poll::Ready(None) => {
                    drop(entered);
                    if let Some(running) = self.running.take() {
                        running.end(events);
                    }
                }
                Poll::Pending => {
                    self.pending_in = PollEpoch::current();
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(())
    }
}

impl<S, W, E: FnOnce(Option<Usage>, &mut Vec<u8>)> Running<S, W, E> {
    fn end(self, events: &mut Vec<u8>) {
        let Self { meter, end, .. } = self;
        meter.admission.record.finish_stream();
        end(meter.options.include_usage.then(|| meter.total()), events);
    }
}
