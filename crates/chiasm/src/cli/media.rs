//! Flags of the media loader.

use std::path::PathBuf;
use std::time::Duration;

use chiasm_media::DomainRule;
use chiasm_pipeline::ItemLimits;
use chiasm_types::Modality;
use clap::Args;
use serde_json::Value;

use super::seconds;

#[derive(Debug, Args)]
pub(crate) struct MediaArgs {
    /// Folder below which file:// URLs may be read [default: none]
    #[arg(long, env = "CHIASM_ALLOWED_LOCAL_MEDIA_PATH", value_name = "DIR")]
    pub(crate) allowed_local_media_path: Option<PathBuf>,
    /// Hosts that media may be fetched from: example.com, or *.example.com for all hosts below it
    /// [default: all]
    #[arg(
        long,
        env = "CHIASM_ALLOWED_MEDIA_DOMAINS",
        value_name = "HOST",
        num_args = 1..,
        value_delimiter = ','
    )]
    pub(crate) allowed_media_domains: Vec<DomainRule>,
    /// Ports that media may be fetched from [default: 80,443; all with --allow-private-media]
    #[arg(
        long,
        env = "CHIASM_ALLOWED_MEDIA_PORTS",
        value_name = "PORT",
        num_args = 1..,
        value_delimiter = ','
    )]
    pub(crate) allowed_media_ports: Option<Vec<u16>>,
    /// Fetch media from loopback, private and link-local addresses too, and from every port unless
    /// --allowed-media-ports is given
    #[arg(long, env = "CHIASM_ALLOW_PRIVATE_MEDIA")]
    pub(crate) allow_private_media: bool,
    /// Maximum number of items of each modality in one prompt: image=8, or as in vLLM {"image": 8}.
    /// Other modalities keep their defaults
    #[arg(
        long,
        env = "CHIASM_LIMIT_MM_PER_PROMPT",
        value_name = "LIMITS",
        value_parser = items_per_prompt,
        default_value = "image=64,video=16,audio=64"
    )]
    pub(crate) limit_mm_per_prompt: ItemLimits,
    /// Maximum bytes of one encoded image
    #[arg(long, env = "CHIASM_MAX_IMAGE_BYTES", default_value_t = 32 << 20)]
    pub(crate) max_image_bytes: u64,
    /// Maximum number of pixels of one image
    #[arg(long, env = "CHIASM_MAX_IMAGE_PIXELS", default_value_t = 178_956_970)]
    pub(crate) max_image_pixels: u64,
    /// Maximum width and height of one image, in pixels
    #[arg(long, env = "CHIASM_MAX_IMAGE_SIDE", default_value_t = 65_535)]
    pub(crate) max_image_side: u32,
    /// Maximum ratio of an image's longer side to its shorter side
    #[arg(long, env = "CHIASM_MAX_IMAGE_ASPECT_RATIO", default_value_t = 1000)]
    pub(crate) max_image_aspect_ratio: u32,
    /// Maximum number of scans of one progressive JPEG
    #[arg(long, env = "CHIASM_MAX_IMAGE_SCANS", default_value_t = 100)]
    pub(crate) max_image_scans: u32,
    /// Maximum bytes of one encoded video
    #[arg(long, env = "CHIASM_MAX_VIDEO_BYTES", default_value_t = 256 << 20)]
    pub(crate) max_video_bytes: u64,
    /// Maximum bytes of one encoded audio recording
    #[arg(long, env = "CHIASM_MAX_AUDIO_BYTES", default_value_t = 64 << 20)]
    pub(crate) max_audio_bytes: u64,
    /// Maximum bytes in memory for requests in flight: bodies, encoded media and tensors to send in
    /// messages; at an agent, jobs and their media. Beyond it a request gets 503, and a job goes to
    /// another agent
    #[arg(long, env = "CHIASM_MAX_BYTES_IN_FLIGHT", default_value_t = 1 << 30)]
    pub(crate) max_bytes_in_flight: u64,
    /// Size in bytes of the cache of encoded media; 0 for no cache
    #[arg(long, env = "CHIASM_MEDIA_CACHE_BYTES", default_value_t = 1 << 30)]
    pub(crate) media_cache_bytes: u64,
    /// Size in bytes of the cache of media tensors for sending the same item to further engines in
    /// messages; 0 for no cache
    #[arg(long, env = "CHIASM_PROCESSED_CACHE_BYTES", default_value_t = 256 << 20)]
    pub(crate) processed_cache_bytes: u64,
    /// Maximum number of URLs, and of uuids, whose media is remembered
    #[arg(long, env = "CHIASM_MAX_MEDIA_NAMES", default_value_t = 100_000)]
    pub(crate) max_media_names: usize,
    /// Maximum seconds to fetch one media item, including redirects and the wait for
    /// --max-media-fetches
    #[arg(long, env = "CHIASM_MEDIA_TIMEOUT", value_parser = seconds, default_value = "10")]
    pub(crate) media_timeout: Duration,
    /// Maximum seconds to connect to an origin, including the name look-up
    #[arg(long, env = "CHIASM_MEDIA_CONNECT_TIMEOUT", value_parser = seconds, default_value = "5")]
    pub(crate) media_connect_timeout: Duration,
    /// Maximum seconds until an origin's response begins, including connecting
    #[arg(
        long,
        env = "CHIASM_MEDIA_FIRST_BYTE_TIMEOUT",
        value_parser = seconds,
        default_value = "10"
    )]
    pub(crate) media_first_byte_timeout: Duration,
    /// Minimum bytes per second of a media item that is being fetched
    #[arg(long, env = "CHIASM_MEDIA_MIN_RATE", default_value_t = 1024)]
    pub(crate) media_min_rate: u64,
    /// Maximum number of redirects to follow for one media item
    #[arg(long, env = "CHIASM_MEDIA_MAX_REDIRECTS", default_value_t = 5)]
    pub(crate) media_max_redirects: usize,
    /// Maximum number of concurrent fetches
    #[arg(long, env = "CHIASM_MAX_MEDIA_FETCHES", default_value_t = 128)]
    pub(crate) max_media_fetches: usize,
    /// Maximum number of concurrent fetches from one host and port
    #[arg(long, env = "CHIASM_MAX_MEDIA_FETCHES_PER_ORIGIN", default_value_t = 32)]
    pub(crate) max_media_fetches_per_origin: usize,
    /// Minimum seconds for which fetched media is reused without asking its origin, even if its
    /// headers allow less (but not against no-store)
    #[arg(long, env = "CHIASM_MEDIA_MIN_FRESHNESS", value_parser = seconds, default_value = "0")]
    pub(crate) media_min_freshness: Duration,
    /// Maximum seconds for which fetched media is reused without asking its origin, even if its
    /// headers allow more
    #[arg(
        long,
        env = "CHIASM_MEDIA_MAX_FRESHNESS",
        value_parser = seconds,
        default_value = "86400"
    )]
    pub(crate) media_max_freshness: Duration,
    /// Seconds for which a URL that failed is not fetched again
    #[arg(long, env = "CHIASM_MEDIA_ERROR_TTL", value_parser = seconds, default_value = "1")]
    pub(crate) media_error_ttl: Duration,
}

