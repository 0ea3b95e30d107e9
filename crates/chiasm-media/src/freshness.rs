//! The time for which an answer may be reused: as long as RFC 9111 allows a shared cache, or less.
//!
//! Pure logic; times are passed in. Differences from the RFC:
//!
//! - No heuristic freshness: an answer without an explicit lifetime is fetched again, unless
//!   [`FreshnessBounds::min`] is set. A permanent redirect without a lifetime is as fresh as its
//!   target.
//! - Stale answers are never used, even if extensions allow it.
//! - `Vary` other than `*` is ignored: all requests have the same headers, no cookies and no
//!   credentials.
//! - `no-cache` and `private` that name fields apply to the whole answer.
//! - An unreadable `Age` makes an answer stale; section 5.1 ignores it.
//! - A 304 without an `ETag`, which many servers send, confirms an answer with one. Tags are
//!   compared weakly.
//!
//! The reasons for our own implementation: `docs/decisions/0009-own-freshness.md`.

mod cache_control;

use std::time::{Duration, Instant, SystemTime};

use reqwest::header::{
    AGE, DATE, ETAG, EXPIRES, HeaderMap, HeaderName, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH,
    LAST_MODIFIED, PRAGMA, VARY,
};
use url::Url;

use cache_control::{CacheControl, seconds};

/// The minimum age of a modification at which no later one can have the same date (RFC 9110,
/// section 8.8.2.2).
const MIN_MODIFICATION_AGE: Duration = Duration::from_secs(60);

/// The maximum lifetime. Longer ones are clamped to it, so that `Instant` cannot overflow.
const MAX_LIFETIME: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The maximum length of a validator in bytes. An answer with a longer one cannot be revalidated.
const MAX_VALIDATOR_BYTES: usize = 512;

/// The operator's bounds on freshness, which override the origin's headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreshnessBounds {
    /// The minimum lifetime of an answer that may be stored.
    pub(crate) min: Duration,
    /// The maximum lifetime of an answer.
    pub(crate) max: Duration,
}

/// The times at which a request was sent and its answer's headers were received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) requested_at: Instant,
    pub(crate) at: Instant,
    /// The wall-clock time at which the headers were received.
    pub(crate) date: SystemTime,
}

/// The freshness of an answer, from its headers and those of the redirects to it.
///
/// Holds at most a URL and two short headers.
#[derive(Clone, Debug)]
pub(crate) struct Freshness {
    own: AnswerFreshness,
    redirects: RedirectFreshness,
    bounds: FreshnessBounds,
    validator: Option<Validator>,
}

/// The freshness of the redirects that led to an answer: that of the redirect that expires first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RedirectFreshness {
    may_be_stored: bool,
    /// The earliest expiry among the redirects; `None` if none of them expires.
    expiry: Option<Instant>,
}

impl RedirectFreshness {
    /// Returns the freshness of an answer without redirects, which restricts nothing.
    pub(crate) fn none() -> Self {
        Self { may_be_stored: true, expiry: None }
    }

    /// Adds a redirect.
    pub(crate) fn follow(
        &mut self,
        permanent: bool,
        headers: &HeaderMap,
        received: Received,
        bounds: FreshnessBounds,
    ) {
        let redirect = AnswerFreshness::from_headers(headers, received);
        self.may_be_stored &= redirect.may_be_stored;
        if !permanent || redirect.lifetime.is_some() {
            let expiry = redirect.expiry(bounds);
            self.expiry = Some(self.expiry.map_or(expiry, |earlier| earlier.min(expiry)));
        }
    }
}

/// The freshness of one answer, without the redirects to it.
#[derive(Clone, Copy, Debug)]
struct AnswerFreshness {
    may_be_stored: bool,
    /// The lifetime since the origin generated the answer. Zero if the answer must be revalidated;
    /// `None` without an explicit lifetime.
    lifetime: Option<Duration>,
    /// `true` if the answer has a `Cache-Control`, or `Pragma: no-cache` in place of one.
    has_control: bool,
    /// `true` if the lifetime is from `Expires`, which is an absolute time.
    from_expires: bool,
    /// The time at which the answer was received.
    at: Instant,
    /// The age of the answer when it was received.
    age: Duration,
}

/// The validators of an answer, with its URL: the answer of another URL may have the same validator
/// by chance.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Validator {
    /// The URL without its fragment.
    url: Box<str>,
    etag: Option<HeaderValue>,
    last_modified: Option<HeaderValue>,
}

