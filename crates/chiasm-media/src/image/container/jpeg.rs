//! JPEG headers: the markers up to the first scan.

use memchr::memchr;

use crate::image::exif;
use crate::reader::Reader;
use crate::{ImageFormat, MediaError};

/// The content of the markers of a JPEG.
pub(crate) struct JpegHeader {
    pub(crate) size: (u32, u32),
    /// 1 (grey), 3 (colour) or 4 (CMYK or YCCK).
    pub(crate) components: u8,
    /// The EXIF orientation, 1 to 8.
    pub(crate) orientation: u8,
    /// The offset of the first scan's entropy-coded data in the file.
    pub(crate) scan_start: usize,
    /// `true` if the first scan holds the whole image.
    pub(crate) single_scan: bool,
    /// The number of scans, at least 1. Exact for intact files, and the decoder's limit for all
    /// files.
    pub(crate) scans: u32,
    /// `true` for arithmetic coding, which takes several times as long as Huffman coding.
    pub(crate) arithmetic: bool,
    /// `true` if the scan has restart markers.
    pub(crate) restarts: bool,
}

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Jpeg, reason }
}

fn unsupported(reason: &'static str) -> MediaError {
    MediaError::UnsupportedVariant { format: ImageFormat::Jpeg, reason }
}

fn wrong_length() -> MediaError {
    corrupt("a segment's length does not match its content")
}

/// Reads the markers up to the start of the first scan.
pub(crate) fn read(bytes: &[u8]) -> Result<JpegHeader, MediaError> {
    let mut reader = Reader::at(bytes, 2);
    let mut frame = None;
    let mut exif: Option<Vec<u8>> = None;
    let mut xmp = None;
    let mut progressive = false;
    let mut arithmetic = false;
    let mut restarts = false;
    let scan_components = loop {
        let marker = next_marker(&mut reader)?;
        match marker {
            // The start of a frame; 0xde is for hierarchical images.
            0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf | 0xde => {
                frame = Some(read_frame(segment(&mut reader)?)?);
                progressive |= matches!(marker, 0xc2 | 0xc6 | 0xca | 0xce);
                arithmetic |= matches!(marker, 0xc9..=0xcf);
            }
            0xda => break read_scan_components(segment(&mut reader)?)?,
            0xc4 => check_huffman_tables(segment(&mut reader)?)?,
            0xdb => check_quantization_tables(segment(&mut reader)?)?,
            0xcc => check_arithmetic_conditions(segment(&mut reader)?)?,
            0xdd => {
                let interval: [u8; 2] =
                    segment(&mut reader)?.try_into().map_err(|_| wrong_length())?;
                restarts |= interval != [0; 2];
            }
            0xe0 | 0xee => check_application(segment(&mut reader)?)?,
            0xe1 => {
                let content = segment(&mut reader)?;
                if content.starts_with(b"Exif\0\0") {
                    match &mut exif {
                        Some(exif) => exif.extend_from_slice(&content[6..]),
                        None => exif = Some(content.to_vec()),
                    }
                } else if let Some(packet) = content.strip_prefix(b"http://ns.adobe.com/xap/1.0/\0")
                {
                    xmp = Some(packet);
                }
            }
            0xdc | 0xdf | 0xe2..=0xed | 0xef | 0xfe => {
                segment(&mut reader)?;
            }
            0xc8 | 0xd0..=0xd9 | 0xf0..=0xfd => {}
            _ => return Err(corrupt("an unknown marker")),
        }
    };
    let (size, components) = frame.ok_or(corrupt("no frame before the first scan"))?;
    if size.0 == 0 || size.1 == 0 {
        return Err(corrupt("no width or height"));
    }
    let scan_start = reader.position();
    let single_scan = !progressive && scan_components == components;
    Ok(JpegHeader {
        size,
        components,
        orientation: exif::orientation(exif.as_deref(), xmp),
        scan_start,
        single_scan,
        scans: if single_scan { 1 } else { count_scans(&bytes[scan_start..]) },
        arithmetic,
        restarts,
    })
}

/// Counts the scans from the one whose entropy-coded data is at the start of `data`, up to the end
/// marker.
fn count_scans(mut data: &[u8]) -> u32 {
    let mut scans = 1;
    while let Some(found) = memchr(0xff, data) {
        data = &data[found + 1..];
        match data {
            // Padding: the next byte starts the marker.
            [0xff, ..] => {}
            // Stuffing, and markers without content.
            [0 | 1 | 0xc8 | 0xd0..=0xd8 | 0xf0..=0xfd, rest @ ..] => data = rest,
            [0xd9, ..] => break,
            [marker, high, low, ..] => {
                scans += u32::from(*marker == 0xda);
                let length = usize::from(u16::from_be_bytes([*high, *low]));
                data = data.get(1 + length..).unwrap_or_default();
            }
            _ => break,
        }
    }
    scans
}

/// Returns the second byte of the next marker. Skips stray bytes and padding before the marker.
fn next_marker(reader: &mut Reader<'_>) -> Result<u8, MediaError> {
    let ended = || corrupt("it ends before the first scan");
    loop {
        if reader.byte().ok_or_else(ended)? != 0xff {
            continue;
        }
        let mut second = 0xff;
        while second == 0xff {
            second = reader.byte().ok_or_else(ended)?;
        }
        if second != 0 {
            return Ok(second);
        }
    }
}

