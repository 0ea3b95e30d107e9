//! The HTTP clients and their limits.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, HeaderMap, HeaderValue};
use rustls::{ClientConfig, RootCertStore};

use super::LONGEST;
use crate::media::ACCEPTED_TYPES;
use crate::policy::GuardedResolver;
use crate::{MediaConfig, MediaError};

/// The time for which an idle connection is kept for the next request.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// Connections that are kept to one origin, at most.
const MAX_IDLE_PER_ORIGIN: usize = 8;

/// Header lines of an answer over HTTP/1.1. Their bytes are limited by hyper, to 400 KiB.
const MAX_HEADERS: usize = 100;

/// Bytes of an answer's headers over HTTP/2.
const MAX_HEADER_BYTES: u32 = 64 << 10;

/// Bytes of a body that an origin may send over HTTP/2 before they are read: as much as arrives in
/// 50 ms at 20 MB/s.
const STREAM_WINDOW: u32 = 1 << 20;

/// The same for all bodies of one connection.
const CONNECTION_WINDOW: u32 = 4 << 20;

/// One client that keeps connections and one that does not.
pub(super) struct Clients {
    keeping: Client,
    closing: Client,
}

impl Clients {
    /// Makes clients that trust these certificate authorities.
    ///
    /// Neither follows redirects, looks at proxy variables, or sends cookies or a referrer. Every
    /// request has the same headers, save those that ask if a known answer has changed.
    pub(super) fn new(
        config: &MediaConfig,
        resolver: GuardedResolver,
        roots: RootCertStore,
    ) -> Result<Self, MediaError> {
        let mut tls =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|_| MediaError::Internal)?
                .with_root_certificates(roots)
                .with_no_client_auth();
        tls.alpn_protocols = vec![b"h2".into(), b"http/1.1".into()];
        let resolver = Arc::new(resolver);
        let build = |idle_per_origin| {
            Client::builder()
                .tls_backend_preconfigured(tls.clone())
                .dns_resolver(resolver.clone())
                .redirect(reqwest::redirect::Policy::none())
                .no_proxy()
                .referer(false)
                .user_agent(concat!("chiasm/", env!("CARGO_PKG_VERSION")))
                .default_headers(HeaderMap::from_iter([
                    (ACCEPT, HeaderValue::from_static(ACCEPTED_TYPES)),
                    (ACCEPT_ENCODING, HeaderValue::from_static("identity")),
                ]))
                .connect_timeout(config.connect_timeout.min(LONGEST))
                .pool_max_idle_per_host(idle_per_origin)
                .pool_idle_timeout(KEEP_ALIVE)
                .http1_max_headers(MAX_HEADERS)
                .http2_max_header_list_size(MAX_HEADER_BYTES)
                .http2_initial_stream_window_size(STREAM_WINDOW)
                .http2_initial_connection_window_size(CONNECTION_WINDOW)
                .build()
                .map_err(|_| MediaError::Internal)
        };
        Ok(Self { keeping: build(MAX_IDLE_PER_ORIGIN)?, closing: build(0)? })
    }

    pub(super) fn client(&self, keep_alive: bool) -> &Client {
        if keep_alive { &self.keeping } else { &self.closing }
    }
}

/// The certificate authorities that Mozilla trusts.
pub(super) fn web_roots() -> RootCertStore {
    RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() }
}
