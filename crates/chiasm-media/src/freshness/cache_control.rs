//! The `Cache-Control` header of an answer (RFC 9111, section 5.2.2).

use std::time::Duration;

use reqwest::header::{CACHE_CONTROL, HeaderMap};

/// The directives of `Cache-Control` that matter to a shared cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CacheControl {
    /// `true` for `no-store`, `private` or an unreadable header.
    pub(super) no_store: bool,
    /// `true` for `no-cache`.
    pub(super) no_cache: bool,
    /// The value of `s-maxage`, or else of `max-age`. Zero if unreadable or repeated.
    pub(super) max_age: Option<Duration>,
}

impl CacheControl {
    /// Parses the header. Returns `None` if it is missing.
    ///
    /// `no-cache="field"` and `private="field"` are read as if they named no field. Directives that
    /// extend reuse, such as `stale-while-revalidate`, are ignored.
    pub(super) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        headers.contains_key(CACHE_CONTROL).then(|| {
            let mut control = Self::default();
            let mut max_age = None;
            let mut shared_max_age = None;
            for line in headers.get_all(CACHE_CONTROL) {
                let Some(directives) = line.to_str().ok().and_then(directives) else {
                    control.no_store = true;
                    continue;
                };
                for (name, value) in directives {
                    match name.to_ascii_lowercase().as_str() {
                        "no-store" | "private" => control.no_store = true,
                        "no-cache" => control.no_cache = true,
                        "max-age" => add_age(&mut max_age, value),
                        "s-maxage" => add_age(&mut shared_max_age, value),
                        _ => {}
                    }
                }
            }
            control.max_age = shared_max_age.or(max_age);
            control
        })
    }
}

/// Sets `age` from a directive. A repeated or unreadable one makes the answer stale (RFC 9111,
/// section 4.2.1).
fn add_age(age: &mut Option<Duration>, value: &str) {
    *age = Some(if age.is_none() { seconds(value).unwrap_or_default() } else { Duration::ZERO });
}

/// Parses a number of whole seconds. Larger numbers are clamped to 2^31 (RFC 9111, section 1.2.2).
pub(super) fn seconds(digits: &str) -> Option<Duration> {
    let digits = digits.trim_matches([' ', '\t']);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some(Duration::from_secs(digits.parse::<u32>().unwrap_or(u32::MAX).min(1 << 31).into()))
}

/// Splits a header line into directives: `name`, `name=token` or `name="quoted"`.
///
/// Values are returned without quotes. Returns `None` for an unterminated quote.
fn directives(line: &str) -> Option<Vec<(&str, &str)>> {
    let mut found = Vec::new();
    let mut rest = line;
    while !rest.is_empty() {
        let end = end_of_directive(rest)?;
        let directive = rest[..end].trim_matches([' ', '\t']);
        let (name, value) = directive.split_once('=').unwrap_or((directive, ""));
        let value =
            value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
        found.push((name.trim_end_matches([' ', '\t']), value));
        rest = rest[end..].strip_prefix(',').unwrap_or("");
    }
    Some(found)
}

/// Returns the position of the first comma outside quotes, or the length of `text`. Returns `None`
/// for an unterminated quote.
fn end_of_directive(text: &str) -> Option<usize> {
    let mut quoted = false;
    let mut escaped = false;
    for (index, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b',' if !quoted => return Some(index),
            _ => {}
        }
    }
    (!quoted).then_some(text.len())
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    fn parsed(lines: &[&[u8]]) -> Option<CacheControl> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(CACHE_CONTROL, HeaderValue::from_bytes(line).unwrap());
        }
        CacheControl::from_headers(&headers)
    }

    fn age(seconds: u64) -> CacheControl {
        CacheControl { max_age: Some(Duration::from_secs(seconds)), ..CacheControl::default() }
    }

    #[test]
    fn irrelevant_directives_are_ignored() {
        assert_eq!(parsed(&[]), None);
        assert_eq!(parsed(&[b""]), Some(CacheControl::default()));
        assert_eq!(
            parsed(&[b"public, immutable, stale-while-revalidate=9"]),
            Some(CacheControl::default())
        );
    }

    #[test]
    fn max_age_is_whole_seconds() {
        for (line, seconds) in [
            ("max-age=60", 60),
            ("MAX-AGE=60", 60),
            ("  public ,\tmax-age=60 , ", 60),
            ("max-age=\"60\"", 60),
            ("max-age=0", 0),
            ("max-age=007", 7),
            ("max-age=99999999999999999999", 1 << 31),
            ("max-age=60, s-maxage=5", 5),
            ("s-maxage=0, max-age=60", 0),
            ("x=\"max-age=9, \\\"max-age=8\", max-age=60", 60),
        ] {
            assert_eq!(parsed(&[line.as_bytes()]), Some(age(seconds)), "{line}");
        }
    }

    #[test]
    fn unreadable_or_repeated_max_age_is_zero() {
        for line in [
            "max-age",
            "max-age=",
            "max-age=-1",
            "max-age=1.5",
            "max-age=1s",
            "max-age=60, max-age=60",
            "s-maxage=x, max-age=60",
        ] {
            assert_eq!(parsed(&[line.as_bytes()]), Some(age(0)), "{line}");
        }
        assert_eq!(parsed(&[b"max-age=60", b"max-age=60"]), Some(age(0)));
    }

    #[test]
    fn storing_is_forbidden_in_every_form() {
        for line in [
            &b"no-store"[..],
            b"max-age=60,No-Store",
            b"private",
            b"private=\"set-cookie, x\"",
            b",,private = x",
            b"max-age=60, x=\"never ends",
            b"max-age=60, \xff",
        ] {
            assert!(parsed(&[line]).unwrap().no_store, "{line:?}");
        }
        assert!(parsed(&[b"max-age=60", b"no-store"]).unwrap().no_store);
        for line in [&b"no-cache"[..], b"no-cache=\"a, b\"", b"NO-CACHE , max-age=3"] {
            assert!(parsed(&[line]).unwrap().no_cache, "{line:?}");
        }
        assert!(!parsed(&[b"x=\"no-store, no-cache\", no-storex, xno-cache"]).unwrap().no_store);
    }
}
