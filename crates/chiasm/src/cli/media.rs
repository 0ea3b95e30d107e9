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
    /// Folder below which file:// URLs may be read [default: none may]
    #[arg(long, env = "CHIASM_ALLOWED_LOCAL_MEDIA_PATH", value_name = "DIR")]
    pub(crate) allowed_local_media_path: Option<PathBuf>,
    /// Fetch images from these hosts only: example.com, or *.example.com for all below it [default:
    /// from all]
    #[arg(long, env = "CHIASM_ALLOWED_MEDIA_DOMAINS", value_name = "HOST", num_args = 1.., value_delimiter = ',')]
    pub(crate) allowed_media_domains: Vec<DomainRule>,
    /// Fetch images from these ports only [default: 80,443; with --allow-private-media all]
    #[arg(long, env = "CHIASM_ALLOWED_MEDIA_PORTS", value_name = "PORT", num_args = 1.., value_delimiter = ',')]
    pub(crate) allowed_media_ports: Option<Vec<u16>>,
    /// Fetch images from loopback, private and link-local addresses too, and from every port
    #[arg(long, env = "CHIASM_ALLOW_PRIVATE_MEDIA")]
    pub(crate) allow_private_media: bool,
    /// Most items of each modality in one prompt, as vLLM takes them: image=8 or {"image": 8}. The
    /// rest keeps its default
    #[arg(long, env = "CHIASM_LIMIT_MM_PER_PROMPT", value_name = "LIMITS", value_parser = items_per_prompt, default_value = "image=64,video=16,audio=64")]
    pub(crate) limit_mm_per_prompt: ItemLimits,
    /// Most bytes of one encoded image
    #[arg(long, env = "CHIASM_MAX_IMAGE_BYTES", default_value_t = 32 << 20)]
    pub(crate) max_image_bytes: u64,
    /// Most pixels of one image
    #[arg(long, env = "CHIASM_MAX_IMAGE_PIXELS", default_value_t = 178_956_970)]
    pub(crate) max_image_pixels: u64,
    /// Most pixels along a side of one image
    #[arg(long, env = "CHIASM_MAX_IMAGE_SIDE", default_value_t = 65_535)]
    pub(crate) max_image_side: u32,
    /// How many times longer than the other the longer side of one image may be
    #[arg(long, env = "CHIASM_MAX_IMAGE_ASPECT_RATIO", default_value_t = 1000)]
    pub(crate) max_image_aspect_ratio: u32,
    /// Most scans of one progressive JPEG
    #[arg(long, env = "CHIASM_MAX_IMAGE_SCANS", default_value_t = 100)]
    pub(crate) max_image_scans: u32,
    /// Most bytes of one encoded video
    #[arg(long, env = "CHIASM_MAX_VIDEO_BYTES", default_value_t = 256 << 20)]
    pub(crate) max_video_bytes: u64,
    /// Most bytes of one encoded sound recording
    #[arg(long, env = "CHIASM_MAX_AUDIO_BYTES", default_value_t = 64 << 20)]
    pub(crate) max_audio_bytes: u64,
    /// Most bytes of request bodies, encoded images and pixels in messages that are in memory for
    /// requests in flight, at an agent of jobs and media; what has no room gets 503, or is for
    /// another agent
    #[arg(long, env = "CHIASM_MAX_BYTES_IN_FLIGHT", default_value_t = 1 << 30)]
    pub(crate) max_bytes_in_flight: u64,
    /// Most bytes of encoded images that are kept for later requests, 0 for none
    #[arg(long, env = "CHIASM_MEDIA_CACHE_BYTES", default_value_t = 1 << 30)]
    pub(crate) media_cache_bytes: u64,
    /// Most bytes of processed pixels that are kept for other engines where they travel in
    /// messages, 0 for none
    #[arg(long, env = "CHIASM_PROCESSED_CACHE_BYTES", default_value_t = 256 << 20)]
    pub(crate) processed_cache_bytes: u64,
    /// Most URLs, and most uuids, whose images are remembered
    #[arg(long, env = "CHIASM_MAX_MEDIA_NAMES", default_value_t = 100_000)]
    pub(crate) max_media_names: usize,
    /// Seconds that fetching one image may take, redirects and waiting for its turn included
    #[arg(long, env = "CHIASM_MEDIA_TIMEOUT", value_parser = seconds, default_value = "10")]
    pub(crate) media_timeout: Duration,
    /// Seconds that connecting to an origin may take, with the look-up of its name
    #[arg(long, env = "CHIASM_MEDIA_CONNECT_TIMEOUT", value_parser = seconds, default_value = "5")]
    pub(crate) media_connect_timeout: Duration,
    /// Seconds until an origin's answer has to begin
    #[arg(long, env = "CHIASM_MEDIA_FIRST_BYTE_TIMEOUT", value_parser = seconds, default_value = "10")]
    pub(crate) media_first_byte_timeout: Duration,
    /// Fewest bytes per second of an image that is on its way
    #[arg(long, env = "CHIASM_MEDIA_MIN_RATE", default_value_t = 1024)]
    pub(crate) media_min_rate: u64,
    /// Most redirects that are followed for one image
    #[arg(long, env = "CHIASM_MEDIA_MAX_REDIRECTS", default_value_t = 5)]
    pub(crate) media_max_redirects: usize,
    /// Most images that are fetched at once
    #[arg(long, env = "CHIASM_MAX_MEDIA_FETCHES", default_value_t = 128)]
    pub(crate) max_media_fetches: usize,
    /// Most images that are fetched at once from one host and port
    #[arg(long, env = "CHIASM_MAX_MEDIA_FETCHES_PER_ORIGIN", default_value_t = 32)]
    pub(crate) max_media_fetches_per_origin: usize,
    /// Seconds for which a fetched image is used again without asking its origin, even if that
    /// claims less (but not if it says no-store)
    #[arg(long, env = "CHIASM_MEDIA_MIN_FRESHNESS", value_parser = seconds, default_value = "0")]
    pub(crate) media_min_freshness: Duration,
    /// Seconds for which a fetched image is used again without asking its origin, even if that
    /// allows more
    #[arg(long, env = "CHIASM_MEDIA_MAX_FRESHNESS", value_parser = seconds, default_value = "86400")]
    pub(crate) media_max_freshness: Duration,
    /// Seconds for which a URL that has failed is not tried again
    #[arg(long, env = "CHIASM_MEDIA_ERROR_TTL", value_parser = seconds, default_value = "1")]
    pub(crate) media_error_ttl: Duration,
}

/// The error of an invalid value of `--limit-mm-per-prompt`.
#[derive(Debug, thiserror::Error)]
enum LimitError {
    #[error("expected image=8 or {{\"image\": 8}}")]
    Form,
    #[error("'{0}' is no modality; there are image, video and audio")]
    Modality(String),
}

/// Parses `image=8,video=0`, or as vLLM does a JSON object of counts or of objects with a count.
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
