//! Receiving request bodies: media type, size limit and minimum rate.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, header};
use bytes::Bytes;
use chiasm_media::ByteBudget;
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout_at};

use crate::connection::Connection;
use crate::connections::LARGE_BODY_BYTES;
use crate::error::HttpError;
use crate::http_rules;
use crate::settings::HttpLimits;

/// The window over which [`HttpLimits::min_body_rate`] is measured.
const RATE_WINDOW: Duration = Duration::from_secs(10);
/// An upper bound on body timeouts: adding a longer one to an [`Instant`] could overflow.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);

/// A complete request body.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedBody {
    pub(crate) bytes: Bytes,
    /// An upper bound on the number of JSON values in the body beside the first.
    pub(crate) values: u64,
}

/// Receives the JSON body of a request with this head.
///
/// If the request is already refused (`refusal`), is not JSON or is too large, part of the body is
/// read and discarded before the error is returned. Otherwise a client that is still sending when
/// its connection is closed would see a broken connection instead of the error. A client that sent
/// `Expect: 100-continue` gets the error at once.
pub(crate) async fn receive(
    head: &Parts,
    body: Body,
    refusal: Option<HttpError>,
    limits: &HttpLimits,
    budget: &ByteBudget,
    connection: &Connection,
) -> Result<ReceivedBody, HttpError> {
    let size_refusal =
        || (body.size_hint().lower() > limits.body_bytes as u64).then(|| too_large(limits));
    let refusal = refusal.or_else(|| type_refusal(&head.headers)).or_else(size_refusal);
    match refusal {
        Some(error) if http_rules::expects_continue(head.version, &head.headers) => Err(error),
        refusal => read(body, refusal, limits, budget, connection).await,
    }
}

/// Returns an error if these headers do not announce a body of plain JSON.
///
/// A missing content type is refused, too. A web page may post to any address, this machine's
/// included, as long as it does not declare the body as JSON.
fn type_refusal(headers: &HeaderMap) -> Option<HttpError> {
    let is_encoded =
        |coding: &HeaderValue| !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity");
    if headers.get_all(header::CONTENT_ENCODING).iter().any(is_encoded) {
        let message = "compressed bodies are not supported; send uncompressed JSON";
        return Some(HttpError::unsupported_body("content-encoding", message));
    }
    let is_json = |kind: &HeaderValue| {
        let essence = kind.as_bytes().split(|&byte| byte == b';').next().unwrap_or_default();
        essence.trim_ascii().eq_ignore_ascii_case(b"application/json")
    };
    if !headers.get(header::CONTENT_TYPE).is_some_and(is_json) {
        let message = "the body must be JSON with the header 'content-type: application/json'";
        return Some(HttpError::unsupported_body("content-type", message));
    }
    None
}

fn too_large(limits: &HttpLimits) -> HttpError {
    HttpError::large_body(format!(
        "the body has more than {} bytes (--max-body-bytes)",
        limits.body_bytes
    ))
}

/// Reads a body. A refused body is discarded, up to the size limit.
async fn read(
    mut body: Body,
    mut refusal: Option<HttpError>,
    limits: &HttpLimits,
    budget: &ByteBudget,
    connection: &Connection,
) -> Result<ReceivedBody, HttpError> {
    let expected = if refusal.is_some() { 0 } else { body.size_hint().lower() as usize };
    let mut bytes = budget.buffer_with_capacity(expected);
    let mut pace = Pace::new(limits);
    let mut large_body = (expected >= LARGE_BODY_BYTES).then(|| connection.receive_large_body());
    let mut values = 0;
    let mut discarded = 0;
    let mut received = 0;
    while let Some(frame) = pace.next(&mut body).await? {
        let Some(data) = frame else { continue };
        received += data.len();
        if received >= LARGE_BODY_BYTES {
            large_body.get_or_insert_with(|| connection.receive_large_body());
        }
        if refusal.is_none() && bytes.as_slice().len() + data.len() > limits.body_bytes {
            refusal = Some(too_large(limits));
        }
        if refusal.is_none() {
            match bytes.extend(&data) {
                Ok(()) => {
                    values += count_values(&data);
                    continue;
                }
                Err(error) => refusal = Some(error.into()),
            }
        }
        bytes = budget.buffer();
        discarded += data.len();
        if discarded > limits.body_bytes {
            break;
        }
    }
    match refusal {
        Some(error) => Err(error),
        None => Ok(ReceivedBody { bytes: bytes.freeze(), values }),
    }
}

/// Counts the commas and opening brackets of a part of a body: each may precede a JSON value.
fn count_values(json: &[u8]) -> u64 {
    // `| 0x20` maps `[` to `{`, so one comparison finds both brackets.
    let precedes_value = |&byte: &u8| u8::from(byte == b',') + u8::from(byte | 0x20 == b'{');
    // The count of a chunk fits a byte, which lets the compiler vectorize the loop.
    json.chunks(192).map(|piece| u64::from(piece.iter().map(precedes_value).sum::<u8>())).sum()
}

/// Reads a body and enforces its deadline and minimum rate.
struct Pace<'a> {
    limits: &'a HttpLimits,
    deadline: Instant,
    /// The start of the current [`RATE_WINDOW`].
    window_start: Instant,
    /// The bytes received in this window.
    window_bytes: f64,
}

impl<'a> Pace<'a> {
    fn new(limits: &'a HttpLimits) -> Self {
        let now = Instant::now();
        Self {
            limits,
            deadline: now + limits.body_timeout.min(MAX_TIMEOUT),
            window_start: now,
            window_bytes: 0.0,
        }
    }

    /// Returns the body's next data, `Some(None)` for a frame without data, or `None` at the end.
    async fn next(&mut self, body: &mut Body) -> Result<Option<Option<Bytes>>, HttpError> {
        let min_bytes = self.limits.min_body_rate as f64 * RATE_WINDOW.as_secs_f64();
        let until = if min_bytes > 0.0 {
            self.deadline.min(self.window_start + RATE_WINDOW)
        } else {
            self.deadline
        };
        let frame = timeout_at(until, body.frame()).await.map_err(|_| self.too_slow(until))?;
        let Some(frame) = frame else { return Ok(None) };
        let data = frame.map_err(|_| HttpError::unreadable_body())?.into_data().ok();
        self.window_bytes += data.as_ref().map_or(0, Bytes::len) as f64;
        if self.window_bytes >= min_bytes {
            self.window_start = Instant::now();
            self.window_bytes = 0.0;
        }
        Ok(Some(data))
    }

    fn too_slow(&self, until: Instant) -> HttpError {
        let HttpLimits { body_timeout, min_body_rate, .. } = self.limits;
        HttpError::slow_body(if until == self.deadline {
            format!(
                "the body did not arrive within {} s (--body-timeout)",
                body_timeout.as_secs_f64()
            )
        } else {
            format!(
                "the body arrived at less than {min_body_rate} bytes/s for {} s (--min-body-rate)",
                RATE_WINDOW.as_secs()
            )
        })
    }
}

#[cfg(test)]
mod tests;
