//! The answer to a request that was passed on, as it comes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use chiasm_api::forward::{Ending, EventRelay};
use chiasm_api::openai::Usage;
use chiasm_api::{StreamApi, StreamOutcome};
use chiasm_backend::{Death, Forwarded, JobError};
use chiasm_fleet::Worker;
use chiasm_pipeline::{Cause, Deadline, Deadlines, RequestError, ServerAnswer};
use chiasm_request::RouteOutcome;
use chiasm_router::Reservation;
use futures_util::stream::{BoxStream, Stream, StreamExt};
use serde_json::Value;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::admission::Admission;
use crate::endpoint_state::EndpointState;
use crate::error::HttpError;
use crate::paths::ModelEndpoint;
use crate::poll_epoch::PollEpoch;
use crate::routing_headers::routing_headers;

/// Bytes at the end of an answer in which its usage is looked for.
const TAIL: usize = 8 << 10;

/// The answer as it comes.
struct Passage {
    state: Arc<EndpointState>,
    admission: Admission,
    reservation: Reservation,
    server: Arc<Worker>,
    attempted: RouteOutcome,
    /// The tokens of the prompt, where the server has to count as many.
    foreseen: Option<usize>,
    arrived: Instant,
    deadlines: Deadlines,
    /// The timer of the next deadline. It is reset only for another deadline, as a reset costs more
    /// than most pieces.
    alarm: Option<Pin<Box<Sleep>>>,
    body: BoxStream<'static, Result<Bytes, JobError>>,
    /// The API and the events of a stream; `None` for an answer in one piece.
    events: Option<Events>,
    /// The last bytes of the answer so far, at most [`TAIL`].
    tail: BytesMut,
}

/// The events of a streamed answer.
struct Events {
    api: StreamApi,
    relay: EventRelay,
}

/// The answer until it ends or breaks off. The server is released then, even if the client still
/// has to read the rest.
struct Running {
    passage: Option<Passage>,
    /// The turn in which the body had nothing more. The body is not polled again in that turn: a
    /// body that joins pieces takes a second poll as a sign that all other tasks have run.
    pending_in: Option<PollEpoch>,
}

/// Builds the response to the client.
pub(super) fn response(
    endpoint: ModelEndpoint,
    state: Arc<EndpointState>,
    admission: Admission,
    passed: ServerAnswer,
    arrived: Instant,
) -> Response {
    let ServerAnswer { reservation, server, route: attempted, prompt_tokens: foreseen, answer } =
        passed;
    let Forwarded { status, content_type, body } = answer;
    let is_stream =
        content_type.as_deref().is_some_and(|kind| kind.starts_with("text/event-stream"));
    if is_stream {
        admission.record.streamed();
    }
    admission.record.attempted(attempted);
    let deadlines = Deadlines::of(arrived, &state.pipeline.limits);
    let tail = BytesMut::new();
    let api = endpoint.stream_api();
    let events = is_stream.then(|| Events { api, relay: EventRelay::new(api) });
    let passage = Passage {
        state,
        admission,
        reservation,
        server,
        attempted,
        foreseen,
        arrived,
        deadlines,
        alarm: None,
        body,
        events,
        tail,
    };
    let mut response =
        Response::new(Body::from_stream(Running { passage: Some(passage), pending_in: None }));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    let headers = response.headers_mut();
    if let Some(kind) = content_type.and_then(|kind| HeaderValue::from_str(&kind).ok()) {
        headers.insert(header::CONTENT_TYPE, kind);
    }
    if is_stream {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    routing_headers(headers, &attempted);
    response
}

/// An answer broke off: its connection does, too.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off: {0}")]
struct BrokeOff(String);

impl Stream for Running {
    type Item = Result<Bytes, BrokeOff>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.pending_in.is_some() && self.pending_in == PollEpoch::current() {
            return Poll::Pending;
        }
        let Running { passage: running, pending_in } = &mut *self;
        let Some(passage) = running else { return Poll::Ready(None) };
        let last = loop {
            let next = match passage.body.poll_next_unpin(context) {
                Poll::Ready(next) => next,
                Poll::Pending => {
                    *pending_in = PollEpoch::current();
                    ready!(passage.poll_alarm(context));
                    // The stream goes on in this turn: its end may be polled for now.
                    *pending_in = None;
                    break passage.timed_out();
                }
            };
            match next {
                Some(Ok(piece)) => {
                    if let Some(piece) = passage.pass_on(piece) {
                        return Poll::Ready(Some(Ok(piece)));
                    }
                }
                None => break passage.ended(),
                Some(Err(error)) => break passage.failed(&error),
            }
        };
        *running = None;
        Poll::Ready(last)
    }
}