/// Reads the content of a segment.
fn segment<'a>(reader: &mut Reader<'a>) -> Result<&'a [u8], MediaError> {
    let cut_off = || corrupt("a segment is cut off");
    let length = u16::from_be_bytes(reader.array().ok_or_else(cut_off)?);
    reader.exactly(usize::from(length.saturating_sub(2))).ok_or_else(cut_off)
}

/// Reads the size and the number of components from a frame header.
fn read_frame(content: &[u8]) -> Result<((u32, u32), u8), MediaError> {
    let &[precision, h1, h0, w1, w0, components, ..] = content else {
        return Err(corrupt("the frame header is cut off"));
    };
    if precision != 8 {
        return Err(unsupported("only 8 bits per sample are supported"));
    }
    if !matches!(components, 1 | 3 | 4) {
        return Err(unsupported("only 1, 3 or 4 components are supported"));
    }
    if content.len() != 6 + 3 * usize::from(components) {
        return Err(wrong_length());
    }
    let size = (u16::from_be_bytes([w1, w0]).into(), u16::from_be_bytes([h1, h0]).into());
    Ok((size, components))
}

/// Reads the number of components from a scan header.
fn read_scan_components(content: &[u8]) -> Result<u8, MediaError> {
    match content {
        &[components @ 1..=4, ..] if content.len() == 4 + 2 * usize::from(components) => {
            Ok(components)
        }
        _ => Err(wrong_length()),
    }
}

/// Checks quantization tables as libjpeg does: it refuses table numbers above 3 and truncated
/// tables.
fn check_quantization_tables(mut content: &[u8]) -> Result<(), MediaError> {
    while let [precision_and_number, rest @ ..] = content {
        let bytes = if precision_and_number >> 4 == 0 { 64 } else { 128 };
        content = rest.get(bytes..).ok_or_else(wrong_length)?;
        if precision_and_number & 15 > 3 {
            return Err(corrupt("a quantization table is not valid"));
        }
    }
    Ok(())
}

/// Checks arithmetic conditioning as libjpeg does: it refuses lower bounds of differences above the
/// upper bound.
fn check_arithmetic_conditions(content: &[u8]) -> Result<(), MediaError> {
    let (conditions, rest) = content.as_chunks();
    let is_valid = |&[table, value]: &[u8; 2]| {
        table < 16 && value & 15 <= value >> 4 || (16..32).contains(&table)
    };
    if rest.is_empty() && conditions.iter().all(is_valid) {
        Ok(())
    } else {
        Err(corrupt("a table is not valid"))
    }
}

/// Checks Huffman tables as libjpeg does: it refuses difference categories that do not occur with
/// eight-bit samples.
fn check_huffman_tables(mut content: &[u8]) -> Result<(), MediaError> {
    while let [class_and_number, counts_and_symbols @ ..] = content {
        let cut_off = || corrupt("a Huffman table is cut off");
        let (counts, rest) = counts_and_symbols.split_at_checked(16).ok_or_else(cut_off)?;
        let count = counts.iter().map(|&count| usize::from(count)).sum();
        let (symbols, rest) = rest.split_at_checked(count).ok_or_else(cut_off)?;
        let is_dc = class_and_number >> 4 == 0;
        if count > 256
            || class_and_number & !0x13 != 0
            || (is_dc && symbols.iter().any(|&symbol| symbol > 15))
        {
            return Err(corrupt("a Huffman table is not valid"));
        }
        content = rest;
    }
    Ok(())
}

/// Checks application segments as Pillow does: it reads a version after these names.
fn check_application(content: &[u8]) -> Result<(), MediaError> {
    let named = content.starts_with(b"JFIF") || content.starts_with(b"Adobe");
    if named && content.len() < 7 { Err(corrupt("a segment is cut off")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_are_counted_only_at_real_markers() {
        let scan: &[u8] = b"\xff\xda\0\x04\x01\0";
        let table: &[u8] = b"\xff\xc4\0\x08\xff\xda\xff\xd9\xff\xda";
        // Stuffing, a restart marker and padding. The table contains bytes that only look like
        // markers.
        let data: &[u8] = b"ab\xff\0\xda\xff\xd3cd\xff\xff\0\xff";
        let end: &[u8] = b"\xff\xd9";
        assert_eq!(count_scans(&[data, end].concat()), 1);
        assert_eq!(count_scans(&[data, scan, data, table, scan, data, end].concat()), 3);
        assert_eq!(count_scans(&[data, scan, end, scan, data, end].concat()), 2);
    }

    #[test]
    fn scans_of_a_broken_file_are_counted_to_the_defect() {
        for data in [&b""[..], b"\xff", b"\xff\xda", b"\xff\xda\xff\xff", b"\xff\xc4\0\0\0"] {
            assert!(count_scans(data) <= 2, "{data:?}");
        }
        assert_eq!(count_scans(&b"\xff\xda\0\0".repeat(1000)), 1001);
    }
}
