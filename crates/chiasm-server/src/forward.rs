//! Requests that are passed on as they came, to servers that take them so. Where one goes is decided by its text and media items alone:
//! nothing of it is refused, changed or understood but the model's name.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use chiasm_backend::{Death, Delivered, Forward, Forwarded, JobError, KeyScheme, Prefill};
use chiasm_kv::{BlockKey, PromptBlocks};
use chiasm_media::Charge;
use chiasm_router::{Reservation, RouteRequest};
use chiasm_types::{PlanClassId, TokenId, WorkerId};
use futures_util::stream::{BoxStream, Stream, StreamExt};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout_at};

use crate::admission::{Admission, Admitted};
use crate::answer::check_model;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::metrics::Retry;
use crate::openai::{Intake, RequestBody, Usage};
use crate::pipeline::{Asked, Attempted, Caller, Cause, Deadlines, MAX_MOVES, RequestError, Took, keys_for, within};
use crate::routes::routing_headers;
use crate::sse;

/// The parts of a body that come before each other in a prompt, whatever their order in the body is.
const PARTS: [&str; 6] = ["tools", "system", "instructions", "messages", "input", "prompt"];
/// Pieces of four bytes that a media item counts for: about the tokens of a picture.
const PIECES_OF_ITEM: usize = 1024;
/// How URLs begin that are media items themselves.
const DATA: &str = "data:";
/// Bytes at the end of an answer in which its usage is looked for.
const TAIL: usize = 8 << 10;

/// A body that is passed on.
pub(crate) struct ForwardBody {
    body: Bytes,
    /// Where the model's name is in it, with its quotes.
    model: Option<Range<usize>>,
    name: Option<String>,
    /// The prompt in pieces of four bytes.
    pieces: Vec<TokenId>,
}

/// Finds a field without reading the others.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow, default, deserialize_with = "as_it_is")]
    model: Option<&'a RawValue>,
}

/// Null is a value here.
fn as_it_is<'de: 'a, 'a, D: Deserializer<'de>>(value: D) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(value).map(Some)
}

impl RequestBody for ForwardBody {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let body = intake.body();
        let Value::Object(fields) = intake.read::<Value>()? else {
            return Err(ApiError::invalid("body", "must be a JSON object"));
        };
        let head: Head<'_> = serde_json::from_slice(&body).map_err(|error| ApiError::invalid_json(&error))?;
        let model = head.model.map(|model| {
            let begin = model.get().as_ptr() as usize - body.as_ptr() as usize;
            begin..begin + model.get().len()
        });
        let name = fields.get("model").and_then(Value::as_str).map(str::to_owned);
        intake.take_for("body", body.len() as u64)?;
        let pieces = pieces(&fields);
        Ok((Self { body, model, name, pieces }, intake.into_charge()))
    }
}

/// What a request's prompt is made of, in pieces of four bytes. Each text begins with a piece, so that what is added to a conversation
/// leaves the pieces before it as they are.
fn pieces(fields: &Map<String, Value>) -> Vec<TokenId> {
    let mut pieces = Vec::new();
    for part in PARTS {
        if let Some(value) = fields.get(part) {
            push_text(&mut pieces, part);
            push(&mut pieces, value);
        }
    }
    pieces
}

fn push(pieces: &mut Vec<TokenId>, value: &Value) {
    match value {
        Value::String(text) if text.starts_with(DATA) => push_item(pieces, text),
        Value::String(text) => push_text(pieces, text),
        Value::Array(values) => values.iter().for_each(|value| push(pieces, value)),
        Value::Object(fields) => {
            for (name, value) in fields {
                push_text(pieces, name);
                push(pieces, value);
            }
        }
        other => push_text(pieces, &other.to_string()),
    }
}

fn push_text(pieces: &mut Vec<TokenId>, text: &str) {
    let piece = |bytes: &[u8]| {
        let mut piece = [0; 4];
        piece[..bytes.len()].copy_from_slice(bytes);
        TokenId(u32::from_le_bytes(piece))
    };
    pieces.extend(text.as_bytes().chunks(4).map(piece));
}

