//! `http:` and `https:` URLs, with limits on time, bytes, redirects, addresses and concurrency.

mod client;
mod limiter;
mod threads;

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, LOCATION,
};
use reqwest::{Response, StatusCode};
use rustls::RootCertStore;
use tokio::time::{Instant, timeout_at};
use url::Url;

use crate::freshness::{Freshness, FreshnessBounds, Received, RedirectFreshness};
use crate::policy::{
    AddressRefused, AddressRule, GuardedResolver, Lookup, MAX_URL_BYTES, UrlPolicy, system_lookup,
};
use crate::{ByteBudget, Clock, MediaConfig, MediaError};

use client::{Clients, web_roots};
use limiter::{FetchLimiter, FetchPermit};
pub(crate) use threads::FetchThreads;

/// The maximum timeout. Longer ones are clamped to it, so that deadlines cannot overflow the clock.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// A fetched body and its freshness.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) bytes: Bytes,
    pub(crate) freshness: Freshness,
}

/// The outcome of a successful fetch.
#[derive(Debug)]
pub(crate) enum FetchOutcome {
    Fetched(Fetched),
    /// The cached answer is still valid. [`Freshness::refreshed`] takes the new freshness.
    NotModified(Freshness),
}

/// Fetches over HTTP/1.1 and HTTP/2.
///
/// Keeps connections for reuse. Ignores proxy variables and requests no compression. Requests do
/// not depend on the client: no cookies, no credentials, and nothing from the client's own request.
pub(crate) struct Fetcher {
    clients: Clients,
    policy: UrlPolicy,
    limiter: FetchLimiter,
    limits: Limits,
    freshness: FreshnessBounds,
    budget: ByteBudget,
    clock: Clock,
}

struct Limits {
    first_byte_timeout: Duration,
    stall_timeout: Duration,
    /// The minimum number of bytes of a body in each `stall_timeout`.
    min_bytes: u64,
    total_timeout: Duration,
    max_redirects: usize,
}

impl Fetcher {
    /// Creates a fetcher that reads bodies into `budget` and dates answers by `clock`.
    pub(crate) fn new(
        config: &MediaConfig,
        budget: ByteBudget,
        clock: Clock,
    ) -> Result<Self, MediaError> {
        let fetcher = Self::with(
            config,
            budget,
            UrlPolicy::address_rule(config),
            system_lookup(),
            web_roots(),
        )?;
        Ok(Self { clock, ..fetcher })
    }

    /// Creates a fetcher with the given address rule, look-up and certificate authorities, and the
    /// machine's clock. Tests pass their own.
    fn with(
        config: &MediaConfig,
        budget: ByteBudget,
        rule: AddressRule,
        lookup: Lookup,
        roots: RootCertStore,
    ) -> Result<Self, MediaError> {
        let [first_byte_timeout, stall_timeout, total_timeout] =
            [config.first_byte_timeout, config.stall_timeout, config.total_timeout]
                .map(|timeout| timeout.min(MAX_TIMEOUT));
        let min_bytes = (stall_timeout.as_secs_f64() * config.min_body_rate as f64) as u64;
        Ok(Self {
            clients: Clients::new(config, GuardedResolver { lookup, rule: rule.clone() }, roots)?,
            policy: UrlPolicy::new(config, rule),
            limiter: FetchLimiter::new(config.max_fetches, config.max_fetches_per_origin),
            limits: Limits {
                first_byte_timeout,
                stall_timeout,
                min_bytes: min_bytes.max(1),
                total_timeout,
                max_redirects: config.max_redirects,
            },
            freshness: FreshnessBounds { min: config.min_freshness, max: config.max_freshness },
            budget,
            clock: Clock::default(),
        })
    }

    /// Checks the rules that need no network access: scheme, credentials, port, domain and literal
    /// address.
    pub(crate) fn check(&self, url: &Url) -> Result<(), MediaError> {
        self.policy.check(url)
    }

    /// Fetches the body of a URL, of at most `max_bytes`.
    ///
    /// If `cached` is given, the request is conditional where the origin can revalidate that
    /// answer.
    ///
    /// Dropping the future cancels the fetch.
    pub(crate) async fn get(
        &self,
        mut url: Url,
        mut cached: Option<&Freshness>,
        max_bytes: u64,
    ) -> Result<FetchOutcome, MediaError> {
        self.check(&url)?;
        let deadline = Instant::now() + self.limits.total_timeout;
        let mut redirects = RedirectFreshness::none();
        let mut followed = 0;
        loop {
            let permit = self.limiter.acquire(&url, deadline).await?;
            let condition = cached.and_then(|cached| cached.condition(&url));
            let is_conditional = condition.is_some();
            let (response, received) = self.send(&permit, &url, condition, deadline).await?;
            let status = response.status();
            let headers = response.headers();
            if is_redirect(status) && headers.contains_key(LOCATION) {
                if followed == self.limits.max_redirects {
                    return Err(MediaError::TooManyRedirects { limit: self.limits.max_redirects });
                }
                followed += 1;
                let target = redirect_target(&url, location(headers)?)?;
                self.policy.check_redirect(&url, &target)?;
                redirects.follow(is_permanent(status), headers, received, self.freshness);
                url = target;
                continue;
            }
            let mut freshness =
                Freshness::from_answer(&url, headers, received, redirects, self.freshness);
            match status {
                StatusCode::OK => {}
                // Modified by a transforming proxy.
                StatusCode::NON_AUTHORITATIVE_INFORMATION => freshness.forbid_storing(),
                StatusCode::NOT_MODIFIED if is_conditional => {
                    if cached.is_some_and(|cached| cached.is_confirmed_by(headers)) {
                        return Ok(FetchOutcome::NotModified(freshness));
                    }
                    // The 304 is about another answer than the cached one. The next request is
                    // unconditional, so that it cannot get a 304 again.
                    cached = None;
                    continue;
                }
                _ => return Err(MediaError::OriginStatus { status: status.as_u16() }),
            }
            let bytes = self.read_body(response, deadline, max_bytes).await?;
            return Ok(FetchOutcome::Fetched(Fetched { bytes, freshness }));
        }
    }

