//! `http:` and `https:` URLs: bounded in time, bytes, redirects and addresses.

use std::error::Error;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use reqwest::header::{ACCEPT, CONTENT_LENGTH, LOCATION};
use reqwest::{Client, Response, StatusCode, Url};
use url::Host;

use crate::policy::{AddressRefused, AddressRule, GuardedResolver, Lookup, is_public, system_lookup};
use crate::{MediaConfig, MediaError};

/// Fetches over HTTP/1.1. Keeps connections for reuse; does not look at proxy variables, and asks for no compression.
pub(crate) struct Fetcher {
    client: Client,
    rule: AddressRule,
    limits: MediaConfig,
}

impl Fetcher {
    pub(crate) fn new(config: &MediaConfig) -> Result<Self, MediaError> {
        let rule: AddressRule = if config.allow_private_addresses { Arc::new(|_| true) } else { Arc::new(is_public) };
        Self::with(config, rule, system_lookup())
    }

    /// With another rule or look-up, for tests.
    pub(crate) fn with(config: &MediaConfig, rule: AddressRule, lookup: Lookup) -> Result<Self, MediaError> {
        let roots = rustls::RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|_| MediaError::Internal)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let client = Client::builder()
            .tls_backend_preconfigured(tls)
            .dns_resolver(GuardedResolver { lookup, rule: rule.clone() })
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .referer(false)
            .connect_timeout(config.connect_timeout)
            .user_agent(concat!("chiasm/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|_| MediaError::Internal)?;
        Ok(Self { client, rule, limits: config.clone() })
    }

    /// The body behind a URL.
    pub(crate) async fn get(&self, url: Url) -> Result<Bytes, MediaError> {
        match tokio::time::timeout(self.limits.total_timeout, self.follow(url)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(MediaError::OriginTimeout),
        }
    }

    async fn follow(&self, mut url: Url) -> Result<Bytes, MediaError> {
        self.check(&url)?;
        for _ in 0..=self.limits.max_redirects {
            let request = self.client.get(url.clone()).header(ACCEPT, "image/*,*/*;q=0.5");
            let response = request.send().await.map_err(fault_of)?;
            let status = response.status();
            if is_redirect(status)
                && let Some(location) = response.headers().get(LOCATION)
            {
                let location = location.to_str().map_err(|_| MediaError::InvalidRedirect)?;
                url = url.join(location).map_err(|_| MediaError::InvalidRedirect)?;
                self.check(&url).map_err(|error| match error {
                    MediaError::AddressForbidden => error,
                    _ => MediaError::InvalidRedirect,
                })?;
                continue;
            }
            if !status.is_success() {
                return Err(MediaError::OriginStatus { status: status.as_u16() });
            }
            return self.body(response).await;
        }
        Err(MediaError::TooManyRedirects { limit: self.limits.max_redirects })
    }

    /// What can be refused before anything is sent. Host names are checked by the resolver, when they have addresses.
    fn check(&self, url: &Url) -> Result<(), MediaError> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(MediaError::UnsupportedScheme);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(MediaError::CredentialsInUrl);
        }
        let literal = match url.host() {
            None => {
                return Err(MediaError::InvalidUrl { reason: "it has no host" });
            }
            Some(Host::Domain(_)) => None,
            Some(Host::Ipv4(address)) => Some(address.into()),
            Some(Host::Ipv6(address)) => Some(address.into()),
        };
        match literal {
            Some(address) if !(self.rule)(address) => Err(MediaError::AddressForbidden),
            _ => Ok(()),
        }
    }

    /// Reads up to the limit and drops the connection at the first byte behind it.
    async fn body(&self, mut response: Response) -> Result<Bytes, MediaError> {
        let limit = self.limits.max_bytes;
        let announced =
            response.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if announced.is_some_and(|announced| announced > limit) {
            return Err(MediaError::TooManyBytes { limit });
        }
        let mut body = BytesMut::new();
        while let Some(part) = response.chunk().await.map_err(fault_of)? {
            if body.len() as u64 + part.len() as u64 > limit {
                return Err(MediaError::TooManyBytes { limit });
            }
            body.extend_from_slice(&part);
        }
        Ok(body.freeze())
    }
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// What an error of the HTTP client means. Its text may hold URLs and addresses and is not passed on.
fn fault_of(error: reqwest::Error) -> MediaError {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if error.is::<AddressRefused>() {
            return MediaError::AddressForbidden;
        }
        cause = error.source();
    }
    if error.is_timeout() { MediaError::OriginTimeout } else { MediaError::OriginFailed }
}

#[cfg(test)]
mod tests;