/// Equal items are equal pieces, and others differ from the first piece on.
fn push_item(pieces: &mut Vec<TokenId>, url: &str) {
    let mut bytes = [0; 4 * PIECES_OF_ITEM];
    blake3::Hasher::new().update(url.as_bytes()).finalize_xof().fill(&mut bytes);
    let piece = |bytes: &[u8]| bytes.try_into().map(u32::from_le_bytes).map(TokenId).ok();
    pieces.extend(bytes.chunks_exact(4).filter_map(piece));
}

/// A request that is looking for its server.
struct Passing<'a> {
    frontend: &'a Arc<Frontend>,
    caller: &'a Caller,
    class: PlanClassId,
    keys: Vec<BlockKey>,
    pieces: usize,
    forward: Forward,
    deadlines: Deadlines,
    exclude: Vec<WorkerId>,
    lost: usize,
}

/// A server that has begun to answer.
struct Passed {
    reservation: Reservation,
    attempted: Attempted,
    answer: Forwarded,
}

/// Passes on a request that was sent to this path.
pub(crate) async fn forward(
    path: &'static str,
    State(frontend): State<Arc<Frontend>>,
    request: Admitted<ForwardBody>,
) -> Result<Response, ApiError> {
    let Admitted { caller, admission, body } = request;
    let (ForwardBody { body, model, name, pieces }, charge) = (body.request, body.charge);
    if check_model(&frontend, name.as_deref())?.is_some() {
        return Err(ApiError::invalid(
            "model",
            "is an adapter, and none are used at servers that somebody else has started",
        ));
    }
    admission.ends_with_client();
    frontend.retries.earn();
    let classes = frontend.fleet.classes();
    let class = classes.iter().find(|class| class.class.keys == KeyScheme::Text);
    let class = class.ok_or_else(|| frontend.told(Cause::NoOtherWorker.into()))?;
    let blocks = PromptBlocks { tokens: &pieces, media: &[], lora: None, salt: None };
    let passing = Passing {
        frontend: &frontend,
        class: class.id,
        keys: keys_for(&class.class, &blocks),
        pieces: pieces.len().max(1),
        forward: Forward { id: caller.id.clone(), path, body, model, trace: caller.trace.clone() },
        deadlines: Deadlines::of(caller.arrived, &frontend.limits),
        exclude: Vec::new(),
        lost: 0,
        caller: &caller,
    };
    drop(pieces);
    let deadlines = passing.deadlines;
    let passed = within(deadlines.first_token, passing.find()).await.and_then(|passed| passed);
    let Passed { reservation, attempted, answer } = passed.map_err(|error| frontend.told(error))?;
    drop(charge);
    Ok(response(frontend.clone(), admission, reservation, attempted, answer, caller.arrived, deadlines))
}

