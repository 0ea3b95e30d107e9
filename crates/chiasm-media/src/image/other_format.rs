//! Names of unsupported formats, for error messages.

/// Names the format of `bytes`, if it is recognised: formats that clients send by mistake, and
/// documents that wrong URLs lead to.
pub(crate) fn other_format(bytes: &[u8]) -> Option<&'static str> {
    const MAGIC_NUMBERS: [(&[u8], &str); 27] = [
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
        (b"II+\0", "TIFF"),
        (b"MM\0+", "TIFF"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\xff\x0a", "JPEG XL"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"\xff\x4f\xff\x51", "JPEG 2000"),
        (b"\0\0\x01\0", "ICO"),
        (b"\0\0\x02\0", "CUR"),
        (b"8BPS", "Photoshop"),
        (b"qoif", "QOI"),
        (b"v/1\x01", "OpenEXR"),
        (b"#?RADIANCE", "Radiance HDR"),
        (b"DDS ", "DDS"),
        (b"P4", "PNM"),
        (b"P5", "PNM"),
        (b"P6", "PNM"),
        (b"%PDF", "PDF"),
        (b"<svg", "SVG or XML"),
        (b"<?xml", "SVG or XML"),
        (b"<!", "HTML"),
        (b"<html", "HTML"),
        (b"\x1a\x45\xdf\xa3", "a video"),
        (b"{", "JSON"),
        (b"PK\x03\x04", "ZIP"),
        (b"\x1f\x8b", "gzip"),
    ];
    if bytes.is_empty() {
        return Some("empty");
    }
    MAGIC_NUMBERS
        .iter()
        .find(|(magic, _)| bytes.starts_with(magic))
        .map(|(_, name)| *name)
        .or_else(|| iso_media(bytes))
}

/// Names a format of ISO base media files, such as MP4 (ISO/IEC 14496-12). The first box lists
/// brands, and any of them may identify the format.
fn iso_media(bytes: &[u8]) -> Option<&'static str> {
    let length = u32::from_be_bytes(*bytes.first_chunk()?) as usize;
    let brands = bytes.get(4..length.min(bytes.len()))?.strip_prefix(b"ftyp")?;
    let has = |names: &[&[u8; 4]]| brands.as_chunks().0.iter().any(|brand| names.contains(&brand));
    Some(if has(&[b"avif", b"avis"]) {
        "AVIF"
    } else if has(&[b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"]) {
        "HEIC"
    } else if has(&[b"mif1", b"msf1"]) {
        "HEIF"
    } else {
        "a video"
    })
}

#[cfg(test)]
mod tests {
    use crate::image::probe::probe;
    use crate::{Fault, MediaError};

    #[test]
    fn unsupported_format_is_named() {
        for (bytes, name) in [
            (&b"II*\0\x08\0\0\0"[..], "TIFF"),
            (b"MM\0*\0\0\0\x08", "TIFF"),
            (b"II+\0\x08\0\0\0", "TIFF"),
            (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf", "AVIF"),
            (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "AVIF"),
            (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
            (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIC"),
            (b"\0\0\0\x14ftypmif1\0\0\0\0mif1", "HEIF"),
            (b"\0\0\0\x14ftypisom\0\0\0\0mp42", "a video"),
            (b"\0\0\0\x0cJXL \r\n\x87\n\0\0\0\x14ftypjxl ", "JPEG XL"),
            (b"\xff\x0a\xfa\x1f", "JPEG XL"),
            (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
            (b"qoif\0\0\0\x01", "QOI"),
            (b"<!doctype html>", "HTML"),
            (b"{\"error\": 404}", "JSON"),
            (b"%PDF-1.7", "PDF"),
            (b"", "empty"),
        ] {
            let error = probe(bytes).err().unwrap();
            assert_eq!(error, MediaError::UnsupportedFormat { found: Some(name) });
            assert_eq!(error.fault(), Fault::Unsupported);
            let message = error.to_string();
            let supported =
                ["PNG", "JPEG", "WebP", "GIF", "BMP"].iter().all(|format| message.contains(format));
            assert!(supported && message.ends_with(name), "{message}");
        }
    }

    #[test]
    fn unknown_bytes_are_not_named() {
        for bytes in [
            &b"\0"[..],
            b"\0\0\0\x08free",
            b"\0\0\0\x02ftypavif",
            b"\xff\xff\xff\xffftyp?",
            b"RIFF\0\0\0\0WEBP",
        ] {
            let expected = if bytes.ends_with(b"ftyp?") { Some("a video") } else { None };
            assert_eq!(
                probe(bytes).err().unwrap(),
                MediaError::UnsupportedFormat { found: expected }
            );
        }
    }
}
