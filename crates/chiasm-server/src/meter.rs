//! A streamed answer on its way to the client, and the count of its tokens: for `usage` in its chunks, and for metrics and log when
//! it ends or is dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use futures_util::stream::{Stream, StreamExt};
use tracing::Span;

use crate::admission::Admission;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::openai::{StreamOptions, Usage};
use crate::pipeline::{Attempted, ChoiceDelta, RequestError};

/// The count of one streamed answer. Holds the request's place among those in flight.
pub(crate) struct Meter {
    frontend: Arc<Frontend>,
    options: StreamOptions,
    usages: Vec<Usage>,
    admission: Admission,
}

impl Meter {
    /// The count of an answer whose prompts went where `attempted` says, before any new token. `reads_reasoning`: whether some of them
    /// may be reasoning.
    pub(crate) fn new(
        frontend: &Arc<Frontend>,
        options: StreamOptions,
        attempted: Vec<Attempted>,
        admission: Admission,
        reads_reasoning: bool,
    ) -> Self {
        admission.record.streamed();
        let reasoning_tokens = reads_reasoning.then_some(0);
        attempted.iter().for_each(|attempted| admission.record.attempted(*attempted));
        let usage = |attempted: &Attempted| Usage {
            prompt_tokens: attempted.prompt_tokens,
            completion_tokens: 0,
            cached_tokens: attempted.prefill.cached_tokens,
            reasoning_tokens,
        };
        let (frontend, usages) = (frontend.clone(), attempted.iter().map(usage).collect());
        Self { frontend, options, usages, admission }
    }

    /// Counts a delta. The prompt's usage so far, if the client wants it in every chunk.
    pub(crate) fn count(&mut self, prompt: usize, delta: &ChoiceDelta) -> Option<Usage> {
        let usage = &mut self.usages[prompt];
        usage.completion_tokens += delta.tokens.len();
        usage.cached_tokens = delta.cached_tokens.unwrap_or(usage.cached_tokens);
        usage.reasoning_tokens = usage.reasoning_tokens.map(|tokens| tokens + delta.reasoning_tokens);
        self.options.continuous_usage.then_some(*usage)
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
        self.admission.record.used(self.total());
        self.frontend.metrics.used(self.total());
    }
}

/// Bytes of events after which no more deltas are looked for before these are sent.
const ENOUGH: usize = 16 << 10;

/// A streamed answer: its deltas turned into events, of which each item is all that there are at a time. So whoever reads slowly,
/// or several continuations at once, gets them by fewer writes.
pub(crate) struct Events<S, W, E> {
    /// `None` when all has been told.
    running: Option<Running<S, W, E>>,
    /// Events that have not been sent.
    events: Vec<u8>,
    /// Where they are sent from: memory that is used again once it was sent.
    memory: BytesMut,
}

struct Running<S, W, E> {
    deltas: S,
    meter: Meter,
    write: W,
    end: E,
    has_failed: bool,
    span: Span,
}

/// The events of an answer. It begins with `begin`. `write` appends what there is to tell of a delta, or of the error that ends
/// the deltas; `end` what comes last, with the usage of all if it is wanted and no error came.
pub(crate) fn events<D, S, W, E>(begin: Vec<u8>, deltas: S, meter: Meter, write: W, end: E) -> Events<S, W, E>
where
    S: Stream<Item = Result<D, RequestError>> + Unpin,
    W: FnMut(Result<D, ApiError>, &mut Meter, &mut Vec<u8>) + Unpin,
    E: FnOnce(Option<Usage>, &mut Vec<u8>) + Unpin,
{
    let span = tracing::debug_span!("stream");
    let running = Running { deltas, meter, write, end, has_failed: false, span };
    Events { running: Some(running), events: begin, memory: BytesMut::new() }
}

impl<D, S, W, E> Stream for Events<S, W, E>
where
    S: Stream<Item = Result<D, RequestError>> + Unpin,
    W: FnMut(Result<D, ApiError>, &mut Meter, &mut Vec<u8>) + Unpin,
    E: FnOnce(Option<Usage>, &mut Vec<u8>) + Unpin,
{
    type Item = Bytes;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Self { running, events, memory } = self.get_mut();
        while let Some(Running { deltas, meter, write, has_failed, span, .. }) = running
            && events.len() < ENOUGH
        {
            let _entered = span.enter();
            match deltas.poll_next_unpin(context) {
                Poll::Ready(Some(delta)) => {
                    let delta = delta.map_err(|error| {
                        *has_failed = true;
                        meter.admission.record.broke(error.to_string());
                        ApiError::from(error)
                    });
                    write(delta, meter, events);
                }
                Poll::Ready(None) => {
                    drop(_entered);
                    if let Some(ended) = running.take() {
                        ended.end(events);
                    }
                }
                Poll::Pending if events.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        if events.is_empty() {
            return Poll::Ready(None);
        }
        memory.extend_from_slice(events);
        events.clear();
        Poll::Ready(Some(memory.split().freeze()))
    }
}

impl<S, W, E: FnOnce(Option<Usage>, &mut Vec<u8>)> Running<S, W, E> {
    fn end(self, events: &mut Vec<u8>) {
        let Self { meter, end, has_failed, .. } = self;
        if !has_failed {
            meter.admission.record.finished();
        }
        end((meter.options.include_usage && !has_failed).then(|| meter.total()), events);
    }
}
