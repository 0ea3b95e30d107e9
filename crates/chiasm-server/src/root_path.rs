//! The prefix of all paths, for a server below a path of a proxy.

use std::str::FromStr;

use axum::http::Uri;
use axum::http::uri::PathAndQuery;

/// A path such as `/models/qwen` below which clients see this server. Requests may have it or not,
/// as some proxies strip it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootPath(String);

/// The error for an invalid root path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected a path such as /models/qwen, of ASCII letters, digits, '-', '_', '.' and '~' \
     between single slashes"
)]
pub struct ParseRootPathError;

impl FromStr for RootPath {
    type Err = ParseRootPathError;

    /// Parses a path. A trailing slash is ignored. Paths that clients may write in several ways are
    /// refused.
    fn from_str(text: &str) -> Result<Self, ParseRootPathError> {
        let path = text.strip_suffix('/').unwrap_or(text);
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
        let is_segment =
            |segment: &str| !matches!(segment, "" | "." | "..") && segment.bytes().all(is_plain);
        let is_path = path.strip_prefix('/').is_some_and(|path| path.split('/').all(is_segment));
        if is_path { Ok(Self(path.to_owned())) } else { Err(ParseRootPathError) }
    }
}

impl RootPath {
    /// Returns a request's target without the prefix; `None` if it does not have it.
    ///
    /// Like Starlette's `get_route_path`, which vLLM uses, this strips the prefix once and only at
    /// the end of a segment.
    pub(crate) fn strip(&self, target: &Uri) -> Option<Uri> {
        let rest = target.path_and_query()?.as_str().strip_prefix(&self.0)?;
        let rest = match rest.as_bytes().first() {
            Some(b'/') => PathAndQuery::try_from(rest),
            Some(b'?') | None => PathAndQuery::try_from(format!("/{rest}")),
            Some(_) => return None,
        };
        let mut parts = target.clone().into_parts();
        parts.path_and_query = Some(rest.ok()?);
        Uri::from_parts(parts).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_is_stripped_once_at_a_segment_end() {
        let root: RootPath = "/models/qwen/".parse().unwrap();
        for (target, stripped) in [
            ("/models/qwen/v1/models", Some("/v1/models")),
            ("/models/qwen/v1/models?a=%2F", Some("/v1/models?a=%2F")),
            ("/models/qwen", Some("/")),
            ("/models/qwen?a=b", Some("/?a=b")),
            ("/models/qwen/models/qwen/health", Some("/models/qwen/health")),
            ("http://example.com/models/qwen/health", Some("http://example.com/health")),
            ("/v1/models", None),
            ("/models/qwen2/v1/models", None),
            ("/x/models/qwen/v1/models", None),
            ("/models", None),
            ("*", None),
        ] {
            let target: Uri = target.parse().unwrap();
            assert_eq!(
                root.strip(&target).map(|uri| uri.to_string()).as_deref(),
                stripped,
                "{target}"
            );
        }
    }

    #[test]
    fn invalid_root_paths_are_refused() {
        for fine in ["/a", "/a/", "/A-b_c.d~e/0"] {
            assert_eq!(fine.parse::<RootPath>().unwrap().0, fine.trim_end_matches('/'));
        }
        for wrong in [
            "", "/", "a", "//", "/a//b", "/a//", "//a", "/a b", "/a%20b", "/a?b", "/a#b", "/ä",
            "/.", "/a/..",
        ] {
            assert_eq!(wrong.parse::<RootPath>(), Err(ParseRootPathError), "{wrong}");
        }
    }
}