/// The error of an invalid value of `--limit-mm-per-prompt`.
#[derive(Debug, thiserror::Error)]
enum LimitError {
    #[error("expected image=8 or {{\"image\": 8}}")]
    Form,
    #[error("'{0}' is not a modality; use image, video or audio")]
    Modality(String),
}

/// Parses `image=8,video=0` or, like vLLM, a JSON object whose values are counts or objects with a
/// `count`.
fn items_per_prompt(text: &str) -> Result<ItemLimits, LimitError> {
    let mut limits = ItemLimits::default();
    for (name, count) in counts(text)? {
        match Modality::from_name(&name) {
            Modality::Other(_) => return Err(LimitError::Modality(name)),
            modality => limits.set(modality, count),
        }
    }
    Ok(limits)
}

fn counts(text: &str) -> Result<Vec<(String, usize)>, LimitError> {
    if !text.trim_start().starts_with('{') {
        let pair = |pair: &str| {
            let (modality, count) = pair.split_once('=')?;
            Some((modality.trim().to_owned(), count.trim().parse().ok()?))
        };
        return text.split(',').map(|text| pair(text).ok_or(LimitError::Form)).collect();
    }
    let Ok(Value::Object(limits)) = serde_json::from_str(text) else {
        return Err(LimitError::Form);
    };
    let count =
        |limit: Value| limit.get("count").unwrap_or(&limit).as_u64().map(|count| count as usize);
    limits
        .into_iter()
        .map(|(modality, limit)| Ok((modality, count(limit).ok_or(LimitError::Form)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn item_limits_are_pairs_or_json() {
        for (text, images) in [
            ("image=8", 8),
            ("image=0,video=2", 0),
            ("{\"image\": 3}", 3),
            ("{\"image\": {\"count\": 5, \"width\": 512}, \"audio\": 1}", 5),
            ("{\"video\": 1}", 64),
        ] {
            assert_eq!(items_per_prompt(text).unwrap().get(&Modality::Image), images, "{text}");
        }
        for text in [
            "8",
            "image",
            "image=-1",
            "image=x",
            "picture=1",
            "{\"image\": \"8\"}",
            "{",
            "{\"image\": {}}",
            "",
        ] {
            assert!(items_per_prompt(text).is_err(), "{text}");
        }
    }
}
