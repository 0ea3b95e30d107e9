//! Limits and permissions of the media door.

use std::path::PathBuf;
use std::time::Duration;

use crate::{DomainRule, MediaLimits};

/// Limits and permissions. The default refuses local files and private addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaConfig {
    /// The limits of one media item, by its modality.
    pub limits: MediaLimits,
    /// Longest time for a name look-up and one connection, TLS included. Default 5 s.
    pub connect_timeout: Duration,
    /// Longest time until an origin's answer begins, connecting included; again for each redirect.
    /// Default 10 s.
    pub first_byte_timeout: Duration,
    /// Longest time for the next [`min_body_rate`](Self::min_body_rate) × this many bytes of a
    /// body. Default 5 s.
    pub stall_timeout: Duration,
    /// Fewest bytes per second of a body, looked at once per
    /// [`stall_timeout`](Self::stall_timeout). Default 1,024.
    pub min_body_rate: u64,
    /// Longest time for a whole fetch: waiting for its turn, redirects and body included. Default
    /// 15 s.
    pub total_timeout: Duration,
    /// Most fetches at once, at least 1. Default 128.
    pub max_fetches: usize,
    /// Most fetches at once from one host and port, at least 1. Default 32.
    pub max_fetches_per_origin: usize,
    /// Most redirects that are followed; 0 follows none. Default 5.
    pub max_redirects: usize,
    /// Most bytes of encoded media that are kept for later requests; 0 keeps nothing. Default 1
    /// GiB.
    pub cache_bytes: u64,
    /// Most URLs, and most names given by clients, whose content is remembered. Default 100,000 of
    /// each.
    pub max_known_names: usize,
    /// The time for which a URL that has failed is not tried again. Default 1 s.
    pub failures_last: Duration,
    /// The directory below which `file:` URLs may read; `None` (the default) refuses them all.
    pub allowed_local_media_path: Option<PathBuf>,
    /// Whether to fetch from loopback, private, link-local and other addresses outside the public
    /// internet. Default no.
    pub allow_private_addresses: bool,
    /// The ports to fetch from; `None` (the default) is 80 and 443, or any if private addresses are
    /// allowed.
    pub allowed_ports: Option<Vec<u16>>,
    /// The hosts to fetch from, redirects included; empty (the default) for any.
    pub allowed_domains: Vec<DomainRule>,
    /// The time for which a fetched answer is reused without asking the origin, even if its headers
    /// claim less. Answers that must not be stored are not reused. Default 0.
    pub min_freshness: Duration,
    /// The longest time for which a fetched answer is reused without asking the origin, whatever
    /// its headers allow. Default 1 day.
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
            failures_last: Duration::from_secs(1),
            allowed_local_media_path: None,
            allow_private_addresses: false,
            allowed_ports: None,
            allowed_domains: Vec::new(),
            min_freshness: Duration::ZERO,
            max_freshness: Duration::from_secs(24 * 60 * 60),
        }
    }
}
