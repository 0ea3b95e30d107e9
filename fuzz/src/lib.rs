//! The properties that hold for any input of the fuzz targets.

#[path = "../../crates/chiasm-audio/tests/properties.rs"]
mod audio_properties;
#[path = "../../crates/chiasm-video/tests/properties.rs"]
mod video_properties;

use std::net::IpAddr;

use bytes::Bytes;
use chiasm_media::fuzzing::{allowed_redirect, allowed_url, decode_data_url};
use chiasm_media::{
    ByteBudget, EncodedMedia, ImageFormat, ImageHeader, ImageLimits, MediaConfig, MediaError,
    MediaHeader, MediaLimits, caught_panics, with_pixels,
};
use url::{Host, Url};

/// Limits that allow thousands of decoded images per second, and every kind of header.
const LIMITS: ImageLimits = ImageLimits {
    max_bytes: u64::MAX,
    max_pixels: 1 << 16,
    max_side: 1 << 12,
    max_aspect_ratio: 1 << 12,
    max_scans: 500,
};

/// Reads the header. Asserts that the size is within the limits. Returns `None` on an error.
pub fn probe(data: &[u8]) -> Option<(EncodedMedia, ImageHeader)> {
    let item = EncodedMedia::from_bytes(
        Bytes::copy_from_slice(data),
        &MediaLimits { image: LIMITS, ..MediaLimits::default() },
    )
    .ok()?;
    let MediaHeader::Image(header) = item.header else { panic!("{item:?} is not an image") };
    assert!(header.width >= 1 && header.height >= 1 && (1..=8).contains(&header.orientation));
    assert_eq!(LIMITS.check(header.width, header.height), Ok(()));
    Some((item, header))
}

/// Decodes an image of this format. Asserts that the pixels have the size in the header, unless
/// decoding fails.
pub fn decode(format: ImageFormat, data: &[u8]) {
    let Some((image, header)) = probe(data).filter(|(_, header)| header.format == format) else {
        return;
    };
    let _ = with_pixels(&image, |pixels| {
        assert_eq!((pixels.width, pixels.height), (header.width, header.height));
        assert_eq!(pixels.pixels.len(), 3 * header.width as usize * header.height as usize);
    });
    assert_eq!(caught_panics(), 0, "a decoder panicked");
}

/// Decodes a `data:` URL. Asserts that encoding the bytes again gives the same text, except for
/// unused bits of the last group, and that memory is counted exactly.
pub fn data_url(text: &str) {
    const MAX_BYTES: usize = 1 << 12;
    let budget = ByteBudget::new(1 << 13);
    match decode_data_url(text, MAX_BYTES as u64, &budget) {
        None | Some(Err(MediaError::InvalidDataUri { .. })) => assert_eq!(budget.held(), 0),
        Some(Err(error)) => {
            assert_eq!(error, MediaError::TooManyBytes { limit: MAX_BYTES as u64 });
            assert_eq!(budget.held(), 0);
        }
        Some(Ok(bytes)) => {
            assert!(bytes.len() <= MAX_BYTES);
            assert_eq!(budget.held(), bytes.len() as u64);
            let data = text.split_once(',').expect("a valid URL").1;
            assert_eq!(data.len(), bytes.len().div_ceil(3) * 4);
            let whole = bytes.len() / 3 * 3;
            assert_eq!(encode(&bytes[..whole]), data[..whole / 3 * 4]);
        }
    }
}

/// Encodes whole groups of three bytes as base64, following RFC 4648.
fn encode(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let groups =
        bytes.chunks_exact(3).map(|group| u32::from_be_bytes([0, group[0], group[1], group[2]]));
    groups
        .flat_map(|bits| {
            [18, 12, 6, 0].map(|shift| char::from(ALPHABET[(bits >> shift & 63) as usize]))
        })
        .collect()
}

/// Checks a URL and a redirect from it against the policy. Asserts that allowed URLs are on the
/// public web, and that checking one again gives the same URL.
pub fn url_policy(url: &str, location: &[u8]) {
    let config = MediaConfig::default();
    if let Ok(url) = allowed_url(&config, url) {
        assert_is_public_web(&url);
        assert_eq!(allowed_url(&config, url.as_str()), Ok(url.clone()));
        if let Ok(target) = allowed_redirect(&config, &url, location) {
            assert_is_public_web(&target);
            assert!(target.scheme() == "https" || url.scheme() == "http");
        }
    }
}

fn assert_is_public_web(url: &Url) {
    assert!(["http", "https"].contains(&url.scheme()), "{url}");
    assert!(url.username().is_empty() && url.password().is_none(), "{url}");
    assert!([Some(80), Some(443)].contains(&url.port_or_known_default()), "{url}");
    match url.host().expect("a host") {
        Host::Domain(name) => assert!(name.parse::<IpAddr>().is_err(), "{url}"),
        Host::Ipv4(address) => {
            let is_internal = address.is_loopback()
                || address.is_private()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
                || address.is_unspecified();
            assert!(!is_internal, "{url}");
        }
        Host::Ipv6(address) => {
            let is_internal = address.is_loopback()
                || address.is_multicast()
                || address.is_unspecified()
                || address.is_unique_local()
                || address.is_unicast_link_local();
            assert!(!is_internal, "{url}");
        }
    }
}

/// Reads the index of a video and cuts frames out of it. The last bytes choose the frames.
pub fn video(data: &[u8]) {
    let (file, choice) = data.split_at(data.len().saturating_sub(4));
    let wanted: Vec<u64> = choice.iter().map(|&byte| byte.into()).collect();
    video_properties::index_and_cut(file, &wanted, 2);
}

/// Reads the length of a recording and computes its size in models.
pub fn recording(file: &[u8]) {
    audio_properties::length_and_size(file);
}
