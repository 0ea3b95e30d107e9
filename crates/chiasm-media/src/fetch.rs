//! `http:` and `https:` URLs: bounded in time, bytes, redirects, addresses and number.

mod client;
mod threads;
mod turns;

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
pub(crate) use threads::FetchThreads;
use turns::{Turn, Turns};

/// Longer timeouts count as this one, so that no point in time is beyond what clocks can tell.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// A body, and for how long it may be reused.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) bytes: Bytes,
    pub(crate) freshness: Freshness,
}

/// What an origin says to somebody who may know an earlier answer.
#[derive(Debug)]
pub(crate) enum Answer {
    New(Fetched),
    /// The known answer holds; [`Freshness::refreshed`] takes this.
    NotModified(Freshness),
}

/// Fetches over HTTP/1.1 and HTTP/2. Keeps connections for reuse; does not look at proxy variables,
/// and asks for no compression. The same request goes out whoever asks: no cookies, no credentials,
/// nothing of the client's own request.
pub(crate) struct Fetcher {
    clients: Clients,
    policy: UrlPolicy,
    turns: Turns,
    limits: Limits,
    freshness: FreshnessBounds,
    budget: ByteBudget,
    clock: Clock,
}

struct Limits {
    first_byte_timeout: Duration,
    stall_timeout: Duration,
    /// Fewest bytes in each `stall_timeout` of a body.
    min_bytes: u64,
    total_timeout: Duration,
    max_redirects: usize,
}

impl Fetcher {
    /// Reads bodies into `budget`; `clock` says when answers came.
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

