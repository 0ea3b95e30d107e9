//! Rules of HTTP/1.1 for every request (RFC 9110 and 9112).

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Version, header};
use axum::response::Response;

use crate::error::HttpError;

const CONTINUE: &str = "100-continue";

/// Checks that a request of HTTP/1.1 has one `Host` header (RFC 9112, 3.2) and no unknown
/// expectation.
pub(crate) fn check(request: &Request) -> Result<(), HttpError> {
    if request.version() < Version::HTTP_11 {
        return Ok(());
    }
    if request.headers().get_all(header::HOST).iter().count() != 1 {
        return Err(HttpError::no_host());
    }
    if !request.headers().get_all(header::EXPECT).iter().all(is_continue) {
        return Err(HttpError::expectation_failed());
    }
    Ok(())
}

/// Returns `true` if the client waits for `100 Continue` before it sends the body.
pub(crate) fn expects_continue(version: Version, headers: &HeaderMap) -> bool {
    version >= Version::HTTP_11 && headers.get(header::EXPECT).is_some_and(is_continue)
}

/// Adds `Connection: close` to a refusal of a request that expects `100 Continue`: its body is not
/// read.
pub(crate) fn close_if_refused(mut response: Response) -> Response {
    if !response.status().is_success() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn is_continue(expectation: &HeaderValue) -> bool {
    expectation.as_bytes().eq_ignore_ascii_case(CONTINUE.as_bytes())
}
