//! PNG decoding: inflates the data, undoes the row filters and converts each row to RGB.

mod filter;
mod rows;

use crate::image::container::png::{Layout, PngHeader, Transparency};
use crate::image::decode::memory::{ReusableBuffer, Scratch, rgb_bytes};
use crate::image::decode::pixel::{
    RGB, Table, grey_table, on_white, palette_table, rgb_on_white, row_on_white,
};
use crate::{ImageFormat, MediaError};
use rows::{FilteredRows, contiguous_stream};

/// The pixels of one pass of an interlaced image.
struct Pass {
    first_column: usize,
    first_row: usize,
    column_step: usize,
    row_step: usize,
}

impl Pass {
    const fn new(
        first_column: usize,
        first_row: usize,
        column_step: usize,
        row_step: usize,
    ) -> Self {
        Self { first_column, first_row, column_step, row_step }
    }
}

/// The seven passes of an interlaced image (Adam7).
const PASSES: [Pass; 7] = [
    Pass::new(0, 0, 8, 8),
    Pass::new(4, 0, 8, 8),
    Pass::new(0, 4, 4, 8),
    Pass::new(2, 0, 4, 4),
    Pass::new(0, 2, 2, 4),
    Pass::new(1, 0, 2, 2),
    Pass::new(0, 1, 1, 2),
];

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Png, reason }
}

/// Decodes an image to RGB rows.
pub(super) fn decode(
    header: &PngHeader<'_>,
    scratch: &mut Scratch,
    rgb: &mut ReusableBuffer,
) -> Result<(), MediaError> {
    let width = header.size.0 as usize;
    let height = header.size.1 as usize;
    let converter = Converter::new(header)?;
    let stream = contiguous_stream(header.data.clone(), &mut scratch.file)?;
    let mut rows = FilteredRows::new(stream, header.layout.bits(), &mut scratch.samples);
    let rgb = rgb.prepare(ImageFormat::Png, rgb_bytes(ImageFormat::Png, header.size)?)?;
    if !header.interlaced {
        rows.start_pass(width, height)?;
        rows.try_inflate_all()?;
        for line in rgb.chunks_exact_mut(RGB * width) {
            converter.convert_row(rows.next()?, line);
        }
        return Ok(());
    }
    let mut line = Vec::new();
    for Pass { first_column, first_row, column_step, row_step } in PASSES {
        let columns = width.saturating_sub(first_column).div_ceil(column_step);
        if columns == 0 {
            continue;
        }
        rows.start_pass(columns, height.saturating_sub(first_row).div_ceil(row_step))?;
        line.resize(RGB * columns, 0);
        for y in (first_row..height).step_by(row_step) {
            converter.convert_row(rows.next()?, &mut line);
            let row = &mut rgb[RGB * y * width..RGB * (y + 1) * width];
            let pixels = row[RGB * first_column..].chunks_mut(RGB * column_step);
            for (pixel, converted) in pixels.zip(line.chunks_exact(RGB)) {
                pixel[..RGB].copy_from_slice(converted);
            }
        }
    }
    Ok(())
}

/// Converts rows of samples to RGB.
enum Converter {
    /// Samples of up to eight bits, converted by a lookup table.
    Table {
        bits: usize,
        table: Box<Table>,
    },
    Grey16 {
        transparent: Option<u8>,
    },
    Rgb {
        sample_bytes: usize,
        transparent: Option<[u8; 3]>,
    },
    GreyAlpha {
        sample_bytes: usize,
    },
    Rgba {
        sample_bytes: usize,
    },
}