impl Freshness {
    /// Reads the freshness of the answer for `url`, which was reached through `redirects`.
    pub(crate) fn from_answer(
        url: &Url,
        headers: &HeaderMap,
        received: Received,
        redirects: RedirectFreshness,
        bounds: FreshnessBounds,
    ) -> Self {
        let own = AnswerFreshness::from_headers(headers, received);
        let validator = Validator::from_headers(url, headers, received.date);
        Self { own, redirects, bounds, validator }
    }

    /// Forbids storing the answer.
    pub(crate) fn forbid_storing(&mut self) {
        self.own.may_be_stored = false;
    }

    /// Returns `true` if the answer may be stored and storing it is useful: it is fresh for a
    /// while, or can be revalidated.
    pub(crate) fn may_be_stored(&self) -> bool {
        self.own.may_be_stored
            && self.redirects.may_be_stored
            && (self.is_fresh(self.own.at) || self.can_revalidate())
    }

    /// Returns `true` if the answer may be used without a request to the origin.
    pub(crate) fn is_fresh(&self, now: Instant) -> bool {
        let now = now.max(self.own.at);
        now < self.own.expiry(self.bounds)
            && self.redirects.expiry.is_none_or(|expiry| now < expiry)
    }

    /// Returns the size of the URL and the validators in bytes, without the struct itself.
    pub(crate) fn bytes(&self) -> usize {
        let header = |value: &Option<HeaderValue>| value.as_ref().map_or(0, HeaderValue::len);
        self.validator.as_ref().map_or(0, |validator| {
            validator.url.len() + header(&validator.etag) + header(&validator.last_modified)
        })
    }

    /// Returns `true` if the answer has a validator for conditional requests.
    pub(crate) fn can_revalidate(&self) -> bool {
        self.validator.is_some()
    }

    /// Returns the header of a conditional request to `url`. Returns `None` if the answer has no
    /// validator from that URL.
    pub(crate) fn condition(&self, url: &Url) -> Option<(HeaderName, HeaderValue)> {
        let Validator { etag, last_modified, .. } =
            self.validator.as_ref().filter(|validator| *validator.url == *without_fragment(url))?;
        // The date is not sent beside a tag: origins ignore it then.
        etag.clone()
            .map(|etag| (IF_NONE_MATCH, etag))
            .or_else(|| Some((IF_MODIFIED_SINCE, last_modified.clone()?)))
    }

    /// Returns `true` if a 304 with these headers can be about this answer: it names no other tag.
    pub(crate) fn is_confirmed_by(&self, headers: &HeaderMap) -> bool {
        let cached = self.validator.as_ref().and_then(|validator| validator.etag.as_ref());
        match (cached, headers.get(ETAG)) {
            (Some(cached), Some(confirmed)) => opaque_tag(cached) == opaque_tag(confirmed),
            _ => true,
        }
    }

    /// Returns the freshness after a 304 whose headers gave `newer`. Headers missing from the 304
    /// keep their earlier values.
    pub(crate) fn refreshed(self, newer: Self) -> Self {
        let own = newer.own.merged_over(&self.own);
        let validator = match (self.validator, newer.validator) {
            (Some(old), Some(new)) if old.url == new.url => Some(Validator {
                url: new.url,
                etag: new.etag.or(old.etag),
                last_modified: new.last_modified.or(old.last_modified),
            }),
            (old, None) => old,
            (_, new) => new,
        };
        Self { own, validator, ..newer }
    }
}

impl AnswerFreshness {
    fn from_headers(headers: &HeaderMap, received: Received) -> Self {
        let control = CacheControl::from_headers(headers);
        // `Pragma` is a request header, but old servers send it with answers.
        let pragma = || {
            headers
                .get_all(PRAGMA)
                .iter()
                .any(|value| value.as_bytes().eq_ignore_ascii_case(b"no-cache"))
        };
        let (controlled, has_control) = match control {
            Some(CacheControl { no_cache: true, .. }) => (Some(Duration::ZERO), true),
            Some(CacheControl { max_age, .. }) => (max_age, true),
            None => (pragma().then_some(Duration::ZERO), pragma()),
        };
        let lifetime = controlled.or_else(|| expires(headers, received.date));
        Self {
            may_be_stored: !control.is_some_and(|control| control.no_store)
                && !headers.get_all(VARY).iter().any(|names| names.as_bytes().contains(&b'*')),
            lifetime,
            has_control,
            from_expires: controlled.is_none() && lifetime.is_some(),
            at: received.at,
            age: initial_age(headers, received),
        }
    }

