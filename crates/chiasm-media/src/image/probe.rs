//! Format detection and header parsing.

use crate::MediaError;
use crate::image::container::{Header, bmp, gif, jpeg, png, webp};
use crate::image::other_format::other_format;

/// Reads the header of an image of any supported format.
pub(crate) fn probe(bytes: &[u8]) -> Result<Header<'_>, MediaError> {
    // The order and the magic bytes are those of Pillow's plugins.
    if bytes.starts_with(b"BM") {
        bmp::read(bytes).map(Header::Bmp)
    } else if bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a") {
        gif::read(bytes).map(Header::Gif)
    } else if bytes.starts_with(b"\xff\xd8\xff") {
        jpeg::read(bytes).map(Header::Jpeg)
    } else if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        png::read(bytes).map(Header::Png)
    } else if webp::accepts(bytes) {
        webp::read(bytes).map(Header::WebP)
    } else {
        Err(MediaError::UnsupportedFormat { found: other_format(bytes) })
    }
}