impl Passing<'_> {
    /// Gives the request to one server after the other until one answers.
    async fn find(mut self) -> Result<Passed, RequestError> {
        loop {
            let begun = Instant::now();
            let reservation = self.frontend.fleet.router().select(&RouteRequest {
                class: self.class,
                keys: &self.keys,
                prompt_tokens: self.pieces,
                session: self.caller.session,
                exclude: &self.exclude,
                ..RouteRequest::default()
            });
            let reservation = reservation.map_err(|error| match self.exclude.is_empty() {
                true => RequestError::from(error),
                false => Cause::NoOtherWorker.into(),
            })?;
            let worker = reservation.worker;
            let mut attempted = self.attempted(&reservation, begun);
            self.frontend.metrics.routed(&attempted);
            let answer = match self.frontend.fleet.worker(worker) {
                Some(serving) => serving.backend.forward(self.forward.clone()).await,
                None => Err(JobError::NotTaken(Death::new("it left in this moment"))),
            };
            match answer {
                Ok(answer) => {
                    attempted.hand_off = begun.elapsed();
                    return Ok(Passed { reservation, attempted, answer });
                }
                Err(error) => self.moves_on(worker, error)?,
            }
        }
    }

    /// After a failed try: returns if there is to be another one.
    fn moves_on(&mut self, worker: WorkerId, error: JobError) -> Result<(), RequestError> {
        let metrics = &self.frontend.metrics;
        match error {
            JobError::NotTaken(death) => {
                tracing::debug!(%worker, %death, "a request was not taken");
                metrics.retried(Retry::NotTaken);
            }
            JobError::Dead(death) if self.lost == MAX_MOVES => return Err(Cause::EngineGone(death).into()),
            JobError::Dead(death) if !self.frontend.retries.may_move(self.frontend.slots.limit()) => {
                metrics.retried(Retry::OverBudget);
                return Err(Cause::EngineGone(death).into());
            }
            JobError::Dead(death) => {
                tracing::warn!(%worker, %death, "a server failed before it answered, trying another");
                metrics.retried(Retry::Lost);
                self.lost += 1;
            }
            error => return Err(error.into()),
        }
        self.exclude.push(worker);
        Ok(())
    }

    fn attempted(&self, reservation: &Reservation, begun: Instant) -> Attempted {
        Attempted {
            worker: reservation.worker,
            class: self.class,
            overlap_blocks: reservation.overlap_blocks,
            total_blocks: reservation.total_blocks,
            // Nobody has counted them.
            prompt_tokens: 0,
            delivered: Delivered::default(),
            prefill: Prefill::default(),
            asked: Asked::default(),
            took: Took::default(),
            picked: begun.saturating_duration_since(self.caller.arrived),
            hand_off: Duration::ZERO,
            prefill_wait: None,
            first_token: None,
            moves: self.lost,
            explained: None,
        }
    }
}

/// The answer as it comes.
struct Passage {
    frontend: Arc<Frontend>,
    admission: Admission,
    reservation: Reservation,
    attempted: Attempted,
    arrived: Instant,
    deadlines: Deadlines,
    body: BoxStream<'static, Result<Bytes, JobError>>,
    is_stream: bool,
    /// The end of what has come.
    tail: BytesMut,
}

