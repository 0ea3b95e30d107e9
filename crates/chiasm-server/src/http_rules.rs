//! What HTTP/1.1 asks of every request, whatever it is for (RFC 9110 and 9112).

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Version, header};
use axum::response::Response;

use crate::error::HttpError;

const CONTINUE: &str = "100-continue";

/// Refuses a request of HTTP/1.1 that does not name one host (RFC 9112, 3.2), or that expects what
/// is not done here.
pub(crate) fn check(request: &Request) -> Result<(), HttpError> {
    if request.version() < Version::HTTP_11 {
        return Ok(());
    }
    if request.headers().get_all(header::HOST).iter().count() != 1 {
        return Err(HttpError::no_host());
    }
    match request.headers().get_all(header::EXPECT).iter().all(is_continue) {
        true => Ok(()),
        false => Err(HttpError::expectation_failed()),
    }
}

/// Whether the client sends the body only when it is told to.
pub(crate) fn expects_continue(version: Version, headers: &HeaderMap) -> bool {
    version >= Version::HTTP_11 && headers.get(header::EXPECT).is_some_and(is_continue)
}

/// Says that the connection ends where a client that waited to be told to send its body is refused:
/// that body is not read.
pub(crate) fn closing(mut response: Response) -> Response {
    if !response.status().is_success() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn is_continue(expectation: &HeaderValue) -> bool {
    expectation.as_bytes().eq_ignore_ascii_case(CONTINUE.as_bytes())
}