impl Converter {
    fn new(header: &PngHeader<'_>) -> Result<Self, MediaError> {
        // Pillow compares the low byte of the transparent value with the converted value, at every
        // sample depth.
        let (transparent_grey, transparent) = match header.transparency {
            Some(Transparency::Grey(value)) => (Some(value as u8), None),
            Some(Transparency::Rgb(rgb)) => (None, Some(rgb.map(|value| value as u8))),
            _ => (None, None),
        };
        Ok(match header.layout {
            Layout::Grey(depth) => {
                let bits = usize::from(depth);
                let step = 255 / ((1 << bits) - 1);
                let greys = grey_table();
                let table = std::array::from_fn(|sample| {
                    let value = (sample * step) as u8;
                    if transparent_grey == Some(value) {
                        [255; 3]
                    } else {
                        greys[usize::from(value)]
                    }
                });
                Self::Table { bits, table: Box::new(table) }
            }
            Layout::Indexed(depth) => {
                Self::Table { bits: depth.into(), table: Box::new(palette(header)?) }
            }
            Layout::Grey16 => Self::Grey16 { transparent: transparent_grey },
            Layout::Rgb8 => Self::Rgb { sample_bytes: 1, transparent },
            Layout::Rgb16 => Self::Rgb { sample_bytes: 2, transparent },
            Layout::GreyAlpha8 => Self::GreyAlpha { sample_bytes: 1 },
            Layout::GreyAlpha16 => Self::GreyAlpha { sample_bytes: 2 },
            Layout::Rgba8 => Self::Rgba { sample_bytes: 1 },
            Layout::Rgba16 => Self::Rgba { sample_bytes: 2 },
        })
    }

    /// Fills `rgb` with converted pixels. As in Pillow, 16-bit samples are reduced to their high
    /// byte, except for grey.
    fn convert_row(&self, samples: &[u8], rgb: &mut [u8]) {
        let pixels = rgb.chunks_exact_mut(3);
        match self {
            Self::Table { bits: 8, table } => {
                for (pixel, &sample) in pixels.zip(samples) {
                    pixel.copy_from_slice(&table[usize::from(sample)]);
                }
            }
            Self::Table { bits, table } => {
                let mask = (1u8 << bits) - 1;
                for (index, pixel) in pixels.enumerate() {
                    let bit = index * bits;
                    let sample = samples[bit / 8] >> (8 - bits - bit % 8) & mask;
                    pixel.copy_from_slice(&table[usize::from(sample)]);
                }
            }
            Self::Grey16 { transparent } => {
                for (pixel, sample) in pixels.zip(samples.chunks_exact(2)) {
                    // Pillow clips 16-bit grey to eight bits instead of scaling it.
                    let value = if sample[0] == 0 { sample[1] } else { 255 };
                    pixel.fill(if *transparent == Some(value) { 255 } else { value });
                }
            }
            Self::Rgb { sample_bytes, transparent } => {
                if *sample_bytes == 1 {
                    rgb.copy_from_slice(&samples[..rgb.len()]);
                } else {
                    for (value, sample) in rgb.iter_mut().zip(samples.chunks_exact(*sample_bytes)) {
                        *value = sample[0];
                    }
                }
                if let Some(transparent) = transparent {
                    rgb.chunks_exact_mut(3)
                        .filter(|pixel| *pixel == transparent)
                        .for_each(|pixel| pixel.fill(255));
                }
            }
            Self::GreyAlpha { sample_bytes } => {
                for (pixel, stored) in pixels.zip(samples.chunks_exact(2 * sample_bytes)) {
                    pixel.fill(on_white(stored[0], stored[*sample_bytes]));
                }
            }
            Self::Rgba { sample_bytes: 1 } => row_on_white(samples, rgb),
            Self::Rgba { sample_bytes } => {
                for (pixel, stored) in pixels.zip(samples.chunks_exact(4 * sample_bytes)) {
                    let rgb = [stored[0], stored[*sample_bytes], stored[2 * sample_bytes]];
                    pixel.copy_from_slice(&rgb_on_white(rgb, stored[3 * sample_bytes]));
                }
            }
        }
    }
}

/// Returns the palette, with its transparency blended onto white.
fn palette(header: &PngHeader<'_>) -> Result<Table, MediaError> {
    let too_long = corrupt("the palette has more than 256 entries");
    let mut table =
        palette_table(header.palette, 3, |rgb| [rgb[0], rgb[1], rgb[2]]).ok_or(too_long.clone())?;
    match header.transparency {
        Some(Transparency::Index(index)) => *table.get_mut(index).ok_or(too_long)? = [255; 3],
        Some(Transparency::Alphas(alphas)) if alphas.len() > table.len() => return Err(too_long),
        Some(Transparency::Alphas(alphas)) => {
            for (colour, &alpha) in table.iter_mut().zip(alphas) {
                *colour = rgb_on_white(*colour, alpha);
            }
        }
        Some(Transparency::Grey(_) | Transparency::Rgb(_)) | None => {}
    }
    Ok(table)
}
