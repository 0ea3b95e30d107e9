//! Rows out of a PNG's compressed stream, many at a time.
//!
//! Inflating row by row takes almost twice as long: the inflater then copies its window once per
//! row, and goes by single symbols near the end of each.

use fdeflate::Decompressor;
use flate2::{Decompress, FlushDecompress, Status};

use super::corrupt;
use super::filter::unfilter;
use crate::image::container::png::ImageData;
use crate::image::decode::memory::Reused;
use crate::{ImageFormat, MediaError};

/// Bytes of rows that are inflated at a time, unless one row has more: enough for the inflater, and
/// still in the cache when their filters are undone.
const STRIP: usize = 256 << 10;

/// The last bytes of a stream are inflated row by row, as Pillow does it all the way. It gives up
/// when a row starts without input, where the inflater might go on with what it has read the
/// description of already; and it sees a wrong checksum only together with the last row.
const TAIL: usize = 64;

/// Rows this many times the size of their stream, and larger ones, consist of repetitions for the
/// most part. Smaller ones, of photographs, consist of single bytes, which fdeflate takes two at a
/// time: up to 1.6 times as fast as zlib-rs, where that is up to 1.3 times as fast with
/// repetitions.
const REPETITIVE: usize = 3;

/// The zlib stream, put together in `memory` if it comes in several chunks.
pub(super) fn one_piece<'a>(
    mut data: ImageData<'a>,
    memory: &'a mut Reused,
) -> Result<&'a [u8], MediaError> {
    let first = data.next().unwrap_or_default();
    let length = first.len() + data.clone().map(<[u8]>::len).sum::<usize>();
    if length == first.len() {
        return Ok(first);
    }
    let mut rest = memory.take(ImageFormat::Png, length)?;
    for chunk in std::iter::once(first).chain(data) {
        let (place, behind) = rest.split_at_mut(chunk.len());
        place.copy_from_slice(chunk);
        rest = behind;
    }
    Ok(memory.written(length))
}

/// Inflates rows and undoes their filters.
pub(super) struct FilteredRows<'a> {
    input: &'a [u8],
    inflater: Decompress,
    ended: bool,
    /// Bits per pixel.
    bits: usize,
    memory: &'a mut Reused,
    /// Bytes of a row, with its filter type in front.
    row: usize,
    /// Rows of this pass that have not been inflated.
    waiting: usize,
    /// `memory` starts with the row above the strip; then come so many inflated rows, of which so
    /// many are done.
    inflated: usize,
    done: usize,
}

impl<'a> FilteredRows<'a> {
    /// `input` is the zlib stream.
    pub(super) fn new(input: &'a [u8], bits: usize, memory: &'a mut Reused) -> Self {
        let inflater = Decompress::new(true);
        Self {
            input,
            inflater,
            ended: false,
            bits,
            memory,
            row: 0,
            waiting: 0,
            inflated: 0,
            done: 0,
        }
    }

    /// The next `rows` rows have `columns` pixels, and the first has none above it.
    pub(super) fn start_pass(&mut self, columns: usize, rows: usize) -> Result<(), MediaError> {
        self.row = 1 + (columns * self.bits).div_ceil(8);
        (self.waiting, self.inflated, self.done) = (rows, 0, 0);
        let strip = self.memory.take(ImageFormat::Png, self.row * (1 + self.strip_rows()))?;
        strip[..self.row].fill(0);
        Ok(())
    }

    /// Inflates all rows of the pass at once, if that is worth it; the stream must end with them.
    /// Where there is anything unusual about the stream nothing has happened, and the rows are
    /// inflated as they are asked for.
    pub(super) fn inflate_at_once(&mut self) -> Result<(), MediaError> {
        let length = self.row * self.waiting;
        if length / REPETITIVE > self.input.len() {
            return Ok(());
        }
        let memory = self.memory.take(ImageFormat::Png, self.row + length)?;
        memory[..self.row].fill(0);
        let rows = &mut memory[self.row..];
        let mut inflater = Decompressor::new();
        let (mut read, mut filled) = (0, 0);
        while !inflater.is_done() {
            match inflater.read(&self.input[read..], rows, filled, true) {
                Ok((more_read, more_filled)) if more_read + more_filled > 0 => {
                    (read, filled) = (read + more_read, filled + more_filled);
                }
                _ => return Ok(()),
            }
        }
        if filled == length {
            (self.inflated, self.waiting) = (self.waiting, 0);
        }
        Ok(())
    }

    fn strip_rows(&self) -> usize {
        (STRIP / self.row).max(1).min(self.waiting)
    }

    /// The samples of the next row.
    pub(super) fn next(&mut self) -> Result<&[u8], MediaError> {
        if self.done == self.inflated {
            self.inflate_strip()?;
        }
        let (above, rows) = self.memory.taken(self.row * (1 + self.inflated))
            [self.row * self.done..]
            .split_at_mut(self.row);
        let (filter, samples) = rows[..self.row].split_first_mut().ok_or(corrupt("empty rows"))?;
        unfilter(*filter, self.bits.div_ceil(8), samples, &above[1..])?;
        self.done += 1;
        Ok(samples)
    }

    /// What follows the last row does not matter.
    fn inflate_strip(&mut self) -> Result<(), MediaError> {
        let rows = self.strip_rows();
        let last = self.row * self.inflated;
        let strip = self.memory.taken(self.row * (1 + rows.max(self.inflated)));
        // The last row of the strip before is the one above this one's first.
        strip.copy_within(last..last + self.row, 0);
        let strip = &mut strip[self.row..self.row * (1 + rows)];
        // The last row of all is inflated with all the input that there is.
        let many = if rows == self.waiting { strip.len() - self.row } else { strip.len() };
        let mut filled = 0;
        while filled < strip.len() && !self.ended {
            if self.input.is_empty() {
                return Err(corrupt("the image data ends too early"));
            }
            let (input, end) = match self.input.len().checked_sub(TAIL) {
                Some(length @ 1..) if filled < many => (&self.input[..length], many),
                _ => (self.input, (filled / self.row + 1) * self.row),
            };
            let (read, written) = (self.inflater.total_in(), self.inflater.total_out());
            let status = self
                .inflater
                .decompress(input, &mut strip[filled..end], FlushDecompress::None)
                .map_err(|_| corrupt("the compressed image data is broken"))?;
            let (read, written) =
                (self.inflater.total_in() - read, self.inflater.total_out() - written);
            if read == 0 && written == 0 && status != Status::StreamEnd {
                return Err(corrupt("the compressed image data is broken"));
            }
            self.input = &self.input[read as usize..];
            filled += written as usize;
            self.ended = status == Status::StreamEnd;
        }
        // A stream that ends with a row leaves all further samples 0, as in Pillow.
        if !filled.is_multiple_of(self.row) {
            return Err(corrupt("the image data ends too early"));
        }
        strip[filled..].fill(0);
        self.waiting -= rows;
        (self.inflated, self.done) = (rows, 0);
        Ok(())
    }
}