fn response(
    frontend: Arc<Frontend>,
    admission: Admission,
    reservation: Reservation,
    attempted: Attempted,
    answer: Forwarded,
    arrived: Instant,
    deadlines: Deadlines,
) -> Response {
    let Forwarded { status, content_type, body } = answer;
    let is_stream = content_type.as_deref().is_some_and(|kind| kind.starts_with("text/event-stream"));
    if is_stream {
        admission.record.streamed();
    }
    admission.record.attempted(attempted);
    let tail = BytesMut::new();
    let passage = Passage { frontend, admission, reservation, attempted, arrived, deadlines, body, is_stream, tail };
    let mut response = Response::new(Body::from_stream(passage.into_stream()));
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

impl Passage {
    fn into_stream(self) -> impl Stream<Item = Result<Bytes, BrokeOff>> + Send {
        futures_util::stream::unfold(Some(self), |passage| async move {
            let mut passage = passage?;
            let next = match passage.deadline() {
                Some(deadline) => match timeout_at(deadline, passage.body.next()).await {
                    Ok(next) => next.transpose().map_err(|error| error.to_string()),
                    Err(_) => Err("it took too long".to_owned()),
                },
                None => passage.body.next().await.transpose().map_err(|error| error.to_string()),
            };
            match next {
                Ok(Some(bytes)) => {
                    passage.came(&bytes);
                    Some((Ok(bytes), Some(passage)))
                }
                Ok(None) => {
                    passage.ended();
                    None
                }
                Err(reason) => Some((passage.broke(reason), None)),
            }
        })
    }

    fn deadline(&self) -> Option<Instant> {
        let Deadlines { first_token, end } = self.deadlines;
        let next = if self.attempted.first_token.is_none() { first_token } else { end };
        next.map(|deadline| deadline.at)
    }

    fn came(&mut self, bytes: &Bytes) {
        if self.attempted.first_token.is_none() {
            let after = self.arrived.elapsed();
            self.attempted.first_token = Some(after);
            self.reservation.first_token();
            self.frontend.metrics.answer_began(after);
        }
        let kept = bytes.len().min(TAIL);
        let over = (self.tail.len() + kept).saturating_sub(TAIL);
        drop(self.tail.split_to(over));
        self.tail.extend_from_slice(&bytes[bytes.len() - kept..]);
    }

    fn ended(&self) {
        let usage = usage(&self.tail).unwrap_or_default();
        self.frontend.metrics.used(usage);
        self.admission.record.used(usage);
        if self.is_stream {
            self.admission.record.finished();
        }
    }

    /// What a client is told of an answer that broke off: a stream's has room for words.
    fn broke(&self, reason: String) -> Result<Bytes, BrokeOff> {
        self.admission.record.broke(reason.clone());
        if !self.is_stream {
            return Err(BrokeOff(reason));
        }
        let mut event = Vec::new();
        sse::write_error(&mut event, &ApiError::from(RequestError::from(Cause::EngineGone(Death::new(reason)))));
        Ok(event.into())
    }
}

/// The counts that stand last in an answer, under the names of any of the APIs.
fn usage(tail: &[u8]) -> Option<Usage> {
    const FIELD: &[u8] = b"\"usage\":";
    let at = tail.windows(FIELD.len()).rposition(|window| window == FIELD)?;
    let mut values = serde_json::Deserializer::from_slice(&tail[at + FIELD.len()..]).into_iter::<Value>();
    let told = values.next()?.ok()?;
    let count = |names: &[&str]| names.iter().find_map(|name| told.pointer(name)?.as_u64()).unwrap_or(0) as usize;
    Some(Usage {
        prompt_tokens: count(&["/prompt_tokens", "/input_tokens"]),
        completion_tokens: count(&["/completion_tokens", "/output_tokens"]),
        cached_tokens: count(&[
            "/prompt_tokens_details/cached_tokens",
            "/input_tokens_details/cached_tokens",
            "/cache_read_input_tokens",
        ]),
        reasoning_tokens: None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(body: &Value) -> Vec<TokenId> {
        pieces(body.as_object().unwrap())
    }

    #[test]
    fn what_is_added_to_a_conversation_leaves_what_was_before_it() {
        let picture =
            |data: &str| json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}});
        let first = json!({"role": "user", "content": [picture("AAAA"), {"type": "text", "text": "what?"}]});
        let one = of(&json!({"messages": [first], "max_tokens": 5, "stream": true}));
        let two = of(&json!({"stream": false, "messages": [first, {"role": "assistant", "content": "it is"}]}));
        assert!(two.len() > one.len() && two.starts_with(&one));
        let mut other = first.clone();
        other["content"][0] = picture("AAAB");
        let other = of(&json!({"messages": [other]}));
        let same = one.iter().zip(&other).take_while(|(one, other)| one == other).count();
        assert!(same < 40, "another picture is another prompt from there on: {same}");
        assert!(one.len() > PIECES_OF_ITEM);
    }

    #[test]
    fn usage_is_found_at_the_end_of_any_answer() {
        let streamed = b"data: {\"choices\":[]}\n\ndata: {\"usage\":null}\n\ndata: {\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\
            \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";
        let found = usage(streamed).unwrap();
        assert_eq!((found.prompt_tokens, found.completion_tokens, found.cached_tokens), (7, 3, 4));
        let found = usage(br#"{"type":"message","usage":{"input_tokens":2,"output_tokens":1}}"#).unwrap();
        assert_eq!((found.prompt_tokens, found.completion_tokens), (2, 1));
        assert_eq!((usage(b"{}"), usage(b"\"usage\":"), usage(b"\"usage\":{\"prom")), (None, None, None));
    }
}
