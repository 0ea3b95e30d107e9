//! Windows bitmap headers, versions 1 to 5.

use crate::reader::Reader;
use crate::{ImageFormat, MediaError};

/// The headers and the palette of a bitmap.
pub(crate) struct BmpHeader<'a> {
    pub(crate) size: (u32, u32),
    pub(crate) top_down: bool,
    pub(crate) pixels: Pixels,
    pub(crate) rows: Rows,
    /// The palette entries: blue, green, red, and one unused byte if `palette_entry` is 4.
    pub(crate) palette: &'a [u8],
    /// The bytes of a palette entry, 3 or 4.
    pub(crate) palette_entry: usize,
    /// The offset of the pixels in the file.
    pub(crate) data_start: usize,
}

/// The storage format of a pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pixels {
    /// Black or white. Read as one bit even if the header says otherwise, as in Pillow.
    BlackWhite,
    /// A grey value. Read as a byte even if the header says otherwise, as in Pillow.
    Grey,
    /// A palette index of 1, 4 or 8 bits.
    Indexed(u8),
    /// Two bytes: five bits each of blue, green, red.
    Bgr555,
    /// Two bytes: five bits of blue, six of green, five of red.
    Bgr565,
    /// Three bytes: blue, green, red.
    Bgr,
    /// Four bytes, with the offsets of red, green and blue, and of alpha if there is one.
    Four { red: u8, green: u8, blue: u8, alpha: Option<u8> },
}

/// The storage format of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Uncompressed rows, `stride` bytes apart.
    Plain {
        stride: u64,
    },
    Rle8,
    Rle4,
}

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Bmp, reason }
}

fn unsupported(reason: &'static str) -> MediaError {
    MediaError::UnsupportedVariant { format: ImageFormat::Bmp, reason }
}

/// Reads the headers and the palette.
pub(crate) fn read(bytes: &[u8]) -> Result<BmpHeader<'_>, MediaError> {
    let cut_off = || corrupt("it ends in its header");
    let mut reader = Reader::at(bytes, 10);
    let mut data_start = u64::from(u32::from_le_bytes(reader.array().ok_or_else(cut_off)?));
    let header_size = u32::from_le_bytes(reader.array().ok_or_else(cut_off)?);
    if !matches!(header_size, 12 | 40 | 52 | 56 | 64 | 108 | 124) {
        return Err(unsupported("an unknown header version"));
    }
    let info = reader.exactly(header_size as usize - 4).ok_or_else(cut_off)?;
    let mut top_down = false;
    let width;
    let height;
    let bits;
    let compression;
    let mut colours;
    let palette_entry;
    if header_size == 12 {
        width = u32::from(u16_at(info, 0));
        height = u32::from(u16_at(info, 2));
        bits = u16_at(info, 6);
        compression = 0;
        colours = 0;
        palette_entry = 3;
    } else {
        top_down = info[7] == 0xff;
        width = u32_at(info, 0);
        height = if top_down { u32_at(info, 4).wrapping_neg() } else { u32_at(info, 4) };
        bits = u16_at(info, 10);
        compression = u32_at(info, 12);
        colours = u64::from(u32_at(info, 28));
        palette_entry = 4;
    }
    let mut masks = None;
    if compression == 3 && header_size != 12 {
        masks = Some(match info.len() {
            // The length of a version 2 header without its first field.
            48.. => [
                u32_at(info, 36),
                u32_at(info, 40),
                u32_at(info, 44),
                if info.len() >= 52 { u32_at(info, 48) } else { 0 },
            ],
            _ => {
                let mut masks = [0; 4];
                for mask in &mut masks[..3] {
                    *mask = u32::from_le_bytes(reader.array().ok_or_else(cut_off)?);
                }
                masks
            }
        });
    }
    if width == 0 || height == 0 {
        return Err(corrupt("no width or height"));
    }
    if colours == 0 && bits <= 32 {
        colours = 1 << bits;
    }
    if data_start == 14 + u64::from(header_size) && bits <= 8 {
        data_start += palette_entry as u64 * colours;
    }
    let mut pixels = match bits {
        1 | 4 | 8 => Pixels::Indexed(bits as u8),
        16 => Pixels::Bgr555,
        24 => Pixels::Bgr,
        32 => Pixels::Four { red: 2, green: 1, blue: 0, alpha: None },
        _ => return Err(unsupported("an unknown number of bits per pixel")),
    };
    let rows = match compression {
        0 | 3 => Rows::Plain { stride: (u64::from(width) * u64::from(bits)).div_ceil(32) * 4 },
        1 => Rows::Rle8,
        2 => Rows::Rle4,
        _ => return Err(unsupported("an unknown compression")),
    };
    if compression == 3 {
        pixels = masks
            .and_then(|masks| pixels_from_masks(bits, masks))
            .ok_or(unsupported("an unknown order of the colour bits"))?;
    }
    let mut palette: &[u8] = &[];
    if bits <= 8 {
        if colours > 65_536 {
            return Err(unsupported("too many palette entries"));
        }
        palette = reader.up_to(palette_entry * colours as usize);
        if is_grey(palette, palette_entry, colours as usize) {
            pixels = if colours <= 2 { Pixels::BlackWhite } else { Pixels::Grey };
        }
    }
    let data_start = match usize::try_from(data_start) {
        Ok(0) => reader.position(),
        Ok(start) => start,
        Err(_) => return Err(corrupt("the pixels lie past the end")),
    };
    Ok(BmpHeader {
        size: (width, height),
        top_down,
        pixels,
        rows,
        palette,
        palette_entry,
        data_start,
    })
}

/// Returns the pixel format for masks of red, green, blue and alpha. Returns `None` for masks that
/// Pillow does not support.
fn pixels_from_masks(bits: u16, masks: [u32; 4]) -> Option<Pixels> {
    let four = |red, green, blue, alpha| Pixels::Four { red, green, blue, alpha };
    Some(match (bits, masks) {
        (32, [0xff_0000, 0xff00, 0xff, 0]) => four(2, 1, 0, None),
        (32, [0xff00_0000, 0xff_0000, 0xff00, 0]) => four(3, 2, 1, None),
        (32, [0xff00_0000, 0xff00, 0xff, 0]) => four(3, 1, 0, None),
        (32, [0xff00_0000, 0xff_0000, 0xff00, 0xff]) => four(3, 2, 1, Some(0)),
        (32, [0xff, 0xff00, 0xff_0000, 0xff00_0000]) => four(0, 1, 2, Some(3)),
        (32, [0xff_0000, 0xff00, 0xff, 0xff00_0000]) => four(2, 1, 0, Some(3)),
        (32, [0xff00_0000, 0xff00, 0xff, 0xff_0000]) => four(3, 1, 0, Some(2)),
        (32, [0, 0, 0, 0]) => four(2, 1, 0, Some(3)),
        (24, [0xff_0000, 0xff00, 0xff, _]) => Pixels::Bgr,
        (16, [0xf800, 0x7e0, 0x1f, _]) => Pixels::Bgr565,
        (16, [0x7c00, 0x3e0, 0x1f, _]) => Pixels::Bgr555,
        _ => return None,
    })
}

/// Returns `true` if the palette maps every index to its grey, or two indices to black and white.
fn is_grey(palette: &[u8], entry: usize, colours: usize) -> bool {
    palette.len() >= entry * (colours - 1) + 3
        && palette.chunks(entry).enumerate().all(|(index, colour)| {
            let grey = if colours == 2 { (index * 255) as u8 } else { index as u8 };
            colour[..3].iter().all(|&value| value == grey)
        })
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
