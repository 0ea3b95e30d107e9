//! Limits and permissions of the media door.

use std::path::PathBuf;
use std::time::Duration;

/// Limits and permissions. The default refuses local files and private addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaConfig {
    /// Most encoded bytes of one media item. Default 64 MiB.
    pub max_bytes: u64,
    /// Most pixels of one image, as its header says. Default 178,956,970: vLLM's `VLLM_MAX_IMAGE_PIXELS`.
    pub max_pixels: u64,
    /// Longest time for a name look-up and one connection. Default 5 s.
    pub connect_timeout: Duration,
    /// Longest time for a whole fetch, redirects and body included. Default 15 s.
    pub total_timeout: Duration,
    /// Most redirects that are followed; 0 follows none. Default 5.
    pub max_redirects: usize,
    /// The directory below which `file:` URLs may read; `None` (the default) refuses them all.
    pub allowed_local_media_path: Option<PathBuf>,
    /// Whether to fetch from loopback, private, link-local and other addresses outside the public internet. Default no.
    pub allow_private_addresses: bool,
}

impl Default for MediaConfig {
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            max_pixels: 178_956_970,
            connect_timeout: Duration::from_secs(5),
            total_timeout: Duration::from_secs(15),
            max_redirects: 5,
            allowed_local_media_path: None,
            allow_private_addresses: false,
        }
    }
}
