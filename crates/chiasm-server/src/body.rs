//! Request bodies: read within limits of size and time, and understood as JSON.

use axum::body::{Body, HttpBody};
use axum::http::StatusCode;
use http_body_util::BodyExt;
use serde_json::Value;

use crate::error::ApiError;
use crate::frontend::{Frontend, Limits};

/// Bodies up to this size are parsed at once. Bigger ones carry images and take milliseconds, so they are parsed off the
/// async threads.
const SMALL: usize = 64 << 10;

/// Reads a body as JSON.
pub(crate) async fn read_json(frontend: &Frontend, body: Body) -> Result<Value, ApiError> {
    let limits = &frontend.limits;
    let body = tokio::time::timeout(limits.body_timeout, read(body, limits)).await.map_err(|_| {
        let seconds = limits.body_timeout.as_secs_f64();
        let message = format!("the body did not arrive within {seconds} s (--body-timeout)");
        invalid(StatusCode::REQUEST_TIMEOUT, message)
    })??;
    let parsed = if body.len() <= SMALL {
        serde_json::from_slice(&body)
    } else {
        frontend.cpu.run(move || serde_json::from_slice(&body)).await?
    };
    parsed.map_err(|error| ApiError {
        code: "invalid_json",
        ..ApiError::invalid("body", format!("the body is not valid JSON: {error}"))
    })
}

/// Reads a body. Of one that is too large as much again is read and thrown away: a client that is still sending when its
/// connection is closed sees a broken connection instead of the answer.
async fn read(mut body: Body, limits: &Limits) -> Result<Vec<u8>, ApiError> {
    let mut too_large = body.size_hint().lower() > limits.body_bytes as u64;
    let mut bytes = Vec::new();
    let mut discarded = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| invalid(StatusCode::BAD_REQUEST, "the body could not be read".to_owned()))?;
        let Ok(data) = frame.into_data() else { continue };
        too_large |= bytes.len() + data.len() > limits.body_bytes;
        if !too_large {
            bytes.extend_from_slice(&data);
            continue;
        }
        bytes = Vec::new();
        discarded += data.len();
        if discarded > limits.body_bytes {
            break;
        }
    }
    if too_large {
        let message = format!("the body has more than {} bytes (--max-body-bytes)", limits.body_bytes);
        return Err(invalid(StatusCode::PAYLOAD_TOO_LARGE, message));
    }
    Ok(bytes)
}

fn invalid(status: StatusCode, message: String) -> ApiError {
    ApiError { status, code: "invalid_body", ..ApiError::invalid("body", message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn outcome(body: Vec<u8>) -> Result<usize, StatusCode> {
        let limits = Limits { body_bytes: 100, ..Limits::default() };
        read(Body::from(body), &limits).await.map(|bytes| bytes.len()).map_err(|error| error.status)
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
        let error = read(Body::from_stream(pieces), &limits).await.unwrap_err();
        assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
