//! The time for which an answer may be reused: what RFC 9111 allows a shared cache, and no more.
//!
//! Pure logic: times are passed in. Differences from the RFC:
//!
//! - Nothing is guessed: an answer that does not say for how long it is fresh is asked for again,
//!   unless [`FreshnessBounds::min`] says otherwise. A permanent redirect that says nothing is as
//!   fresh as what it leads to.
//! - Stale answers are never used, whatever extensions allow.
//! - `Vary` other than `*` needs no second answers: all requests have the same headers, no cookies
//!   and no credentials.
//! - `no-cache` and `private` that name fields count for the whole answer.
//! - An `Age` that cannot be read makes an answer stale; section 5.1 has it ignored.
//! - A 304 without an `ETag`, which many servers send, confirms an answer that has one, and tags
//!   are compared weakly.
//!
//! Why these rules are our own: `docs/decisions/0009-own-freshness.md`.

mod cache_control;

use std::time::{Duration, Instant, SystemTime};

use reqwest::header::{
    AGE, DATE, ETAG, EXPIRES, HeaderMap, HeaderName, HeaderValue, IF_MODIFIED_SINCE, IF_NONE_MATCH,
    LAST_MODIFIED, PRAGMA, VARY,
};
use url::Url;

use cache_control::{CacheControl, seconds};

/// How much older than the answer a modification must be so that no later one has the same date
/// (RFC 9110, section 8.8.2.2).
const SETTLED: Duration = Duration::from_secs(60);

/// Nothing is fresh for longer: clocks do not tell all times.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Longest validator that is kept, in bytes. Longer ones make an answer one that cannot be asked
/// for again.
const MAX_VALIDATOR_BYTES: usize = 512;

/// What the operator says of freshness, whatever origins say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreshnessBounds {
    /// The shortest time for which an answer that may be stored is fresh.
    pub(crate) min: Duration,
    /// The longest time for which an answer is fresh.
    pub(crate) max: Duration,
}

/// The moments at which a request was sent and its answer's headers came.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) asked: Instant,
    pub(crate) at: Instant,
    /// What the wall clock said when they came.
    pub(crate) date: SystemTime,
}

/// What an answer's headers say of reusing it, and those of the redirects to it. Holds at most a
/// URL and two short headers.
#[derive(Clone, Debug)]
pub(crate) struct Freshness {
    own: Statement,
    redirects: RedirectFreshness,
    bounds: FreshnessBounds,
    validator: Option<Validator>,
}

/// What the redirects on the way to an answer say of going that way again. As long as the shortest
/// of them lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RedirectFreshness {
    may_be_stored: bool,
    /// The first moment at which one of them is not fresh any more; `None` if there is no such.
    until: Option<Instant>,
}

impl RedirectFreshness {
    /// There were no redirects: nothing is shortened and nothing forbidden.
    pub(crate) fn none() -> Self {
        Self { may_be_stored: true, until: None }
    }

    /// Adds a redirect.
    pub(crate) fn follow(
        &mut self,
        permanent: bool,
        headers: &HeaderMap,
        received: Received,
        bounds: FreshnessBounds,
    ) {
        let redirect = Statement::of(headers, received);
        self.may_be_stored &= redirect.may_be_stored;
        if !permanent || redirect.lifetime.is_some() {
            let until = redirect.until(bounds);
            self.until = Some(self.until.map_or(until, |earlier| earlier.min(until)));
        }
    }
}

/// What one answer says.
#[derive(Clone, Copy, Debug)]
struct Statement {
    may_be_stored: bool,
    /// The time from when the origin made the answer; zero for one that must be asked for again;
    /// `None` if nothing is said.
    lifetime: Option<Duration>,
    /// Whether it has a `Cache-Control`, or `Pragma: no-cache` in place of one.
    has_control: bool,
    /// Whether the lifetime is that of `Expires`, which is a moment.
    by_expires: bool,
    /// The moment at which the answer came, and how old it was then.
    at: Instant,
    age: Duration,
}