    /// Merges the headers of a 304 over those of the stored answer `before`: each header replaces
    /// its earlier value (RFC 9111, section 3.2).
    fn merged_over(self, before: &Self) -> Self {
        let mut merged = self;
        if self.lifetime.is_none() || !self.has_control {
            merged.may_be_stored &= before.may_be_stored;
        }
        merged.has_control |= before.has_control;
        merged.lifetime = match (self.lifetime, before.lifetime) {
            // `Expires` has no effect beside a retained `Cache-Control`. The shorter lifetime is
            // the safe choice.
            (Some(new), Some(kept)) if !self.has_control && !before.from_expires => {
                Some(new.min(kept))
            }
            (Some(new), _) => Some(new),
            (None, Some(_)) if self.has_control && !before.from_expires => None,
            (None, Some(kept)) if before.from_expires => {
                let elapsed =
                    before.age.saturating_add(self.at.saturating_duration_since(before.at));
                merged.from_expires = true;
                Some(kept.saturating_add(self.age).saturating_sub(elapsed))
            }
            (None, kept) => kept,
        };
        merged
    }

    /// Returns the time at which the answer becomes stale.
    fn expiry(&self, bounds: FreshnessBounds) -> Instant {
        let remaining = self
            .lifetime
            .unwrap_or_default()
            .saturating_sub(self.age)
            .min(bounds.max)
            .max(bounds.min);
        self.at + remaining.min(MAX_LIFETIME)
    }
}

impl Validator {
    /// Reads the validators of the answer for `url`. Returns `None` if it has none.
    fn from_headers(url: &Url, headers: &HeaderMap, received: SystemTime) -> Option<Self> {
        let etag = only(headers, ETAG).filter(|tag| is_entity_tag(tag)).cloned();
        let generated = date(headers, DATE).unwrap_or(received);
        let is_reliable = date(headers, LAST_MODIFIED).is_some_and(|modified| {
            generated.duration_since(modified).is_ok_and(|age| age >= MIN_MODIFICATION_AGE)
        });
        let last_modified = only(headers, LAST_MODIFIED).filter(|_| is_reliable).cloned();
        (etag.is_some() || last_modified.is_some()).then(|| Self {
            url: without_fragment(url).into(),
            etag,
            last_modified,
        })
    }
}

/// Returns `Expires` minus `Date`; zero for an unreadable or repeated `Expires`.
fn expires(headers: &HeaderMap, received: SystemTime) -> Option<Duration> {
    if !headers.contains_key(EXPIRES) {
        return None;
    }
    let generated = date(headers, DATE).unwrap_or(received);
    Some(
        date(headers, EXPIRES)
            .and_then(|expires| expires.duration_since(generated).ok())
            .unwrap_or_default(),
    )
}

/// Returns the `corrected_initial_age` of RFC 9111, section 4.2.3. An unreadable `Age` counts as
/// the maximum age.
fn initial_age(headers: &HeaderMap, received: Received) -> Duration {
    let Received { requested_at, at, date: received_date } = received;
    let apparent = date(headers, DATE)
        .and_then(|generated| received_date.duration_since(generated).ok())
        .unwrap_or_default();
    let age_value = match headers.get(AGE) {
        None => Duration::ZERO,
        Some(age) => age.to_str().ok().and_then(seconds).unwrap_or(Duration::MAX),
    };
    let response_delay = at.saturating_duration_since(requested_at);
    apparent.max(age_value.saturating_add(response_delay))
}

/// Returns the date in a header that occurs exactly once.
fn date(headers: &HeaderMap, name: HeaderName) -> Option<SystemTime> {
    httpdate::parse_http_date(only(headers, name)?.to_str().ok()?).ok()
}

/// Returns the value of a header that occurs exactly once and is not too long.
fn only(headers: &HeaderMap, name: HeaderName) -> Option<&HeaderValue> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|value| value.len() <= MAX_VALIDATOR_BYTES)?;
    values.next().is_none().then_some(value)
}

/// Returns `true` for `"…"` or `W/"…"` without a quote or white space inside.
fn is_entity_tag(tag: &HeaderValue) -> bool {
    let tag = opaque_tag(tag);
    tag.len() >= 2
        && tag.first() == Some(&b'"')
        && tag.last() == Some(&b'"')
        && !tag[1..tag.len() - 1].iter().any(|&byte| byte == b'"' || byte == b' ' || byte == b'\t')
}

/// Returns the tag without its weakness mark, for the weak comparison of `If-None-Match`.
fn opaque_tag(tag: &HeaderValue) -> &[u8] {
    let tag = tag.as_bytes();
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// Returns the part of a URL that is sent.
fn without_fragment(url: &Url) -> &str {
    &url[..url::Position::AfterQuery]
}

#[cfg(test)]
mod tests;
