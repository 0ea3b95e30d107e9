//! Limits and permissions of the media door.

use std::path::PathBuf;
use std::time::Duration;

use crate::ImageLimits;

/// Limits and permissions. The default refuses local files and private addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaConfig {
    /// Most encoded bytes of one media item. Default 64 MiB.
    pub max_bytes: u64,
    /// Most pixels of one image, as its header says. Default as in [`ImageLimits`].
    pub max_pixels: u64,
    /// Most pixels per row of one image and most rows, as its header says. Default as in [`ImageLimits`].
    pub max_side: u32,
    /// How many times longer than the other the longer side of an image may be. Default as in [`ImageLimits`].
    pub max_aspect_ratio: u32,
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

impl MediaConfig {
    /// The limits for [`EncodedImage::from_bytes`](crate::EncodedImage::from_bytes).
    pub fn image_limits(&self) -> ImageLimits {
        ImageLimits { max_pixels: self.max_pixels, max_side: self.max_side, max_aspect_ratio: self.max_aspect_ratio }
    }
}

impl Default for MediaConfig {
    fn default() -> Self {
        let ImageLimits { max_pixels, max_side, max_aspect_ratio } = ImageLimits::default();
        Self {
            max_bytes: 64 << 20,
            max_pixels,
            max_side,
            max_aspect_ratio,
            connect_timeout: Duration::from_secs(5),
            total_timeout: Duration::from_secs(15),
            max_redirects: 5,
            allowed_local_media_path: None,
            allow_private_addresses: false,
        }
    }
}
