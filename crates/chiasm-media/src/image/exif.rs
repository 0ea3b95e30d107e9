//! The orientation tag, read as Pillow's `ImageOps.exif_transpose` reads it, also from broken
//! blocks.

use std::collections::HashSet;

/// The TIFF tag `Orientation`.
const ORIENTATION: u16 = 274;

/// Returns the orientation that `exif_transpose` applies, 1 to 8.
///
/// `exif` is the image's EXIF block, `xmp` its XMP packet. The packet is used only if there is no
/// block, or if a readable block lacks the tag. An unreadable block means 1, because vLLM ignores
/// the error that Pillow raises.
pub(crate) fn orientation(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> u8 {
    let from_exif = match exif {
        Some(exif) => match tiff_orientation(exif) {
            Ok(orientation) => orientation,
            Err(Unreadable) => return 1,
        },
        None => None,
    };
    from_exif.unwrap_or_else(|| {
        xmp.and_then(xmp_orientation).filter(|value| (1..=8).contains(value)).unwrap_or(1)
    })
}

/// The error for a block for which Pillow raises.
struct Unreadable;

/// Returns the tag from the first directory of the TIFF structure inside an EXIF block. Values out
/// of range or of a wrong type are 1.
fn tiff_orientation(mut exif: &[u8]) -> Result<Option<u8>, Unreadable> {
    for _ in 0..2 {
        exif = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    }
    if exif.is_empty() {
        return Ok(None);
    }
    let header: &[u8; 8] = exif.first_chunk().ok_or(Unreadable)?;
    let little_endian = match &header[..4] {
        b"II*\0" | b"II\0*" => true,
        b"MM\0*" | b"MM*\0" | b"MM\0+" => false,
        // Little-endian BigTIFF needs a longer header than the eight bytes that Pillow reads here.
        _ => return Err(Unreadable),
    };
    let tiff = Tiff { data: exif, little_endian };
    Ok(tiff.first_directory_orientation(tiff.u32(&header[4..]).unwrap_or(0)))
}

/// A TIFF structure.
struct Tiff<'a> {
    data: &'a [u8],
    little_endian: bool,
}

impl Tiff<'_> {
    fn u16(&self, bytes: &[u8]) -> Option<u16> {
        let bytes = *bytes.first_chunk()?;
        Some(if self.little_endian { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    }

    fn u32(&self, bytes: &[u8]) -> Option<u32> {
        let bytes = *bytes.first_chunk()?;
        Some(if self.little_endian { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) })
    }

    fn u64(&self, bytes: &[u8]) -> Option<u64> {
        let bytes = *bytes.first_chunk()?;
        Some(if self.little_endian { u64::from_le_bytes(bytes) } else { u64::from_be_bytes(bytes) })
    }

    fn slice(&self, offset: u64, length: u64) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(length).ok()?)?;
        self.data.get(start..end)
    }

    /// Returns the orientation tag of the directory at `offset`. Returns `None` if the readable
    /// part of the directory has no such tag.
    fn first_directory_orientation(&self, offset: u32) -> Option<u8> {
        let count = self.u16(self.slice(offset.into(), 2)?)?;
        let mut external_bytes = 0u64;
        let mut seen_tags = HashSet::new();
        for index in 0..u64::from(count) {
            let entry = self.slice(u64::from(offset) + 2 + 12 * index, 12)?;
            let tag = self.u16(entry)?;
            let kind = self.u16(&entry[2..])?;
            // Pillow keeps the first entry of a tag and ignores later ones, even if they are
            // broken.
            if seen_tags.contains(&tag) {
                continue;
            }
            let Some(unit) = unit_size(kind) else {
                continue;
            };
            let size = u64::from(self.u32(&entry[4..])?) * unit;
            let value = if size > 4 {
                external_bytes += size;
                if external_bytes > self.data.len() as u64 {
                    continue;
                }
                // Pillow stops reading the directory at a truncated value.
                self.slice(self.u32(&entry[8..])?.into(), size)?
            } else {
                &entry[8..8 + size as usize]
            };
            if value.is_empty() {
                continue;
            }
            if tag == ORIENTATION {
                return Some(self.number(kind, value).and_then(to_orientation).unwrap_or(1));
            }
            seen_tags.insert(tag);
        }
        None
    }

    /// Returns the first value, for the types that Pillow reads as numbers.
    fn number(&self, kind: u16, value: &[u8]) -> Option<f64> {
        Some(match kind {
            3 => f64::from(self.u16(value)?),
            4 | 13 => f64::from(self.u32(value)?),
            5 => f64::from(self.u32(value)?) / f64::from(self.u32(&value[4..])?),
            6 => f64::from(*value.first()? as i8),
            8 => f64::from(self.u16(value)? as i16),
            9 => f64::from(self.u32(value)? as i32),
            10 => f64::from(self.u32(value)? as i32) / f64::from(self.u32(&value[4..])? as i32),
            11 => f64::from(f32::from_bits(self.u32(value)?)),
            12 => f64::from_bits(self.u64(value)?),
            16 => self.u64(value)? as f64,
            _ => return None,
        })
    }
}

