//! Counts the tokens of a streamed answer: for `usage` in its chunks, and for the metrics when it ends or is dropped.

use std::sync::Arc;

use futures_util::stream::{BoxStream, Stream, StreamExt, unfold};
use serde_json::Value;

use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::openai::{StreamOptions, Usage};
use crate::pipeline::ChoiceDelta;
use crate::routes::Held;

/// The count of one streamed answer. Holds the request's place among those in flight.
pub(crate) struct Meter {
    frontend: Arc<Frontend>,
    options: StreamOptions,
    usages: Vec<Usage>,
    _held: Held,
}

impl Meter {
    /// `usages` are those of each prompt before any new token.
    pub(crate) fn new(frontend: &Arc<Frontend>, options: StreamOptions, usages: Vec<Usage>, held: Held) -> Self {
        Self { frontend: frontend.clone(), options, usages, _held: held }
    }

    /// Counts a delta, and writes the prompt's usage so far into its chunk if the client wants that.
    pub(crate) fn count(&mut self, prompt: usize, delta: &ChoiceDelta, chunk: &mut Value) {
        let usage = &mut self.usages[prompt];
        usage.completion_tokens += delta.tokens.len();
        if self.options.continuous_usage {
            chunk["usage"] = usage.to_json();
        }
    }

    fn total(&self) -> Usage {
        let mut total = Usage::default();
        self.usages.iter().for_each(|&usage| total += usage);
        total
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.frontend.metrics.used(self.total());
    }
}

struct State<D, C, F> {
    deltas: BoxStream<'static, Result<D, ApiError>>,
    meter: Meter,
    to_chunk: C,
    usage_chunk: Option<F>,
}

/// Chunks of all deltas, then the usage chunk if it is wanted and no error ended the stream.
pub(crate) fn metered<D: 'static>(
    deltas: impl Stream<Item = Result<D, ApiError>> + Send + 'static,
    meter: Meter,
    to_chunk: impl FnMut(D, &mut Meter) -> Value + Send + 'static,
    usage_chunk: impl FnOnce(Usage) -> Value + Send + 'static,
) -> impl Stream<Item = Result<Value, ApiError>> + Send {
    let usage_chunk = meter.options.include_usage.then_some(usage_chunk);
    let state = State { deltas: deltas.fuse().boxed(), meter, to_chunk, usage_chunk };
    unfold(state, |mut state| async {
        match state.deltas.next().await {
            Some(Ok(delta)) => {
                let chunk = (state.to_chunk)(delta, &mut state.meter);
                Some((Ok(chunk), state))
            }
            Some(Err(error)) => {
                state.usage_chunk = None;
                Some((Err(error), state))
            }
            None => {
                let usage_chunk = state.usage_chunk.take()?;
                Some((Ok(usage_chunk(state.meter.total())), state))
            }
        }
    })
}