impl Passage {
    /// Polls the timer of the next deadline; ready when the deadline has passed.
    fn poll_alarm(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = self.deadline().map(|deadline| deadline.at) else {
            return Poll::Pending;
        };
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if alarm.deadline() != deadline {
            alarm.as_mut().reset(deadline);
        }
        alarm.as_mut().poll(context)
    }

    fn deadline(&self) -> Option<Deadline> {
        let Deadlines { first_token, end } = self.deadlines;
        if self.attempted.first_token.is_none() { first_token } else { end }
    }

    /// Adds a piece. Returns the bytes that can go to the client now.
    fn pass_on(&mut self, piece: Bytes) -> Option<Bytes> {
        let piece = match &mut self.events {
            Some(Events { relay, .. }) => {
                let piece = relay.push(piece)?;
                // Clients may leave behind the last event, before the server ends the body.
                self.record_outcome(None);
                piece
            }
            None => piece,
        };
        self.came(&piece);
        Some(piece)
    }

    fn came(&mut self, bytes: &Bytes) {
        if self.attempted.first_token.is_none() {
            let after = self.arrived.elapsed();
            self.attempted.first_token = Some(after);
            self.admission.record.first_token(after);
            self.reservation.first_token();
            self.state.pipeline.metrics.answer_began(after);
        }
        let kept = bytes.len().min(TAIL);
        let over = (self.tail.len() + kept).saturating_sub(TAIL);
        drop(self.tail.split_to(over));
        self.tail.extend_from_slice(&bytes[bytes.len() - kept..]);
    }

    /// Handles the end of the server's answer. Returns the last item for the client.
    fn ended(&mut self) -> Option<Result<Bytes, BrokeOff>> {
        let rest = self.events.as_mut().and_then(|Events { relay, .. }| relay.finish());
        rest.iter().for_each(|rest| self.came(rest));
        if self.ending(true) != Ending::Whole {
            let reason = "it ended its answer before the last event".to_owned();
            return Some(self.broke(reason, &broke_off()));
        }
        self.finished();
        rest.map(Ok)
    }

    /// Ends the answer because a deadline has passed. Returns the last item for the client.
    fn timed_out(&mut self) -> Option<Result<Bytes, BrokeOff>> {
        let error = self.deadline().map_or_else(broke_off, |deadline| deadline.passed());
        self.cut(error.to_string(), &error)
    }

    /// Ends the answer because it can't be read any more. Returns the last item for the client,
    /// without the server's address.
    fn failed(&mut self, error: &JobError) -> Option<Result<Bytes, BrokeOff>> {
        self.cut(error.to_string(), &broke_off())
    }

    /// Ends an answer of which nothing more comes. A stream whose last event was passed on is whole
    /// all the same.
    fn cut(&mut self, reason: String, error: &RequestError) -> Option<Result<Bytes, BrokeOff>> {
        if self.events.is_some() && self.ending(false) == Ending::Whole {
            self.finished();
            return None;
        }
        Some(self.broke(reason, error))
    }

    /// Returns the state of a stream. For other answers HTTP itself tells whether they are whole.
    fn ending(&self, is_clean: bool) -> Ending {
        self.events.as_ref().map_or(Ending::Whole, |events| events.relay.ending(is_clean))
    }

    /// Records how the server has ended its stream; `default` if no event ended it.
    fn record_outcome(&self, default: Option<&StreamOutcome>) {
        let outcome = self.events.as_ref().and_then(|events| events.relay.outcome()).or(default);
        match outcome {
            Some(StreamOutcome::Finished) => self.admission.record.finished(),
            Some(StreamOutcome::Failed(words)) => {
                self.admission
                    .record
                    .stream_failed(format!("the server ended its stream with an error: {words}"));
            }
            None => {}
        }
    }