/// What to ask an origin with, and about which URL: another's answer may have the same validator by
/// chance.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Validator {
    /// The URL without its fragment.
    url: Box<str>,
    etag: Option<HeaderValue>,
    last_modified: Option<HeaderValue>,
}

impl Freshness {
    /// What the answer for `url`, which `redirects` led to, says with these headers.
    pub(crate) fn of(
        url: &Url,
        headers: &HeaderMap,
        received: Received,
        redirects: RedirectFreshness,
        bounds: FreshnessBounds,
    ) -> Self {
        let validator = Validator::of(url, headers, received.date);
        Self { own: Statement::of(headers, received), redirects, bounds, validator }
    }

    /// Makes it an answer that may not be stored.
    pub(crate) fn forbid_storing(&mut self) {
        self.own.may_be_stored = false;
    }

    /// Whether it is allowed to store the answer, and worth it: it is fresh for a while, or can be
    /// asked about.
    pub(crate) fn may_be_stored(&self) -> bool {
        self.own.may_be_stored
            && self.redirects.may_be_stored
            && (self.is_fresh(self.own.at) || self.can_revalidate())
    }

    /// Whether the answer may be used without asking the origin.
    pub(crate) fn is_fresh(&self, now: Instant) -> bool {
        let now = now.max(self.own.at);
        now < self.own.until(self.bounds) && self.redirects.until.is_none_or(|until| now < until)
    }

    /// The bytes of URL and validators, beside the size of the struct itself.
    pub(crate) fn bytes(&self) -> usize {
        let header = |value: &Option<HeaderValue>| value.as_ref().map_or(0, HeaderValue::len);
        let known = |known: &Validator| {
            known.url.len() + header(&known.etag) + header(&known.last_modified)
        };
        self.validator.as_ref().map_or(0, known)
    }

    /// Whether the origin can be asked if the answer has changed.
    pub(crate) fn can_revalidate(&self) -> bool {
        self.validator.is_some()
    }

    /// The header to ask this URL with whether its answer has changed; `None` if that cannot be
    /// asked there.
    pub(crate) fn condition(&self, url: &Url) -> Option<(HeaderName, HeaderValue)> {
        let Validator { etag, last_modified, .. } =
            self.validator.as_ref().filter(|validator| *validator.url == *without_fragment(url))?;
        // An origin that gets both ignores the date.
        etag.clone()
            .map(|etag| (IF_NONE_MATCH, etag))
            .or_else(|| Some((IF_MODIFIED_SINCE, last_modified.clone()?)))
    }

    /// Whether "not modified" with these headers can be about the answer that this belongs to: it
    /// names no other tag.
    pub(crate) fn is_confirmed_by(&self, headers: &HeaderMap) -> bool {
        let known = self.validator.as_ref().and_then(|validator| validator.etag.as_ref());
        match (known, headers.get(ETAG)) {
            (Some(known), Some(named)) => opaque_tag(known) == opaque_tag(named),
            _ => true,
        }
    }

    /// The freshness after the origin has said "not modified" by the headers of `by`. What these do
    /// not say holds as it was said before.
    pub(crate) fn refreshed(self, by: Self) -> Self {
        let own = by.own.over(&self.own);
        let validator = match (self.validator, by.validator) {
            (Some(old), Some(new)) if old.url == new.url => Some(Validator {
                url: new.url,
                etag: new.etag.or(old.etag),
                last_modified: new.last_modified.or(old.last_modified),
            }),
            (old, None) => old,
            (_, new) => new,
        };
        Self { own, validator, ..by }
    }
}

