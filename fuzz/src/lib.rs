//! What must hold for whatever bytes a fuzz target is given.

use std::net::IpAddr;

use bytes::Bytes;
use chiasm_media::fuzzing::{allowed_redirect, allowed_url, decode_data_url};
use chiasm_media::{
    ByteBudget, EncodedMedia, ImageFormat, ImageHeader, ImageLimits, MediaConfig, MediaError, MediaHeader, MediaLimits,
    caught_panics, with_pixels,
};
use url::{Host, Url};

/// Small enough to decode thousands of images per second, large enough for every kind of header.
const LIMITS: ImageLimits =
    ImageLimits { max_bytes: u64::MAX, max_pixels: 1 << 16, max_side: 1 << 12, max_aspect_ratio: 1 << 12, max_scans: 500 };

/// Reads the header: an error, or a size within the limits.
pub fn probe(data: &[u8]) -> Option<(EncodedMedia, ImageHeader)> {
    let item = EncodedMedia::from_bytes(Bytes::copy_from_slice(data), &MediaLimits { image: LIMITS, ..MediaLimits::default() }).ok()?;
    let MediaHeader::Image(header) = item.header else { panic!("{item:?} is no image") };
    assert!(header.width >= 1 && header.height >= 1 && (1..=8).contains(&header.orientation));
    assert_eq!(LIMITS.check(header.width, header.height), Ok(()));
    Some((item, header))
}

/// Decodes an image of this format: an error, or pixels of the size that the header says.
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

/// Decodes a `data:` URL: an error, or bytes that are encoded as they came, save for bits that no
/// byte needs.
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
            let data = text.split_once(',').expect("it was valid").1;
            assert_eq!(data.len(), bytes.len().div_ceil(3) * 4);
            let whole = bytes.len() / 3 * 3;
            assert_eq!(encode(&bytes[..whole]), data[..whole / 3 * 4]);
        }
    }
}

/// Base64 of whole groups, written down from RFC 4648.
fn encode(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let groups = bytes.chunks_exact(3).map(|group| u32::from_be_bytes([0, group[0], group[1], group[2]]));
    groups.flat_map(|bits| [18, 12, 6, 0].map(|shift| char::from(ALPHABET[(bits >> shift & 63) as usize]))).collect()
}

/// Asks the policy about a URL, and about a redirect from there: refused, or nothing but the public
/// web.
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
            let inside = address.is_loopback()
                || address.is_private()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
                || address.is_unspecified();
            assert!(!inside, "{url}");
        }
        Host::Ipv6(address) => {
            let inside = address.is_loopback()
                || address.is_multicast()
                || address.is_unspecified()
                || address.is_unique_local()
                || address.is_unicast_link_local();
            assert!(!inside, "{url}");
        }
    }
}
