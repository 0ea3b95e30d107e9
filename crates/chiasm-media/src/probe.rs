//! Which format the bytes are in, and what their header says.

use crate::MediaError;
use crate::container::{Header, bmp, gif, jpeg, png, webp};

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

/// Names formats that clients do send, for a better error.
fn other_format(bytes: &[u8]) -> Option<&'static str> {
    let brand = bytes.get(4..12);
    match bytes {
        [b'I', b'I', 0x2a | 0x2b, 0, ..] | [b'M', b'M', 0, 0x2a | 0x2b, ..] => Some("TIFF"),
        [0, 0, 0, 12, b'j', b'P', b' ', b' ', ..] | [0xff, 0x4f, 0xff, 0x51, ..] => Some("JPEG 2000"),
        [0xff, 0x0a, ..] => Some("JPEG XL"),
        [0, 0, 1, 0, ..] => Some("ICO"),
        [b'%', b'P', b'D', b'F', ..] => Some("PDF"),
        [b'<', b's', b'v', b'g', ..] | [b'<', b'?', b'x', b'm', b'l', ..] => Some("SVG or XML"),
        [b'<', b'!', ..] | [b'<', b'h', b't', b'm', b'l', ..] => Some("HTML"),
        [] => Some("empty"),
        _ => match brand {
            Some(b"ftypavif" | b"ftypavis") => Some("AVIF"),
            Some(b"ftypheic" | b"ftypheix" | b"ftypmif1" | b"ftypmsf1") => Some("HEIF"),
            Some(brand) if brand.starts_with(b"ftyp") => Some("a video"),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fault;

    #[test]
    fn formats_that_are_not_read_are_named() {
        for (bytes, name) in [
            (&b"II*\0\x08\0\0\0"[..], "TIFF"),
            (b"MM\0*\0\0\0\x08", "TIFF"),
            (b"\0\0\0\x20ftypavif\0\0\0\0", "AVIF"),
            (b"\0\0\0\x20ftypheic\0\0\0\0", "HEIF"),
            (b"<!doctype html>", "HTML"),
            (b"%PDF-1.7", "PDF"),
            (b"", "empty"),
        ] {
            let error = probe(bytes).err().unwrap();
            assert_eq!(error, MediaError::UnsupportedFormat { found: Some(name) });
            assert_eq!(error.fault(), Fault::Unsupported);
        }
    }
}
