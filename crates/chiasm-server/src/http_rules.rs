//! Rules of HTTP/1.1 for every request (RFC 9110 and 9112).

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Version, header};
use axum::response::Response;

use crate::error::HttpError;

const CONTINUE: &str = "100-continue";

/// The maximum size of a request's head: its first line and its headers.
pub(crate) const MAX_HEAD_BYTES: usize = 64 << 10;
/// The bytes of a header line besides name and value: `: ` and the end of the line.
const HEADER_LINE_BYTES: usize = 4;

/// Checks the size of a request's head. Checks that a request of HTTP/1.1 has one `Host` header
/// (RFC 9112, 3.2) and no unknown expectation.
pub(crate) fn check(request: &Request) -> Result<(), HttpError> {
    if head_bytes(request) > MAX_HEAD_BYTES {
        return Err(HttpError::large_head(MAX_HEAD_BYTES));
    }
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

/// Returns the size of the request's head. hyper's own limit is that of its buffer, which may
/// grow to twice the size before a head is complete.
fn head_bytes(request: &Request) -> usize {
    let line = |(name, value): (&HeaderName, &HeaderValue)| {
        name.as_str().len() + value.len() + HEADER_LINE_BYTES
    };
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    target + request.headers().iter().map(line).sum::<usize>()
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
