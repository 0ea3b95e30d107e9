//! PNG image data: inflate, undo the row filters, convert each row to RGB.

use flate2::{Decompress, FlushDecompress, Status};

use crate::container::png::{ImageData, Layout, PngHeader, Transparency};
use crate::decode::pixel::{Table, grey_table, on_white, palette_table, rgb_on_white};
use crate::decode::{buffer, room};
use crate::{ImageFormat, MediaError};

/// First column, first row, column step and row step of the seven passes of an interlaced image.
const PASSES: [(usize, usize, usize, usize); 7] =
    [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)];

fn corrupt(reason: &'static str) -> MediaError {
    MediaError::Corrupt { format: ImageFormat::Png, reason }
}

/// Decodes to RGB rows.
pub(super) fn decode(header: &PngHeader<'_>) -> Result<Vec<u8>, MediaError> {
    let (width, height) = (header.size.0 as usize, header.size.1 as usize);
    let converter = Converter::new(header)?;
    let bits = header.layout.bits();
    let mut rows = FilteredRows::new(header.data.clone(), bits);
    if !header.interlaced {
        // Row by row, so that a header that promises much costs nothing before the data comes.
        let mut rgb = room(ImageFormat::Png, header.size, 3)?;
        rows.start_pass(width);
        for y in 0..height {
            let row = rows.next()?;
            rgb.resize(3 * (y + 1) * width, 0);
            converter.row(row, &mut rgb[3 * y * width..]);
        }
        return Ok(rgb);
    }
    let mut rgb = buffer(ImageFormat::Png, header.size, 3)?;
    let mut line = Vec::new();
    for (first_column, first_row, column_step, row_step) in PASSES {
        let columns = width.saturating_sub(first_column).div_ceil(column_step);
        if columns == 0 {
            continue;
        }
        rows.start_pass(columns);
        line.resize(3 * columns, 0);
        for y in (first_row..height).step_by(row_step) {
            converter.row(rows.next()?, &mut line);
            let row = &mut rgb[3 * y * width..3 * (y + 1) * width];
            let pixels = row[3 * first_column..].chunks_mut(3 * column_step);
            for (pixel, converted) in pixels.zip(line.chunks_exact(3)) {
                pixel[..3].copy_from_slice(converted);
            }
        }
    }
    Ok(rgb)
}

/// Inflates row after row and undoes the filters.
struct FilteredRows<'a> {
    data: ImageData<'a>,
    input: &'a [u8],
    inflater: Decompress,
    ended: bool,
    bits: usize,
    /// The filter type, then the row.
    current: Vec<u8>,
    previous: Vec<u8>,
}

impl<'a> FilteredRows<'a> {
    fn new(data: ImageData<'a>, bits: usize) -> Self {
        Self {
            data,
            input: &[],
            inflater: Decompress::new(true),
            ended: false,
            bits,
            current: Vec::new(),
            previous: Vec::new(),
        }
    }

    /// The rows that follow have `columns` pixels, and the first has none above it.
    fn start_pass(&mut self, columns: usize) {
        let length = 1 + (columns * self.bits).div_ceil(8);
        for row in [&mut self.current, &mut self.previous] {
            row.clear();
            row.resize(length, 0);
        }
    }

    /// The samples of the next row. A stream that ends with a row leaves all further samples 0, as in Pillow.
    fn next(&mut self) -> Result<&[u8], MediaError> {
        if self.ended {
            self.current.fill(0);
            return Ok(&self.current[1..]);
        }
        std::mem::swap(&mut self.current, &mut self.previous);
        self.inflate()?;
        let step = self.bits.div_ceil(8);
        let (filter, row) = self.current.split_first_mut().ok_or(corrupt("empty rows"))?;
        unfilter(*filter, step, row, &self.previous[1..])?;
        Ok(row)
    }

    /// Fills `current`. The stream's own checksum and what follows the last row do not matter.
    fn inflate(&mut self) -> Result<(), MediaError> {
        let mut filled = 0;
        while filled < self.current.len() {
            if self.input.is_empty() {
                self.input = self.data.next().ok_or(corrupt("the image data ends too early"))?;
            }
            let (read, written) = (self.inflater.total_in(), self.inflater.total_out());
            let status = self
                .inflater
                .decompress(self.input, &mut self.current[filled..], FlushDecompress::None)
                .map_err(|_| corrupt("the compressed image data is broken"))?;
            self.input = &self.input[(self.inflater.total_in() - read) as usize..];
            filled += (self.inflater.total_out() - written) as usize;
            self.ended = status == Status::StreamEnd;
            if self.ended && filled < self.current.len() {
                return Err(corrupt("the image data ends too early"));
            }
        }
        Ok(())
    }
}

