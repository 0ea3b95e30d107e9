//! Limits and permissions of the media loader.

use std::path::PathBuf;
use std::time::Duration;

use crate::{DomainRule, MediaLimits};

/// Limits and permissions of a [`MediaLoader`](crate::MediaLoader).
///
/// The default refuses local files and private addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaConfig {
    /// The size limits of one media item, by its modality.
    pub limits: MediaLimits,
    /// The timeout for a name look-up and one connection, TLS included. Default 5 s.
    pub connect_timeout: Duration,
    /// The timeout until an origin's answer begins, connecting included. It restarts for each
    /// redirect. Default 10 s.
    pub first_byte_timeout: Duration,
    /// The timeout for the next [`min_body_rate`](Self::min_body_rate) × `stall_timeout` bytes of a
    /// body. Default 5 s.
    pub stall_timeout: Duration,
    /// The minimum rate of a body in bytes per second, checked once per
    /// [`stall_timeout`](Self::stall_timeout). Default 1,024.
    pub min_body_rate: u64,
    /// The timeout for a whole fetch, including the wait for a permit, redirects and the body.
    /// Default 15 s.
    pub total_timeout: Duration,
    /// The maximum number of concurrent fetches, at least 1. Default 128.
    pub max_fetches: usize,
    /// The maximum number of concurrent fetches from one host and port, at least 1. Default 32.
    pub max_fetches_per_origin: usize,
    /// The maximum number of redirects per fetch; 0 follows none. Default 5.
    pub max_redirects: usize,
    /// The capacity of the cache of encoded media in bytes; 0 disables the cache. Default 1 GiB.
    pub cache_bytes: u64,
    /// The maximum number of URLs, and of names given by clients, whose content is remembered.
    /// Default 100,000 of each.
    pub max_known_names: usize,
    /// The time for which a failed URL is not fetched again. Default 1 s.
    pub failure_ttl: Duration,
    /// The directory below which `file:` URLs may read; `None` (the default) refuses every `file:`
    /// URL.
    pub allowed_local_media_path: Option<PathBuf>,
    /// Allows fetches from loopback, private, link-local and other addresses outside the public
    /// internet. Default `false`.
    pub allow_private_addresses: bool,
    /// The allowed ports. `None` (the default) allows 80 and 443, or every port if private
    /// addresses are allowed.
    pub allowed_ports: Option<Vec<u16>>,
    /// The allowed hosts, also of redirects; empty (the default) allows all hosts.
    pub allowed_domains: Vec<DomainRule>,
    /// The minimum time for which a fetched answer is reused without a request to the origin, even
    /// if its headers allow less. Answers that must not be stored are not reused. Default 0.
    pub min_freshness: Duration,
    /// The maximum time for which a fetched answer is reused without a request to the origin, even
    /// if its headers allow more. Default 1 day.
    pub max_freshness: Duration,
}

impl Default for MediaConfig {
    fn default() -> Self {
        Self {
            limits: MediaLimits::default(),
            connect_timeout: Duration::from_secs(5),
            first_byte_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(5),
            min_body_rate: 1024,
            total_timeout: Duration::from_secs(15),
            max_fetches: 128,
            max_fetches_per_origin: 32,
            max_redirects: 5,
            cache_bytes: 1 << 30,
            max_known_names: 100_000,
            failure_ttl: Duration::from_secs(1),
            allowed_local_media_path: None,
            allow_private_addresses: false,
            allowed_ports: None,
            allowed_domains: Vec::new(),
            min_freshness: Duration::ZERO,
            max_freshness: Duration::from_secs(24 * 60 * 60),
        }
    }
}
