//! Counts the tokens of a streamed answer: for `usage` in its chunks, and for metrics and log when it ends or is dropped.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{BoxStream, Stream, StreamExt, unfold};
use tracing::{Instrument, Span};

use crate::admission::Admission;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::openai::{StreamOptions, Usage};
use crate::pipeline::{Attempted, ChoiceDelta, RequestError};
use crate::sse;

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

struct State<D, C, F> {
    deltas: BoxStream<'static, Result<D, RequestError>>,
    meter: Meter,
    to_event: C,
    usage_event: Option<F>,
    has_failed: bool,
    span: Span,
}

/// Events of all deltas that have one, then that of the usage if it is wanted and no error ended the stream.
pub(crate) fn metered<D: Send + 'static>(
    deltas: impl Stream<Item = Result<D, RequestError>> + Send + 'static,
    meter: Meter,
    mut to_event: impl FnMut(D, &mut Meter) -> Option<Bytes> + Send + 'static,
    usage_event: impl FnOnce(Usage) -> Bytes + Send + 'static,
) -> impl Stream<Item = Bytes> + Send {
    let to_event = move |delta: Result<D, ApiError>, meter: &mut Meter| match delta {
        Ok(delta) => to_event(delta, meter),
        Err(error) => Some(sse::error(&error)),
    };
    metered_with_errors(deltas, meter, to_event, usage_event)
}

/// The same where an error has an event of another form.
pub(crate) fn metered_with_errors<D: Send + 'static>(
    deltas: impl Stream<Item = Result<D, RequestError>> + Send + 'static,
    meter: Meter,
    to_event: impl FnMut(Result<D, ApiError>, &mut Meter) -> Option<Bytes> + Send + 'static,
    usage_event: impl FnOnce(Usage) -> Bytes + Send + 'static,
) -> impl Stream<Item = Bytes> + Send {
    let usage_event = meter.options.include_usage.then_some(usage_event);
    let span = tracing::debug_span!("stream").or_current();
    let state = State { deltas: deltas.fuse().boxed(), meter, to_event, usage_event, has_failed: false, span };
    unfold(state, |mut state| {
        let span = state.span.clone();
        async move {
            loop {
                let event = match state.deltas.next().await {
                    Some(delta) => {
                        let delta = delta.map_err(|error| {
                            (state.usage_event, state.has_failed) = (None, true);
                            state.meter.admission.record.broke(error.to_string());
                            ApiError::from(error)
                        });
                        match (state.to_event)(delta, &mut state.meter) {
                            Some(event) => event,
                            None => continue,
                        }
                    }
                    None => {
                        if !state.has_failed {
                            state.meter.admission.record.finished();
                        }
                        (state.usage_event.take()?)(state.meter.total())
                    }
                };
                return Some((event, state));
            }
        }
        .instrument(span)
    })
}