/// Undoes a row's filter; `step` is the distance in bytes to the pixel at the left, at least 1.
fn unfilter(filter: u8, step: usize, row: &mut [u8], above: &[u8]) -> Result<(), MediaError> {
    match filter {
        0 => {}
        1 => {
            for i in step..row.len() {
                row[i] = row[i].wrapping_add(row[i - step]);
            }
        }
        2 => {
            for (value, above) in row.iter_mut().zip(above) {
                *value = value.wrapping_add(*above);
            }
        }
        3 => {
            for i in 0..row.len() {
                let left = if i < step { 0 } else { row[i - step] };
                let mean = (u16::from(left) + u16::from(above[i])) / 2;
                row[i] = row[i].wrapping_add(mean as u8);
            }
        }
        4 => {
            for i in 0..row.len() {
                let (left, corner) = if i < step { (0, 0) } else { (row[i - step], above[i - step]) };
                row[i] = row[i].wrapping_add(paeth(left, above[i], corner));
            }
        }
        _ => return Err(corrupt("an unknown row filter")),
    }
    Ok(())
}

/// Whichever of the three neighbours is nearest to `left + above - corner`.
fn paeth(left: u8, above: u8, corner: u8) -> u8 {
    let (a, b, c) = (i16::from(left), i16::from(above), i16::from(corner));
    let (from_a, from_b, from_c) = ((b - c).abs(), (a - c).abs(), (a + b - 2 * c).abs());
    if from_a <= from_b && from_a <= from_c {
        left
    } else if from_b <= from_c {
        above
    } else {
        corner
    }
}

/// Turns a row of samples into RGB.
enum Converter {
    /// Samples of up to eight bits, looked up.
    Table {
        bits: usize,
        table: Box<Table>,
    },
    Grey16 {
        transparent: Option<u8>,
    },
    /// Red, green and blue this many bytes apart.
    Rgb {
        sample: usize,
    },
    GreyAlpha {
        sample: usize,
    },
    Rgba {
        sample: usize,
    },
}

impl Converter {
    fn new(header: &PngHeader<'_>) -> Result<Self, MediaError> {
        let transparent_grey = match header.transparency {
            // Pillow compares the low byte with the converted value, also for samples of other depths than eight bits.
            Some(Transparency::Grey(value)) => Some(value as u8),
            _ => None,
        };
        Ok(match header.layout {
            Layout::Grey(depth) => {
                let bits = usize::from(depth);
                let step = 255 / ((1 << bits) - 1);
                let greys = grey_table();
                let table = std::array::from_fn(|sample| {
                    let value = (sample * step) as u8;
                    if transparent_grey == Some(value) { [255; 3] } else { greys[usize::from(value)] }
                });
                Self::Table { bits, table: Box::new(table) }
            }
            Layout::Indexed(depth) => Self::Table { bits: depth.into(), table: Box::new(palette(header)?) },
            Layout::Grey16 => Self::Grey16 { transparent: transparent_grey },
            Layout::Rgb8 => Self::Rgb { sample: 1 },
            Layout::Rgb16 => Self::Rgb { sample: 2 },
            Layout::GreyAlpha8 => Self::GreyAlpha { sample: 1 },
            Layout::GreyAlpha16 => Self::GreyAlpha { sample: 2 },
            Layout::Rgba8 => Self::Rgba { sample: 1 },
            Layout::Rgba16 => Self::Rgba { sample: 2 },
        })
    }

    /// Converts as many pixels as `rgb` holds. Of 16-bit samples Pillow takes the high byte, except for grey.
    fn row(&self, samples: &[u8], rgb: &mut [u8]) {
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
            Self::Rgb { sample: 1 } => rgb.copy_from_slice(&samples[..rgb.len()]),
            Self::Rgb { sample } => {
                for (value, sample) in rgb.iter_mut().zip(samples.chunks_exact(*sample)) {
                    *value = sample[0];
                }
            }
            Self::GreyAlpha { sample } => {
                for (pixel, stored) in pixels.zip(samples.chunks_exact(2 * sample)) {
                    pixel.fill(on_white(stored[0], stored[*sample]));
                }
            }
            Self::Rgba { sample } => {
                for (pixel, stored) in pixels.zip(samples.chunks_exact(4 * sample)) {
                    let rgb = [stored[0], stored[*sample], stored[2 * sample]];
                    pixel.copy_from_slice(&rgb_on_white(rgb, stored[3 * sample]));
                }
            }
        }
    }
}

/// The palette, its transparency flattened.
fn palette(header: &PngHeader<'_>) -> Result<Table, MediaError> {
    let too_long = corrupt("the palette has more than 256 entries");
    let mut table = palette_table(header.palette, 3, |rgb| [rgb[0], rgb[1], rgb[2]]).ok_or(too_long.clone())?;
    match header.transparency {
        Some(Transparency::Index(index)) => *table.get_mut(index).ok_or(too_long)? = [255; 3],
        Some(Transparency::Alphas(alphas)) if alphas.len() > table.len() => return Err(too_long),
        Some(Transparency::Alphas(alphas)) => {
            for (colour, &alpha) in table.iter_mut().zip(alphas) {
                *colour = rgb_on_white(*colour, alpha);
            }
        }
        Some(Transparency::Grey(_)) | None => {}
    }
    Ok(table)
}
