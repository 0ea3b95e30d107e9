//! The relayed answer to a forwarded request.

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
use chiasm_backend::{DeathReason, ForwardResponse, JobError};
use chiasm_fleet::Worker;
use chiasm_pipeline::{Cause, Deadline, Deadlines, ForwardedAnswer, RequestError};
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

/// The number of bytes at the end of an answer in which its usage is looked for.
const TAIL_BYTES: usize = 8 << 10;

/// An answer that is relayed as it arrives.
struct ProxiedResponse {
    state: Arc<EndpointState>,
    admission: Admission,
    reservation: Reservation,
    server: Arc<Worker>,
    route: RouteOutcome,
    /// The predicted number of prompt tokens, if the server has to count as many.
    predicted_tokens: Option<usize>,
    arrived: Instant,
    deadlines: Deadlines,
    /// The timer of the next deadline. It is only reset for another deadline, as a reset costs more
    /// than relaying most pieces.
    alarm: Option<Pin<Box<Sleep>>>,
    body: BoxStream<'static, Result<Bytes, JobError>>,
    /// The API and the events of a stream; `None` for an answer in one piece.
    events: Option<Events>,
    /// The last bytes of the answer so far, at most [`TAIL_BYTES`].
    tail: BytesMut,
}

/// The events of a streamed answer.
struct Events {
    api: StreamApi,
    relay: EventRelay,
}

/// The body of the response to the client.
///
/// The proxied response is dropped when the answer ends or breaks off, which releases the server
/// even if the client has not read the rest.
struct ResponseBody {
    response: Option<ProxiedResponse>,
    /// The epoch in which the server's body was last pending. It is not polled again in that epoch:
    /// a body that joins pieces takes a second poll as a sign that all other tasks have run.
    pending_in: Option<PollEpoch>,
}

/// Builds the response to the client.
pub(super) fn response(
    endpoint: ModelEndpoint,
    state: Arc<EndpointState>,
    admission: Admission,
    answer: ForwardedAnswer,
    arrived: Instant,
) -> Response {
    let ForwardedAnswer { reservation, server, route, prompt_tokens: predicted_tokens, answer } =
        answer;
    let ForwardResponse { status, content_type, body } = answer;
    let is_stream =
        content_type.as_deref().is_some_and(|kind| kind.starts_with("text/event-stream"));
    if is_stream {
        admission.record.start_stream();
    }
    admission.record.set_route(route);
    let deadlines = Deadlines::new(arrived, &state.pipeline.limits);
    let tail = BytesMut::new();
    let api = endpoint.stream_api();
    let events = is_stream.then(|| Events { api, relay: EventRelay::new(api) });
    let proxied = ProxiedResponse {
        state,
        admission,
        reservation,
        server,
        route,
        predicted_tokens,
        arrived,
        deadlines,
        alarm: None,
        body,
        events,
        tail,
    };
    let mut response = Response::new(Body::from_stream(ResponseBody {
        response: Some(proxied),
        pending_in: None,
    }));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    let headers = response.headers_mut();
    if let Some(kind) = content_type.and_then(|kind| HeaderValue::from_str(&kind).ok()) {
        headers.insert(header::CONTENT_TYPE, kind);
    }
    if is_stream {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    }
    routing_headers(headers, &route);
    response
}

/// The error of an answer that broke off. It also breaks off the client's connection.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off: {0}")]
struct BrokeOff(String);

impl Stream for ResponseBody {
    type Item = Result<Bytes, BrokeOff>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.pending_in.is_some() && self.pending_in == PollEpoch::current() {
            return Poll::Pending;
        }
        let ResponseBody { response, pending_in } = &mut *self;
        let Some(proxied) = response else { return Poll::Ready(None) };
        let last = loop {
            let next = match proxied.body.poll_next_unpin(context) {
                Poll::Ready(next) => next,
                Poll::Pending => {
                    *pending_in = PollEpoch::current();
                    ready!(proxied.poll_alarm(context));
                    // The stream continues in this epoch, as its end may be polled now.
                    *pending_in = None;
                    break proxied.timed_out();
                }
            };
            match next {
                Some(Ok(piece)) => {
                    if let Some(piece) = proxied.relay(piece) {
                        return Poll::Ready(Some(Ok(piece)));
                    }
                }
                None => break proxied.ended(),
                Some(Err(error)) => break proxied.failed(&error),
            }
        };
        *response = None;
        Poll::Ready(last)
    }
}