/// Returns the bytes per value of a TIFF type; `None` for types that Pillow does not support.
fn unit_size(kind: u16) -> Option<u64> {
    Some(match kind {
        1 | 2 | 6 | 7 => 1,
        3 | 8 => 2,
        4 | 9 | 11 | 13 => 4,
        5 | 10 | 12 | 16 => 8,
        _ => return None,
    })
}

/// Converts a number to an orientation, 1 to 8.
fn to_orientation(value: f64) -> Option<u8> {
    (1..=8).find(|&orientation| f64::from(orientation) == value)
}

/// Returns the digit after the first `tiff:Orientation="` or `tiff:Orientation>`.
fn xmp_orientation(xmp: &[u8]) -> Option<u8> {
    const NAME: &[u8] = b"tiff:Orientation";
    let mut rest = xmp;
    while let Some(at) = rest.windows(NAME.len()).position(|window| window == NAME) {
        rest = &rest[at + NAME.len()..];
        let value = rest.strip_prefix(b"=\"").or_else(|| rest.strip_prefix(b">"));
        if let Some(&[digit @ b'0'..=b'9', ..]) = value {
            return Some(digit - b'0');
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an EXIF block with one entry.
    fn block(little_endian: bool, kind: u16, count: u32, value: [u8; 4], after: &[u8]) -> Vec<u8> {
        let order = |bytes: &[u8]| -> Vec<u8> {
            if little_endian { bytes.to_vec() } else { bytes.iter().rev().copied().collect() }
        };
        let mut block = b"Exif\0\0".to_vec();
        block.extend(if little_endian { b"II" } else { b"MM" });
        for part in [&42u16.to_le_bytes()[..], &8u32.to_le_bytes(), &1u16.to_le_bytes()] {
            block.extend(order(part));
        }
        for part in [&ORIENTATION.to_le_bytes()[..], &kind.to_le_bytes(), &count.to_le_bytes()] {
            block.extend(order(part));
        }
        block.extend(value);
        block.extend([0; 4]);
        block.extend(after);
        block
    }

    #[test]
    fn both_byte_orders_are_read() {
        for value in 1..=8 {
            assert_eq!(orientation(Some(&block(true, 3, 1, [value, 0, 0, 0], &[])), None), value);
            assert_eq!(orientation(Some(&block(false, 3, 1, [0, value, 0, 0], &[])), None), value);
        }
    }

    #[test]
    fn invalid_orientation_value_is_ignored() {
        for (kind, value) in
            [(3, [9, 0, 0, 0]), (3, [0, 0, 0, 0]), (1, [6, 0, 0, 0]), (2, *b"6\0\0\0")]
        {
            assert_eq!(orientation(Some(&block(true, kind, 1, value, &[])), Some(XMP)), 1);
        }
    }

    #[test]
    fn rational_orientation_is_read() {
        let after = [6u32.to_le_bytes(), 1u32.to_le_bytes()].concat();
        assert_eq!(orientation(Some(&block(true, 5, 1, [26, 0, 0, 0], &after)), None), 6);
    }

    const XMP: &[u8] = b"<x tiff:Orientation=\"x\" tiff:Orientation=\"8\"/>";

    #[test]
    fn xmp_is_used_only_without_exif_orientation() {
        assert_eq!(orientation(None, Some(XMP)), 8);
        assert_eq!(orientation(None, Some(b"<tiff:Orientation>3</tiff:Orientation>")), 3);
        assert_eq!(orientation(Some(&block(true, 99, 1, [6, 0, 0, 0], &[])), Some(XMP)), 8);
        assert_eq!(orientation(Some(&block(true, 3, 1, [6, 0, 0, 0], &[])), Some(XMP)), 6);
        assert_eq!(orientation(Some(b"Exif\0\0garbage"), Some(XMP)), 1);
        assert_eq!(orientation(Some(b"Exif\0\0II"), Some(XMP)), 1);
    }
}