    fn finished(&mut self) {
        if self.events.is_some() {
            self.record_outcome(Some(&StreamOutcome::Finished));
        }
        let Some(Counted { usage, tells_cached }) = counted(&self.tail) else { return };
        self.state.metrics.used(usage);
        self.admission.record.used(usage);
        if let Some(foreseen) = self.foreseen.filter(|_| usage.prompt_tokens > 0) {
            self.compare(foreseen, usage, tells_cached);
        }
    }

    /// Compares the server's counts with the foreseen prompt.
    fn compare(&self, foreseen: usize, usage: Usage, tells_cached: bool) {
        if usage.prompt_tokens != foreseen {
            let counted = usage.prompt_tokens;
            self.server.backend.distrust(format!(
                "it counts {counted} tokens in a prompt of which {foreseen} were expected"
            ));
        } else if tells_cached {
            let block_size = self.reservation.block_size.get();
            // The engine computes the last token of a prompt in any case.
            let most = foreseen.saturating_sub(1) / block_size;
            let predicted = self.attempted.overlap_blocks.min(most);
            let found = usage.cached_tokens / block_size;
            self.state.pipeline.metrics.overlap_found(predicted, found, self.reservation.knowledge);
        }
    }

    /// Returns the last item of an answer that broke off: an error event if whole events precede
    /// it.
    fn broke(&self, reason: String, error: &RequestError) -> Result<Bytes, BrokeOff> {
        self.admission.record.stream_failed(reason.clone());
        match &self.events {
            Some(Events { api, relay }) if self.ending(false) == Ending::Lacking => {
                let mut end = Vec::new();
                api.write_failure(
                    &mut end,
                    &HttpError::from(error.clone()).error,
                    relay.sequence_number(),
                );
                Ok(end.into())
            }
            _ => Err(BrokeOff(reason)),
        }
    }
}

fn broke_off() -> RequestError {
    Cause::EngineGone(Death::new("it broke off its answer")).into()
}

/// The token counts of an answer, as its server tells them.
#[derive(Clone, Copy)]
struct Counted {
    usage: Usage,
    /// The answer has a count of cached tokens.
    tells_cached: bool,
}

/// Parses the last `usage` of an answer, with the field names of any API.
fn counted(tail: &[u8]) -> Option<Counted> {
    const FIELD: &[u8] = b"\"usage\":";
    let at = tail.windows(FIELD.len()).rposition(|window| window == FIELD)?;
    let mut values =
        serde_json::Deserializer::from_slice(&tail[at + FIELD.len()..]).into_iter::<Value>();
    let usage = values.next()?.ok()?;
    let count = |names: &[&str]| {
        Some(names.iter().find_map(|name| usage.pointer(name)?.as_u64())? as usize)
    };
    let cached = count(&[
        "/prompt_tokens_details/cached_tokens",
        "/input_tokens_details/cached_tokens",
        "/cache_read_input_tokens",
    ]);
    let usage = Usage {
        prompt_tokens: count(&["/prompt_tokens", "/input_tokens"]).unwrap_or(0),
        completion_tokens: count(&["/completion_tokens", "/output_tokens"]).unwrap_or(0),
        cached_tokens: cached.unwrap_or(0),
        ..Usage::default()
    };
    Some(Counted { usage, tells_cached: cached.is_some() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_found_at_the_end_of_any_answer() {
        let streamed = b"data: {\"choices\":[]}\n\ndata: {\"usage\":null}\n\ndata: {\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\
            \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";
        let Counted { usage, tells_cached } = counted(streamed).unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, tells_cached),
            (7, 3, 4, true)
        );
        let Counted { usage, tells_cached } =
            counted(br#"{"type":"message","usage":{"input_tokens":2,"output_tokens":1}}"#).unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens, tells_cached), (2, 1, false));
        assert!(
            ["{}", "\"usage\":", "\"usage\":{\"prom"]
                .iter()
                .all(|tail| counted(tail.as_bytes()).is_none())
        );
    }
}
