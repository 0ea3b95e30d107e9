//! A request's body on its way in: what it may be, how large, and how slow.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, header};
use bytes::Bytes;
use chiasm_media::ByteBudget;
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout_at};

use crate::connection::Connection;
use crate::connections::LARGE;
use crate::error::HttpError;
use crate::http_rules;
use crate::settings::HttpLimits;

/// The time within which [`HttpLimits::min_body_rate`] times as many bytes have to come.
const PATIENCE: Duration = Duration::from_secs(10);
/// A timeout that is longer than this makes no difference, but there may be no such time.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// A body that has arrived.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    pub(crate) bytes: Bytes,
    /// An upper bound on how many JSON values there are beside the first.
    pub(crate) values: u64,
}

/// Reads the JSON body of a request with this head. One that is `refused` already, is no JSON or is
/// too large gets its answer when a part of it has been read and thrown away: a client that is
/// still sending when its connection is closed sees a broken connection instead. A client that
/// asked before it sends is told at once.
pub(crate) async fn arrive(
    head: &Parts,
    body: Body,
    refused: Option<HttpError>,
    limits: &HttpLimits,
    budget: &ByteBudget,
    connection: &Connection,
) -> Result<Arrived, HttpError> {
    let too_large = || (body.size_hint().lower() > limits.body_bytes as u64).then(|| large(limits));
    let refused = refused.or_else(|| no_json(&head.headers)).or_else(too_large);
    match refused {
        Some(refused) if http_rules::expects_continue(head.version, &head.headers) => Err(refused),
        refused => read(body, refused, limits, budget, connection).await,
    }
}

/// The refusal of a body that is not plain JSON by these headers, if it is not. Whoever does not
/// say what it sends is refused too: a web page may post to any address, this machine's included,
/// as long as it does not call that JSON.
fn no_json(headers: &HeaderMap) -> Option<HttpError> {
    let encoded =
        |coding: &HeaderValue| !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity");
    if headers.get_all(header::CONTENT_ENCODING).iter().any(encoded) {
        let message = "compressed bodies are not read; send the JSON as it is";
        return Some(HttpError::unsupported_body("content-encoding", message));
    }
    let is_json = |kind: &HeaderValue| {
        let essence = kind.as_bytes().split(|&byte| byte == b';').next().unwrap_or_default();
        essence.trim_ascii().eq_ignore_ascii_case(b"application/json")
    };
    if !headers.get(header::CONTENT_TYPE).is_some_and(is_json) {
        let message = "the body must be JSON and be sent as such, with the header 'content-type: application/json'";
        return Some(HttpError::unsupported_body("content-type", message));
    }
    None
}

fn large(limits: &HttpLimits) -> HttpError {
    HttpError::large_body(format!(
        "the body has more than {} bytes (--max-body-bytes)",
        limits.body_bytes
    ))
}

/// Reads a body. Of one that is refused as much as the limit allows is thrown away.
async fn read(
    mut body: Body,
    mut refused: Option<HttpError>,
    limits: &HttpLimits,
    budget: &ByteBudget,
    connection: &Connection,
) -> Result<Arrived, HttpError> {
    let expected = if refused.is_some() { 0 } else { body.size_hint().lower() as usize };
    let mut bytes = budget.buffer_expecting(expected);
    let mut pace = Pace::new(limits);
    let mut moved = (expected >= LARGE).then(|| connection.receive_large_body());
    let (mut values, mut discarded, mut arrived) = (0, 0, 0);
    while let Some(frame) = pace.next(&mut body).await? {
        let Some(data) = frame else { continue };
        arrived += data.len();
        if arrived >= LARGE {
            moved.get_or_insert_with(|| connection.receive_large_body());
        }
        if refused.is_none() && bytes.as_slice().len() + data.len() > limits.body_bytes {
            refused = Some(large(limits));
        }
        if refused.is_none() {
            match bytes.extend(&data) {
                Ok(()) => {
                    values += followers(&data);
                    continue;
                }
                Err(error) => refused = Some(error.into()),
            }
        }
        bytes = budget.buffer();
        discarded += data.len();
        if discarded > limits.body_bytes {
            break;
        }
    }
    match refused {
        Some(refused) => Err(refused),
        None => Ok(Arrived { bytes: bytes.freeze(), values }),
    }
}

/// How many JSON values may follow the commas and opening brackets of a part of a body.
fn followers(json: &[u8]) -> u64 {
    // Both opening brackets become one.
    let precedes_value = |&byte: &u8| u8::from(byte == b',') + u8::from(byte | 0x20 == b'{');
    // The counts of these pieces fit a byte, so that compilers can count many at once.
    json.chunks(192).map(|piece| u64::from(piece.iter().map(precedes_value).sum::<u8>())).sum()
}

/// The pace of a body: reads it, and gives up when it comes too slowly.
struct Pace<'a> {
    limits: &'a HttpLimits,
    deadline: Instant,
    /// The beginning of the current [`PATIENCE`].
    since: Instant,
    /// The bytes that have come since then.
    bytes: f64,
}

impl<'a> Pace<'a> {
    fn new(limits: &'a HttpLimits) -> Self {
        let since = Instant::now();
        Self { limits, deadline: since + limits.body_timeout.min(FOREVER), since, bytes: 0.0 }
    }

    /// The body's next data, or `Some(None)` for a frame without; `None` at its end.
    async fn next(&mut self, body: &mut Body) -> Result<Option<Option<Bytes>>, HttpError> {
        let least = self.limits.min_body_rate as f64 * PATIENCE.as_secs_f64();
        let until =
            if least > 0.0 { self.deadline.min(self.since + PATIENCE) } else { self.deadline };
        let frame = timeout_at(until, body.frame()).await.map_err(|_| self.too_slow(until))?;
        let Some(frame) = frame else { return Ok(None) };
        let data = frame.map_err(|_| HttpError::unreadable_body())?.into_data().ok();
        self.bytes += data.as_ref().map_or(0, Bytes::len) as f64;
        if self.bytes >= least {
            (self.since, self.bytes) = (Instant::now(), 0.0);
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
                "less than {min_body_rate} bytes/s of the body came for {} s (--min-body-rate)",
                PATIENCE.as_secs()
            )
        })
    }
}

#[cfg(test)]
mod tests;
