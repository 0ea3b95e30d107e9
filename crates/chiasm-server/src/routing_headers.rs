//! Headers that tell where a request went.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use chiasm_request::RouteOutcome;

/// Adds the headers that tell where a request went, and how long that took.
pub(crate) fn routing_headers(headers: &mut HeaderMap, attempted: &RouteOutcome) {
    let mut put = |name: &'static str, value: String| {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    put("x-chiasm-worker", attempted.worker.to_string());
    if let Some(by) = &attempted.encoded {
        put("x-chiasm-encode-worker", by.worker.to_string());
    }
    if let Some(by) = &attempted.prefilled {
        put("x-chiasm-prefill-worker", by.worker.to_string());
    }
    put("x-chiasm-overlap", format!("{}/{}", attempted.overlap_blocks, attempted.total_blocks));
    put("x-chiasm-transfer", attempted.delivered.transfer().name().to_owned());
    put("server-timing", attempted.server_timing());
}
