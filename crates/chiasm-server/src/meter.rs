//! A streamed answer on its way to the client, and the count of its tokens: for `usage` in its
//! chunks, and for metrics and log when it ends or is dropped.

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

/// The count of one streamed answer. Holds the request's place among those in flight.
pub(crate) struct Meter {
    state: Arc<EndpointState>,
    options: StreamOptions,
    usages: Vec<Usage>,
    /// The prompts' numbers on the live page.
    explained: Vec<Option<u64>>,
    admission: Admission,
}

impl Meter {
    /// The count of an answer whose prompts went where `attempted` says, before any new token.
    /// `reads_reasoning`: whether some of them may be reasoning.
    pub(crate) fn new(
        state: &Arc<EndpointState>,
        options: StreamOptions,
        attempted: Vec<RouteOutcome>,
        admission: Admission,
        reads_reasoning: bool,
    ) -> Self {
        admission.record.streamed();
        attempted.iter().for_each(|attempted| admission.record.attempted(*attempted));
        let usage = |attempted| Usage::of_prompt(attempted, reads_reasoning);
        let options = if state.usage_in_all_streams { StreamOptions::ALL_USAGE } else { options };
        let usages = attempted.iter().map(usage).collect();
        let explained = attempted.iter().map(|attempted| attempted.explained).collect();
        Self { state: state.clone(), options, usages, explained, admission }
    }

    /// Counts a delta. The prompt's usage so far, if the client wants it in every chunk.
    pub(crate) fn count(&mut self, prompt: usize, delta: &ChoiceDelta) -> Option<Usage> {
        let usage = &mut self.usages[prompt];
        usage.completion_tokens += delta.tokens.len();
        if let Some(prefill) = delta.prefill {
            usage.prefilled(prefill);
        }
        usage.reasoning_tokens =
            usage.reasoning_tokens.map(|tokens| tokens + delta.reasoning_tokens);
        self.in_chunks(prompt)
    }

    /// The prompt's usage so far, if the client wants it in every chunk.
    pub(crate) fn in_chunks(&self, prompt: usize) -> Option<Usage> {
        self.options.continuous_usage.then(|| self.usages[prompt])
    }

    /// All that was counted.
    pub(crate) fn total(&self) -> Usage {
        let mut total = Usage::default();
        self.usages.iter().for_each(|&usage| total += usage);
        total
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        for (explained, usage) in self.explained.iter().zip(&self.usages) {
            self.admission.record.used_by(*explained, *usage);
        }
        self.admission.record.used(self.total());
        self.state.metrics.used(self.total());
    }
}

/// Bytes of events after which no more deltas are looked for before these are sent.
const ENOUGH: usize = 16 << 10;

/// Bytes of memory to write in that a thread keeps.
const MOST_KEPT: usize = 4 * ENOUGH;

/// A streamed answer: its deltas turned into events, of which each item is all that there are at a
/// time. So whoever reads slowly, or several continuations at once, gets them by fewer writes.
pub(crate) struct Events<S, W, E> {
    /// `None` when all has been told.
    running: Option<Running<S, W, E>>,
    /// Events before those of the deltas.
    begin: Vec<u8>,
    /// The epoch in which there was no delta any more.
    pending_in: Option<PollEpoch>,
}

thread_local! {
    /// The buffer in which events are written before they are copied to memory of their size. No
    /// stream keeps buffers of its own.
    static WRITTEN: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

struct Running<S, W, E> {
    deltas: S,
    meter: Meter,
    write: W,
    end: E,
    span: Span,
}

/// The events of an answer. It begins with `begin`. `write` appends what there is to tell of a
/// delta, or of the error that ends the deltas and is the stream's end then; `end` what comes last
/// if no error came, with the usage of all if it is wanted.
pub(crate) fn events<D, S, W, E>(
    begin: Vec<u8>,
    deltas: S,
    meter: Meter,
    write: W,
    end: E,
) -> Events<S, W, E>
where
    S: Stream<Item = Result<D, RequestError>> + Unpin,
    W: FnMut(Result<D, ApiError>, &mut Meter, &mut Vec<u8>) + Unpin,
    E: FnOnce(Option<Usage>, &mut Vec<u8>) + Unpin,
{
    let span = tracing::debug_span!("stream");
    let running = Running { deltas, meter, write, end, span };
    Events { running: Some(running), begin, pending_in: None }
}

impl<D, S, W, E> Stream for Events<S, W, E>
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
        let mut events = WRITTEN.take();
        events.extend_from_slice(&std::mem::take(&mut self.begin));
        let is_over = self.tell(context, &mut events).is_ready();
        let written = (!events.is_empty()).then(|| Bytes::copy_from_slice(&events));
        if events.capacity() <= MOST_KEPT {
            events.clear();
            WRITTEN.set(events);
        }
        match written {
            Some(written) => Poll::Ready(Some(written)),
            None if is_over => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

impl<D, S, W, E> Events<S, W, E>
where
    S: Stream<Item = Result<D, RequestError>> + Unpin,
    W: FnMut(Result<D, ApiError>, &mut Meter, &mut Vec<u8>) + Unpin,
    E: FnOnce(Option<Usage>, &mut Vec<u8>) + Unpin,
{
    /// Appends the events of the deltas that there are, up to [`ENOUGH`]. Ready when all has been
    /// told.
    fn tell(&mut self, context: &mut Context<'_>, events: &mut Vec<u8>) -> Poll<()> {
        while let Some(Running { deltas, meter, write, span, .. }) = &mut self.running {
            if events.len() >= ENOUGH {
                return Poll::Pending;
            }
            let _entered = span.enter();
            match deltas.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(delta))) => write(Ok(delta), meter, events),
                Poll::Ready(Some(Err(error))) => {
                    meter.admission.record.stream_failed(error.to_string());
                    write(Err(HttpError::from(error).error), meter, events);
                    drop(_entered);
                    // What else runs for the answer is aborted.
                    self.running = None;
                }
                Poll::Ready(None) => {
                    drop(_entered);
                    if let Some(ended) = self.running.take() {
                        ended.end(events);
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
        meter.admission.record.finished();
        end(meter.options.include_usage.then(|| meter.total()), events);
    }
}
