//! API keys of clients, and the check that a request has one of them.

use std::sync::{Arc, PoisonError, RwLock};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

use crate::error::HttpError;
use crate::paths;

/// The paths that need no key: they reveal the state of this process and none of its data.
const OPEN_PATHS: [&str; 3] = ["/health", "/ready", "/ping"];
const METRICS_PATH: &str = "/metrics";
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The API keys of clients. Without any keys, every request is let through.
#[derive(Clone, Debug, Default)]
pub struct ApiKeys {
    /// The keys' digests. Digests are compared, so timing reveals nothing about the keys, and no
    /// key stays in this process's memory.
    digests: Vec<blake3::Hash>,
    /// `true` if `/metrics` needs a key, too.
    protects_metrics: bool,
}

impl ApiKeys {
    /// Creates a set of keys. Without any, no request needs a key; `/metrics` needs one only if
    /// `protects_metrics`.
    pub fn new(keys: impl IntoIterator<Item = impl AsRef<[u8]>>, protects_metrics: bool) -> Self {
        Self {
            digests: keys.into_iter().map(|key| blake3::hash(key.as_ref())).collect(),
            protects_metrics,
        }
    }

    /// Returns a 401 response if the request is refused, `None` if it is let through.
    pub(crate) fn refusal(&self, request: &Request) -> Option<Response> {
        let path = request.uri().path();
        let is_open = OPEN_PATHS.contains(&path)
            || (path == METRICS_PATH && !self.protects_metrics)
            || is_page_path(path);
        if self.digests.is_empty() || is_open {
            return None;
        }
        let message = match client_key(request.headers()) {
            Some(key) if self.is_key(key) => return None,
            Some(_) => "the API key is invalid",
            None => "an API key is required: 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        };
        let mut refused = HttpError::unauthorized(message).into_response();
        refused.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        Some(refused)
    }

    /// Returns `true` if a request with these headers has a valid key, or if there are no keys.
    pub(crate) fn admits(&self, headers: &HeaderMap) -> bool {
        self.digests.is_empty() || client_key(headers).is_some_and(|key| self.is_key(key))
    }

    /// Returns `true` if clients need a key, which is so if there are any keys.
    pub fn are_required(&self) -> bool {
        !self.digests.is_empty()
    }

    /// Returns `true` if `key` is one of the keys.
    fn is_key(&self, key: &[u8]) -> bool {
        self.has_digest(&blake3::hash(key))
    }

    /// Returns the digest of `key` if it is one of the keys.
    pub(crate) fn digest(&self, key: &[u8]) -> Option<blake3::Hash> {
        Some(blake3::hash(key)).filter(|digest| self.has_digest(digest))
    }

    /// Returns `true` if one of the keys has this digest.
    pub(crate) fn has_digest(&self, digest: &blake3::Hash) -> bool {
        // All digests are compared, so timing does not reveal which key matched either.
        self.digests.iter().fold(false, |found, known| found | (digest == known))
    }
}

/// The current keys, which may be replaced while requests are in flight.
#[derive(Debug, Default)]
pub struct CurrentKeys(RwLock<Arc<ApiKeys>>);

impl CurrentKeys {
    pub(crate) fn new(keys: ApiKeys) -> Self {
        Self(RwLock::new(Arc::new(keys)))
    }

    /// Returns the current keys.
    pub(crate) fn current(&self) -> Arc<ApiKeys> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the keys. Later requests need one of the new keys.
    pub fn replace(&self, keys: ApiKeys) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
    }
}

/// Returns `true` for the live page's paths. Browsers can't send a key with them, so the page's own
/// routes check for a session.
fn is_page_path(path: &str) -> bool {
    path.strip_prefix(paths::PAGE).is_some_and(|below| below.is_empty() || below.starts_with('/'))
}

/// Returns the key of a request, from the same header as [`credentials`]. A header that is repeated
/// counts as missing.
fn client_key(headers: &HeaderMap) -> Option<&[u8]> {
    let only_value = |name: &HeaderName| {
        let mut values = headers.get_all(name).iter();
        values.next().filter(|_| values.next().is_none())
    };
    if !headers.contains_key(header::AUTHORIZATION) {
        return only_value(&X_API_KEY).map(|key| key.as_bytes().trim_ascii());
    }
    let (scheme, key) =
        only_value(&header::AUTHORIZATION)?.as_bytes().split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

/// Returns a client's credentials: `Authorization`, or else `x-api-key`, which Anthropic's clients
/// use.
pub(crate) fn credentials(headers: &HeaderMap) -> Option<&HeaderValue> {
    headers.get(header::AUTHORIZATION).or_else(|| headers.get(X_API_KEY))
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn status(keys: &ApiKeys, path: &str, authorization: &[&str]) -> u16 {
        let builder = Request::builder().uri(path);
        let builder = authorization
            .iter()
            .fold(builder, |builder, value| builder.header("authorization", *value));
        match keys.refusal(&builder.body(Body::empty()).unwrap()) {
            None => 200,
            Some(refused) => {
                assert_eq!(refused.headers()["www-authenticate"], "Bearer");
                refused.status().as_u16()
            }
        }
    }

    #[test]
    fn valid_key_opens_every_path() {
        let keys = ApiKeys::new(["one", "two"], false);
        for path in ["/v1/chat/completions", "/v1/models", "/workers", "/nothing"] {
            for fine in ["Bearer one", "bearer two", "Bearer  two "] {
                assert_eq!(status(&keys, path, &[fine]), 200, "{path} {fine}");
            }
            for wrong in [
                &[][..],
                &[""],
                &["Bearer"],
                &["Bearer "],
                &["Bearer on"],
                &["Bearer onee"],
                &["Basic one"],
                &["one"],
            ] {
                assert_eq!(status(&keys, path, wrong), 401, "{path} {wrong:?}");
            }
            assert_eq!(status(&keys, path, &["Bearer one", "Bearer one"]), 401);
        }
        for path in ["/health", "/ready", "/ping", "/metrics"] {
            assert_eq!(status(&keys, path, &[]), 200, "{path}");
        }
    }

    #[test]
    fn x_api_key_counts_without_authorization() {
        let keys = ApiKeys::new(["one", "two"], false);
        let status = |headers: &[(&str, &str)]| {
            let builder = Request::builder().uri("/v1/messages");
            let builder = headers
                .iter()
                .fold(builder, |builder, (name, value)| builder.header(*name, *value));
            keys.refusal(&builder.body(Body::empty()).unwrap())
                .map_or(200, |refused| refused.status().as_u16())
        };
        assert_eq!(status(&[("x-api-key", "two")]), 200);
        assert_eq!(status(&[("x-api-key", "three")]), 401);
        assert_eq!(status(&[("x-api-key", "Bearer one")]), 401);
        assert_eq!(status(&[("x-api-key", "one"), ("x-api-key", "one")]), 401);
        assert_eq!(status(&[("x-api-key", "one"), ("authorization", "Bearer x")]), 401);
        assert_eq!(status(&[("x-api-key", "x"), ("authorization", "Bearer one")]), 200);
    }

    #[test]
    fn metrics_need_a_key_only_if_protected() {
        assert_eq!(status(&ApiKeys::new(["one"], true), "/metrics", &[]), 401);
        assert_eq!(status(&ApiKeys::new(["one"], true), "/metrics", &["Bearer one"]), 200);
        assert_eq!(status(&ApiKeys::default(), "/v1/models", &[]), 200);
        assert_eq!(status(&ApiKeys::new([""; 0], true), "/metrics", &[]), 200);
    }
}