    /// [`Self::new`] by other rules, look-ups and certificate authorities, for tests, and by the
    /// machine's clock.
    fn with(
        config: &MediaConfig,
        budget: ByteBudget,
        rule: AddressRule,
        lookup: Lookup,
        roots: RootCertStore,
    ) -> Result<Self, MediaError> {
        let [first_byte_timeout, stall_timeout, total_timeout] =
            [config.first_byte_timeout, config.stall_timeout, config.total_timeout]
                .map(|timeout| timeout.min(LONGEST));
        let min_bytes = (stall_timeout.as_secs_f64() * config.min_body_rate as f64) as u64;
        Ok(Self {
            clients: Clients::new(config, GuardedResolver { lookup, rule: rule.clone() }, roots)?,
            policy: UrlPolicy::new(config, rule),
            turns: Turns::new(config.max_fetches, config.max_fetches_per_origin),
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

    /// What can be refused before anything is sent: scheme, credentials, port, domain, literal
    /// address.
    pub(crate) fn check(&self, url: &Url) -> Result<(), MediaError> {
        self.policy.check(url)
    }

    /// The body behind a URL, of at most `max_bytes`, or that it is still what an earlier answer,
    /// of which `known` is left, was.
    ///
    /// Dropping the future ends the fetch.
    pub(crate) async fn get(
        &self,
        mut url: Url,
        mut known: Option<&Freshness>,
        max_bytes: u64,
    ) -> Result<Answer, MediaError> {
        self.check(&url)?;
        let deadline = Instant::now() + self.limits.total_timeout;
        let mut redirects = RedirectFreshness::none();
        let mut followed = 0;
        loop {
            let turn = self.turns.take(&url, deadline).await?;
            let condition = known.and_then(|known| known.condition(&url));
            let conditional = condition.is_some();
            let (response, received) = self.ask(&turn, &url, condition, deadline).await?;
            let (status, headers) = (response.status(), response.headers());
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
            let mut freshness = Freshness::of(&url, headers, received, redirects, self.freshness);
            match status {
                StatusCode::OK => {}
                // Made by a proxy from what the origin answered.
                StatusCode::NON_AUTHORITATIVE_INFORMATION => freshness.forbid_storing(),
                StatusCode::NOT_MODIFIED if conditional => {
                    if known.is_some_and(|known| known.is_confirmed_by(headers)) {
                        return Ok(Answer::NotModified(freshness));
                    }
                    // It speaks of another answer than the known one. Without that, it cannot say
                    // so again.
                    known = None;
                    continue;
                }
                _ => return Err(MediaError::OriginStatus { status: status.as_u16() }),
            }
            let bytes = self.body(response, deadline, max_bytes).await?;
            return Ok(Answer::New(Fetched { bytes, freshness }));
        }
    }

    /// Sends one request and waits for the head of its answer.
    async fn ask(
        &self,
        turn: &Turn<'_>,
        url: &Url,
        condition: Option<(HeaderName, HeaderValue)>,
        deadline: Instant,
    ) -> Result<(Response, Received), MediaError> {
        let mut request = self.clients.client(turn.keep_alive()).get(url.clone());
        if let Some((name, value)) = condition {
            request = request.header(name, value);
        }
        let asked = self.clock.now();
        let until = deadline.min(Instant::now() + self.limits.first_byte_timeout);
        let response = timeout_at(until, request.send())
            .await
            .map_err(|_| MediaError::OriginTimeout)?
            .map_err(fault_of)?;
        let received = Received { asked, at: self.clock.now(), date: self.clock.date() };
        Ok((response, received))
    }

    /// Reads up to the limit and drops the connection at the first byte behind it. Memory is
    /// counted as bytes come: what an origin announces takes none.
    async fn body(
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
        let mut body = self.budget.buffer_expecting(announced.unwrap_or(0) as usize);
        let mut since = (Instant::now(), 0);
        loop {
            let until = deadline.min(since.0 + self.limits.stall_timeout);
            let part =
                timeout_at(until, response.chunk()).await.map_err(|_| MediaError::OriginTimeout)?;
            let Some(part) = part.map_err(fault_of)? else {
                return Ok(body.freeze());
            };
            let length = body.as_slice().len() as u64 + part.len() as u64;
            if length > limit {
                return Err(MediaError::TooManyBytes { limit });
            }
            body.extend(&part)?;
            if length - since.1 >= self.limits.min_bytes {
                since = (Instant::now(), length);
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

/// The only `Location` of an answer.
fn location(headers: &HeaderMap) -> Result<&[u8], MediaError> {
    let mut locations = headers.get_all(LOCATION).iter().map(|location| location.as_bytes());
    let location = locations.next().ok_or(MediaError::InvalidRedirect)?;
    if locations.all(|other| other == location) {
        Ok(location)
    } else {
        Err(MediaError::InvalidRedirect)
    }
}

/// The URL that a `Location` leads to. Bytes above ASCII are UTF-8, as browsers take them.
pub(crate) fn redirect_target(from: &Url, location: &[u8]) -> Result<Url, MediaError> {
    let location = Some(location).filter(|location| location.len() <= MAX_URL_BYTES);
    let text = location
        .and_then(|location| str::from_utf8(location).ok())
        .ok_or(MediaError::InvalidRedirect)?;
    from.join(text).map_err(|_| MediaError::InvalidRedirect)
}

/// Whether the body is the file itself, not a compressed form, which may be larger than any limit
/// by far.
fn is_plain(headers: &HeaderMap) -> bool {
    headers.get_all(CONTENT_ENCODING).iter().all(|encoding| {
        let encoding = encoding.as_bytes().trim_ascii();
        encoding.is_empty() || encoding.eq_ignore_ascii_case(b"identity")
    })
}

/// What an error of the HTTP client means. Its text may hold URLs and addresses and is not passed
/// on.
fn fault_of(error: reqwest::Error) -> MediaError {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if error.is::<AddressRefused>() {
            return MediaError::AddressForbidden;
        }
        cause = error.source();
    }
    if error.is_builder() {
        return MediaError::InvalidUrl { reason: "it cannot be asked for over HTTP" };
    }
    if error.is_timeout() { MediaError::OriginTimeout } else { MediaError::OriginFailed }
}

#[cfg(test)]
mod tests;
