//! Bitmap decoding: converts rows to RGB.
//!
//! The crate `image` 0.25 differs from Pillow on the 180 bitmaps among the goldens: it yields other
//! pixels for 20, refuses 24 that Pillow reads, and reads 11 that Pillow refuses.
//!
//! Its pixels differ in all bitmaps of 16 bits (it rounds differently when it widens 5 and 6 bits),
//! in 8-bit run lengths with jumps and overlong runs, and with short or grey palettes. It refuses
//! 4-bit run lengths with jumps and overlong runs, top-down run lengths, OS/2 headers of 64 bytes,
//! masks for 24 bits and masks of zero. It reads masks that Pillow does not support.

mod rle;

use crate::image::container::bmp::{BmpHeader, Pixels, Rows};
use crate::image::decode::memory::{ReusableBuffer, Scratch, rgb_bytes};
use crate::image::decode::pixel::{Table, grey_table, palette_table, rgb_on_white};
use crate::{ImageFormat, MediaError};

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Bmp, reason }
}

/// Decodes an image to RGB rows.
pub(super) fn decode(
    bytes: &[u8],
    header: &BmpHeader<'_>,
    scratch: &mut Scratch,
    rgb: &mut ReusableBuffer,
) -> Result<(), MediaError> {
    let width = header.size.0 as usize;
    let height = header.size.1 as usize;
    let samples = scratch.samples.cleared();
    let (rows, bits, stride) = match header.rows {
        Rows::Plain { stride } => {
            let stride = usize::try_from(stride).map_err(|_| corrupt("rows out of range"))?;
            (bytes.get(header.data_start..).unwrap_or_default(), stored_bits(header.pixels), stride)
        }
        Rows::Rle8 | Rows::Rle4 => {
            rle::unpack(bytes, header, samples)?;
            (&samples[..], 8, width)
        }
    };
    let row_length = (width * bits).div_ceil(8);
    if row_length > stride {
        return Err(corrupt("its rows are too short"));
    }
    // The last row may be shorter than the stride.
    let needed = (height - 1).checked_mul(stride).and_then(|before| before.checked_add(row_length));
    if needed.is_none_or(|needed| rows.len() < needed) {
        return Err(corrupt("the image data ends too early"));
    }
    let converter = Converter::new(header)?;
    let rgb = rgb.prepare(ImageFormat::Bmp, rgb_bytes(ImageFormat::Bmp, header.size)?)?;
    for index in 0..height {
        let row = &rows[index * stride..index * stride + row_length];
        let y = if header.top_down { index } else { height - 1 - index };
        converter.convert_row(row, bits, &mut rgb[3 * y * width..3 * (y + 1) * width]);
    }
    Ok(())
}

/// Returns the bits per stored pixel.
fn stored_bits(pixels: Pixels) -> usize {
    match pixels {
        Pixels::BlackWhite => 1,
        Pixels::Grey => 8,
        Pixels::Indexed(bits) => bits.into(),
        Pixels::Bgr555 | Pixels::Bgr565 => 16,
        Pixels::Bgr => 24,
        Pixels::Four { .. } => 32,
    }
}

/// Converts rows of stored pixels to RGB.
enum Converter {
    /// Up to eight bits, converted by a lookup table.
    Table(Box<Table>),
    /// Two bytes: five bits of blue, `green_bits` of green, five of red.
    TwoBytes { green_bits: u32 },
    /// Three bytes: blue, green and red.
    ThreeBytes,
    /// Four bytes, with the offsets of red, green and blue, and of alpha if any.
    FourBytes { rgb: [usize; 3], alpha: Option<usize> },
}

impl Converter {
    fn new(header: &BmpHeader<'_>) -> Result<Self, MediaError> {
        Ok(match header.pixels {
            Pixels::BlackWhite => Self::Table(Box::new(std::array::from_fn(|value| {
                [if value == 0 { 0 } else { 255 }; 3]
            }))),
            Pixels::Grey => Self::Table(Box::new(grey_table())),
            Pixels::Indexed(_) => {
                let table = palette_table(header.palette, header.palette_entry, |bgr| {
                    [bgr[2], bgr[1], bgr[0]]
                })
                .ok_or(corrupt("the palette has more than 256 entries"))?;
                Self::Table(Box::new(table))
            }
            Pixels::Bgr555 => Self::TwoBytes { green_bits: 5 },
            Pixels::Bgr565 => Self::TwoBytes { green_bits: 6 },
            Pixels::Bgr => Self::ThreeBytes,
            Pixels::Four { red, green, blue, alpha } => Self::FourBytes {
                rgb: [red, green, blue].map(usize::from),
                alpha: alpha.map(usize::from),
            },
        })
    }

    /// Converts as many pixels of `bits` bits as `rgb` holds.
    fn convert_row(&self, stored: &[u8], bits: usize, rgb: &mut [u8]) {
        let pixels = rgb.chunks_exact_mut(3);
        match self {
            Self::Table(table) => {
                let mask = (1u16 << bits) - 1;
                for (index, pixel) in pixels.enumerate() {
                    let bit = index * bits;
                    let value = u16::from(stored[bit / 8]) >> (8 - bits - bit % 8) & mask;
                    pixel.copy_from_slice(&table[usize::from(value)]);
                }
            }
            Self::TwoBytes { green_bits } => {
                let max_green = (1 << green_bits) - 1;
                for (pixel, stored) in pixels.zip(stored.chunks_exact(2)) {
                    let value = u32::from(stored[0]) | u32::from(stored[1]) << 8;
                    let widen = |value: u32, max: u32| ((value & max) * 255 / max) as u8;
                    pixel.copy_from_slice(&[
                        widen(value >> (5 + green_bits), 31),
                        widen(value >> 5, max_green),
                        widen(value, 31),
                    ]);
                }
            }
            Self::ThreeBytes => {
                for (pixel, &[blue, green, red]) in
                    rgb.as_chunks_mut::<3>().0.iter_mut().zip(stored.as_chunks().0)
                {
                    *pixel = [red, green, blue];
                }
            }
            Self::FourBytes { rgb: offsets, alpha } => {
                for (pixel, stored) in pixels.zip(stored.chunks_exact(4)) {
                    let rgb = offsets.map(|offset| stored[offset]);
                    pixel.copy_from_slice(
                        &alpha.map_or(rgb, |alpha| rgb_on_white(rgb, stored[alpha])),
                    );
                }
            }
        }
    }
}