impl ProxiedResponse {
    /// Polls the timer of the next deadline. Ready when the deadline has passed.
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
        if self.route.first_token.is_none() { first_token } else { end }
    }

    /// Adds a piece. Returns the bytes that can be sent to the client now.
    fn relay(&mut self, piece: Bytes) -> Option<Bytes> {
        let piece = match &mut self.events {
            Some(Events { relay, .. }) => {
                let piece = relay.push(piece)?;
                // Clients may disconnect after the last event, before the server ends the body.
                self.record_outcome(None);
                piece
            }
            None => piece,
        };
        self.record_bytes(&piece);
        Some(piece)
    }

    /// Records the first token's time, and keeps the tail of the answer.
    fn record_bytes(&mut self, bytes: &Bytes) {
        if self.route.first_token.is_none() {
            let after = self.arrived.elapsed();
            self.route.first_token = Some(after);
            self.admission.record.set_first_token(after);
            self.reservation.first_token();
            self.state.pipeline.metrics.count_first_content(after);
        }
        let kept = bytes.len().min(TAIL_BYTES);
        let excess = (self.tail.len() + kept).saturating_sub(TAIL_BYTES);
        drop(self.tail.split_to(excess));
        self.tail.extend_from_slice(&bytes[bytes.len() - kept..]);
    }

    /// Handles the end of the server's answer. Returns the last item for the client.
    fn ended(&mut self) -> Option<Result<Bytes, BrokeOff>> {
        let rest = self.events.as_mut().and_then(|Events { relay, .. }| relay.finish());
        rest.iter().for_each(|rest| self.record_bytes(rest));
        if self.ending(true) != Ending::Complete {
            let reason = "the server ended its answer before the last event".to_owned();
            return Some(self.break_off(reason, &broke_off_error()));
        }
        self.finished();
        rest.map(Ok)
    }

    /// Ends the answer because a deadline has passed. Returns the last item for the client.
    fn timed_out(&mut self) -> Option<Result<Bytes, BrokeOff>> {
        let error = self.deadline().map_or_else(broke_off_error, |deadline| deadline.to_error());
        self.cut(error.to_string(), &error)
    }

    /// Ends the answer because the server's body failed. Returns the last item for the client,
    /// without the server's address.
    fn failed(&mut self, error: &JobError) -> Option<Result<Bytes, BrokeOff>> {
        self.cut(error.to_string(), &broke_off_error())
    }

    /// Ends an answer whose rest can't be read. A stream whose last event was relayed is complete
    /// anyway.
    fn cut(&mut self, reason: String, error: &RequestError) -> Option<Result<Bytes, BrokeOff>> {
        if self.events.is_some() && self.ending(false) == Ending::Complete {
            self.finished();
            return None;
        }
        Some(self.break_off(reason, error))
    }

    /// Returns how a stream ended. For other answers HTTP itself shows whether they are complete.
    fn ending(&self, is_clean: bool) -> Ending {
        self.events.as_ref().map_or(Ending::Complete, |events| events.relay.ending(is_clean))
    }

    /// Records how the server ended its stream; `default` if no event ended it.
    fn record_outcome(&self, default: Option<&StreamOutcome>) {
        let outcome = self.events.as_ref().and_then(|events| events.relay.outcome()).or(default);
        match outcome {
            Some(StreamOutcome::Finished) => self.admission.record.finish_stream(),
            Some(StreamOutcome::Failed(message)) => {
                self.admission
                    .record
                    .fail_stream(format!("the server ended its stream with an error: {message}"));
            }
            None => {}
        }
    }

    fn finished(&mut self) {
        if self.events.is_some() {
            self.record_outcome(Some(&StreamOutcome::Finished));
        }
        let Some(CountedTokens { usage, has_cached }) = parse_usage(&self.tail) else { return };
        self.state.metrics.count_tokens(usage);
        self.admission.record.set_usage(usage);
        if let Some(predicted_tokens) = self.predicted_tokens.filter(|_| usage.prompt_tokens > 0) {
            self.compare(predicted_tokens, usage, has_cached);
        }
    }

    /// Compares the server's counts with the prediction.
    fn compare(&self, predicted_tokens: usize, usage: Usage, has_cached: bool) {
        if usage.prompt_tokens != predicted_tokens {
            let counted = usage.prompt_tokens;
            self.server.backend.distrust(format!(
                "the server counts {counted} tokens in a prompt, {predicted_tokens} were expected"
            ));
        } else if has_cached {
            let block_size = self.reservation.block_size.get();
            // The engine always computes the last token of a prompt.
            let max_overlap = predicted_tokens.saturating_sub(1) / block_size;
            let predicted = self.route.overlap_blocks.min(max_overlap);
            let found = usage.cached_tokens / block_size;
            self.state.pipeline.metrics.count_overlap_error(
                predicted,
                found,
                self.reservation.knowledge,
            );
        }
    }

    /// Returns the last item of an answer that broke off: an error event if the events before it
    /// are whole, otherwise an error.
    fn break_off(&self, reason: String, error: &RequestError) -> Result<Bytes, BrokeOff> {
        self.admission.record.fail_stream(reason.clone());
        match &self.events {
            Some(Events { api, relay }) if self.ending(false) == Ending::Truncated => {
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

fn broke_off_error() -> RequestError {
    Cause::EngineGone(DeathReason::new("the server broke off its answer")).into()
}

/// The token counts that a server reports in an answer.
#[derive(Clone, Copy)]
struct CountedTokens {
    usage: Usage,
    /// `true` if the answer has a count of cached tokens.
    has_cached: bool,
}

/// Parses the last `usage` of an answer, with the field names of any API.
fn parse_usage(tail: &[u8]) -> Option<CountedTokens> {
    const FIELD: &[u8] = b"\"usage\":";
    let start = tail.windows(FIELD.len()).rposition(|window| window == FIELD)? + FIELD.len();
    let mut values = serde_json::Deserializer::from_slice(&tail[start..]).into_iter::<Value>();
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
    Some(CountedTokens { usage, has_cached: cached.is_some() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_parsed_from_the_end_of_an_answer() {
        let streamed = b"data: {\"choices\":[]}\n\ndata: {\"usage\":null}\n\n\
            data: {\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\
            \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";
        let CountedTokens { usage, has_cached } = parse_usage(streamed).unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, has_cached),
            (7, 3, 4, true)
        );
        let whole = br#"{"type":"message","usage":{"input_tokens":2,"output_tokens":1}}"#;
        let CountedTokens { usage, has_cached } = parse_usage(whole).unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens, has_cached), (2, 1, false));
        assert!(
            ["{}", "\"usage\":", "\"usage\":{\"prom"]
                .iter()
                .all(|tail| parse_usage(tail.as_bytes()).is_none())
        );
    }
}