    /// Sends one request and waits for the head of the answer.
    async fn send(
        &self,
        permit: &FetchPermit<'_>,
        url: &Url,
        condition: Option<(HeaderName, HeaderValue)>,
        deadline: Instant,
    ) -> Result<(Response, Received), MediaError> {
        let mut request = self.clients.client(permit.keep_alive()).get(url.clone());
        if let Some((name, value)) = condition {
            request = request.header(name, value);
        }
        let requested_at = self.clock.now();
        let head_deadline = deadline.min(Instant::now() + self.limits.first_byte_timeout);
        let response = timeout_at(head_deadline, request.send())
            .await
            .map_err(|_| MediaError::OriginTimeout)?
            .map_err(to_media_error)?;
        let received = Received { requested_at, at: self.clock.now(), date: self.clock.date() };
        Ok((response, received))
    }

    /// Reads a body of at most `limit` bytes. Drops the connection at the first byte over the
    /// limit.
    ///
    /// Memory is charged as bytes arrive; an announced length charges nothing.
    async fn read_body(
        &self,
        mut response: Response,
        deadline: Instant,
        limit: u64,
    ) -> Result<Bytes, MediaError> {
        if !is_plain(response.headers()) {
            return Err(MediaError::OriginEncoding);
        }
        let announced = response
            .headers()
            .get(CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if announced.is_some_and(|announced| announced > limit) {
            return Err(MediaError::TooManyBytes { limit });
        }
        let mut body = self.budget.buffer_with_capacity(announced.unwrap_or(0) as usize);
        let mut window_start = Instant::now();
        let mut length_at_window_start = 0;
        loop {
            let part_deadline = deadline.min(window_start + self.limits.stall_timeout);
            let part = timeout_at(part_deadline, response.chunk())
                .await
                .map_err(|_| MediaError::OriginTimeout)?;
            let Some(part) = part.map_err(to_media_error)? else {
                return Ok(body.freeze());
            };
            let length = body.as_slice().len() as u64 + part.len() as u64;
            if length > limit {
                return Err(MediaError::TooManyBytes { limit });
            }
            body.extend(&part)?;
            if length - length_at_window_start >= self.limits.min_bytes {
                window_start = Instant::now();
                length_at_window_start = length;
            }
        }
    }
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

fn is_permanent(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 308)
}

/// Returns the `Location` of an answer. Refuses several different ones.
fn location(headers: &HeaderMap) -> Result<&[u8], MediaError> {
    let mut locations = headers.get_all(LOCATION).iter().map(|location| location.as_bytes());
    let location = locations.next().ok_or(MediaError::InvalidRedirect)?;
    if locations.all(|other| other == location) {
        Ok(location)
    } else {
        Err(MediaError::InvalidRedirect)
    }
}

/// Resolves a `Location` against the URL it came from. Bytes above ASCII are UTF-8, as in browsers.
pub(crate) fn redirect_target(from: &Url, location: &[u8]) -> Result<Url, MediaError> {
    let location = Some(location).filter(|location| location.len() <= MAX_URL_BYTES);
    let text = location
        .and_then(|location| str::from_utf8(location).ok())
        .ok_or(MediaError::InvalidRedirect)?;
    from.join(text).map_err(|_| MediaError::InvalidRedirect)
}

/// Returns `true` if the body is the plain file. A compressed body could expand far beyond any
/// limit.
fn is_plain(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_ENCODING).iter().all(|encoding| {
        let encoding = encoding.as_bytes().trim_ascii();
        encoding.is_empty() || encoding.eq_ignore_ascii_case(b"identity")
    })
}

/// Converts an error of the HTTP client. The error's text is dropped, because it may contain URLs
/// and addresses.
fn to_media_error(error: reqwest::Error) -> MediaError {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if error.is::<AddressRefused>() {
            return MediaError::AddressForbidden;
        }
        cause = error.source();
    }
    if error.is_builder() {
        return MediaError::InvalidUrl { reason: "it cannot be requested over HTTP" };
    }
    if error.is_timeout() { MediaError::OriginTimeout } else { MediaError::OriginFailed }
}

#[cfg(test)]
mod tests;
