//! The HTTP clients and their limits.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use reqwest::header::{ACCEPT, ACCEPT_ENCODING, HeaderMap, HeaderValue};
use rustls::{ClientConfig, RootCertStore};

use super::MAX_TIMEOUT;
use crate::media::ACCEPTED_TYPES;
use crate::policy::GuardedResolver;
use crate::{MediaConfig, MediaError};

/// The time for which an idle connection is kept for reuse.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// The maximum number of idle connections per origin.
const MAX_IDLE_PER_ORIGIN: usize = 8;

/// The maximum number of header lines of an HTTP/1.1 answer. hyper limits their size to 400 KiB.
const MAX_HEADERS: usize = 100;

/// The maximum size of the headers of an HTTP/2 answer in bytes.
const MAX_HEADER_BYTES: u32 = 64 << 10;

/// The HTTP/2 flow-control window of a stream: as many bytes as arrive in 50 ms at 20 MB/s.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// The HTTP/2 flow-control window of a connection.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// Two HTTP clients: one keeps idle connections, the other closes them.
pub(super) struct Clients {
    keeping: Client,
    closing: Client,
}

impl Clients {
    /// Creates clients that trust the given certificate authorities.
    ///
    /// Neither client follows redirects, reads proxy variables, or sends cookies or a referrer. All
    /// requests have the same headers, except for conditional ones.
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
                .connect_timeout(config.connect_timeout.min(MAX_TIMEOUT))
                .pool_max_idle_per_host(idle_per_origin)
                .pool_idle_timeout(KEEP_ALIVE)
                .http1_max_headers(MAX_HEADERS)
                .http2_max_header_list_size(MAX_HEADER_BYTES)
                .http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
                .http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
                .build()
                .map_err(|_| MediaError::Internal)
        };
        Ok(Self { keeping: build(MAX_IDLE_PER_ORIGIN)?, closing: build(0)? })
    }

    /// Returns the client that keeps its connections, or the one that closes them.
    pub(super) fn client(&self, keep_alive: bool) -> &Client {
        if keep_alive { &self.keeping } else { &self.closing }
    }
}

/// Returns the certificate authorities that Mozilla trusts.
pub(super) fn web_roots() -> RootCertStore {
    RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() }
}
