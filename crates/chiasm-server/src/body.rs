//! Request bodies: read within limits of size and time, and understood as JSON.

use std::sync::Arc;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use chiasm_media::{ByteBudget, Charge};
use http_body_util::BodyExt;
use tracing::Instrument;

use crate::error::ApiError;
use crate::frontend::{Frontend, Limits};
use crate::openai::{Intake, RequestBody};

/// Bodies up to this size are parsed at once, in less than 200 µs. Bigger ones are parsed off the async threads.
const SMALL: usize = 512 << 10;
/// And those with many values, each of which takes as long as a hundred bytes.
const FEW_VALUES: u64 = 4096;

/// A body that has been understood.
pub(crate) struct JsonBody<T> {
    pub(crate) request: T,
    /// The request's memory, counted until this is dropped.
    pub(crate) charge: Charge,
}

impl<T: RequestBody> FromRequest<Arc<Frontend>> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, frontend: &Arc<Frontend>) -> Result<Self, ApiError> {
        read_json(frontend, request.into_body()).instrument(tracing::debug_span!("parse")).await
    }
}

async fn read_json<T: RequestBody>(frontend: &Frontend, body: Body) -> Result<JsonBody<T>, ApiError> {
    let (limits, budget) = (&frontend.limits, frontend.door.budget());
    let body = tokio::time::timeout(limits.body_timeout, read(body, limits, budget)).await.map_err(|_| {
        let seconds = limits.body_timeout.as_secs_f64();
        let message = format!("the body did not arrive within {seconds} s (--body-timeout)");
        ApiError::slow_body(message)
    })??;
    let small = body.len() <= SMALL && values(&body) <= FEW_VALUES;
    let intake = Intake::new(body, limits, budget);
    let (request, charge) = frontend.cpu.run_or_here(small, move || T::parse(intake)).await??;
    Ok(JsonBody { request, charge })
}

/// An upper bound on how many values there are beside the first: each follows a comma or the bracket of its list or object.
fn values(json: &[u8]) -> u64 {
    // Both opening brackets become one.
    let precedes_value = |&byte: &u8| u8::from(byte == b',') + u8::from(byte | 0x20 == b'{');
    // In pieces whose counts fit a byte, so that compilers can count many at once.
    json.chunks(255).map(|piece| u64::from(piece.iter().map(precedes_value).sum::<u8>())).sum()
}

/// Reads a body. Of one that is too large as much again is read and thrown away: a client that is still sending when its
/// connection is closed sees a broken connection instead of the answer.
async fn read(mut body: Body, limits: &Limits, budget: &ByteBudget) -> Result<Bytes, ApiError> {
    let mut too_large = body.size_hint().lower() > limits.body_bytes as u64;
    let expected = if too_large { 0 } else { body.size_hint().lower() as usize };
    let (mut bytes, mut no_room) = (budget.buffer_expecting(expected), None);
    let mut discarded = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::unreadable_body())?;
        let Ok(data) = frame.into_data() else { continue };
        too_large |= bytes.as_slice().len() + data.len() > limits.body_bytes;
        if !too_large && no_room.is_none() {
            match bytes.extend(&data) {
                Ok(()) => continue,
                Err(error) => no_room = Some(error),
            }
        }
        bytes = budget.buffer();
        discarded += data.len();
        if discarded > limits.body_bytes {
            break;
        }
    }
    if too_large {
        let message = format!("the body has more than {} bytes (--max-body-bytes)", limits.body_bytes);
        return Err(ApiError::large_body(message));
    }
    match no_room {
        Some(error) => Err(error.into()),
        None => Ok(bytes.freeze()),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    async fn outcome(body: Vec<u8>) -> Result<usize, StatusCode> {
        let limits = Limits { body_bytes: 100, ..Limits::default() };
        read(Body::from(body), &limits, &ByteBudget::new(150))
            .await
            .map(|bytes| bytes.len())
            .map_err(|error| error.status)
    }

    #[tokio::test]
    async fn a_body_may_have_as_many_bytes_as_the_limit_and_no_more() {
        assert_eq!(outcome(vec![0; 100]).await, Ok(100));
        assert_eq!(outcome(vec![0; 101]).await, Err(StatusCode::PAYLOAD_TOO_LARGE));
    }

    #[tokio::test]
    async fn a_body_of_unknown_length_is_counted() {
        let pieces = futures_util::stream::iter((0..11).map(|_| Ok::<_, std::io::Error>(vec![0; 10])));
        let limits = Limits { body_bytes: 100, ..Limits::default() };
        let error = read(Body::from_stream(pieces), &limits, &ByteBudget::new(1000)).await.unwrap_err();
        assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
    }

    #[tokio::test]
    async fn a_body_that_memory_has_no_room_for_is_refused_for_now() {
        let (limits, budget) = (Limits::default(), ByteBudget::new(100));
        let pieces = || futures_util::stream::iter((0..10).map(|_| Ok::<_, std::io::Error>(vec![0; 10])));
        let held = read(Body::from_stream(pieces()), &limits, &budget).await.unwrap();
        assert_eq!(budget.held(), 100);
        let error = read(Body::from_stream(pieces()), &limits, &budget).await.unwrap_err();
        assert_eq!(error.status, StatusCode::SERVICE_UNAVAILABLE);
        drop(held);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn every_value_but_the_first_is_counted() {
        let json = [b"[".to_vec(), b"0,".repeat(1000), b"{\"a\": 1, \"b\": [2, 3]}]".to_vec()].concat();
        assert_eq!(values(&json), 1 + 1000 + 1 + 1 + 1 + 1);
        for only in [b',', b'[', b'{'] {
            assert_eq!(values(&[only; 5000]), 5000);
        }
        assert_eq!(values(&[b'x'; 5000]), 0);
    }
}