impl Statement {
    fn of(headers: &HeaderMap, received: Received) -> Self {
        let control = CacheControl::of(headers);
        // A request header by birth, which old servers send as an answer's.
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
            by_expires: controlled.is_none() && lifetime.is_some(),
            at: received.at,
            age: initial_age(headers, received),
        }
    }

    /// What holds after a "not modified" with this over what was said before: each of its headers
    /// takes the place of the one before (RFC 9111, section 3.2).
    fn over(self, before: &Self) -> Self {
        let mut now = self;
        if self.lifetime.is_none() || !self.has_control {
            now.may_be_stored &= before.may_be_stored;
        }
        now.has_control |= before.has_control;
        now.lifetime = match (self.lifetime, before.lifetime) {
            // An `Expires` counts for nothing beside a kept `Cache-Control`. The shorter one is on
            // the careful side.
            (Some(new), Some(kept)) if !self.has_control && !before.by_expires => {
                Some(new.min(kept))
            }
            (Some(new), _) => Some(new),
            (None, Some(_)) if self.has_control && !before.by_expires => None,
            (None, Some(kept)) if before.by_expires => {
                let gone = before.age.saturating_add(self.at.saturating_duration_since(before.at));
                now.by_expires = true;
                Some(kept.saturating_add(self.age).saturating_sub(gone))
            }
            (None, kept) => kept,
        };
        now
    }

    /// The first moment at which the answer is not fresh any more.
    fn until(&self, bounds: FreshnessBounds) -> Instant {
        let left = self
            .lifetime
            .unwrap_or_default()
            .saturating_sub(self.age)
            .min(bounds.max)
            .max(bounds.min);
        self.at + left.min(FOREVER)
    }
}

impl Validator {
    fn of(url: &Url, headers: &HeaderMap, received: SystemTime) -> Option<Self> {
        let etag = only(headers, ETAG).filter(|tag| is_entity_tag(tag)).cloned();
        let made = date(headers, DATE).unwrap_or(received);
        let settled = date(headers, LAST_MODIFIED)
            .is_some_and(|modified| made.duration_since(modified).is_ok_and(|ago| ago >= SETTLED));
        let last_modified = only(headers, LAST_MODIFIED).filter(|_| settled).cloned();
        (etag.is_some() || last_modified.is_some()).then(|| Self {
            url: without_fragment(url).into(),
            etag,
            last_modified,
        })
    }
}

/// `Expires` minus `Date`; zero for an `Expires` that cannot be read, or is there twice.
fn expires(headers: &HeaderMap, received: SystemTime) -> Option<Duration> {
    if !headers.contains_key(EXPIRES) {
        return None;
    }
    let made = date(headers, DATE).unwrap_or(received);
    Some(
        date(headers, EXPIRES)
            .and_then(|expires| expires.duration_since(made).ok())
            .unwrap_or_default(),
    )
}

/// The `corrected_initial_age` of RFC 9111, section 4.2.3. An `Age` that cannot be read is as old
/// as can be.
fn initial_age(headers: &HeaderMap, Received { asked, at, date: received }: Received) -> Duration {
    let apparent =
        date(headers, DATE).and_then(|made| received.duration_since(made).ok()).unwrap_or_default();
    let told = match headers.get(AGE) {
        None => Duration::ZERO,
        Some(age) => age.to_str().ok().and_then(seconds).unwrap_or(Duration::MAX),
    };
    apparent.max(told.saturating_add(at.saturating_duration_since(asked)))
}

/// The date in a header that is there once.
fn date(headers: &HeaderMap, name: HeaderName) -> Option<SystemTime> {
    httpdate::parse_http_date(only(headers, name)?.to_str().ok()?).ok()
}

/// A header that is there once, and is short.
fn only(headers: &HeaderMap, name: HeaderName) -> Option<&HeaderValue> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|value| value.len() <= MAX_VALIDATOR_BYTES)?;
    values.next().is_none().then_some(value)
}

/// `"…"` or `W/"…"` without a quote inside.
fn is_entity_tag(tag: &HeaderValue) -> bool {
    let tag = opaque_tag(tag);
    tag.len() >= 2
        && tag.first() == Some(&b'"')
        && tag.last() == Some(&b'"')
        && !tag[1..tag.len() - 1].iter().any(|&byte| byte == b'"' || byte == b' ' || byte == b'\t')
}

/// The tag without its mark of weakness, as `If-None-Match` compares it.
fn opaque_tag(tag: &HeaderValue) -> &[u8] {
    let tag = tag.as_bytes();
    tag.strip_prefix(b"W/").unwrap_or(tag)
}

/// The part of a URL that is sent.
fn without_fragment(url: &Url) -> &str {
    &url[..url::Position::AfterQuery]
}

#[cfg(test)]
mod tests;
