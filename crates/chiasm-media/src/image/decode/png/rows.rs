//! Inflates the rows of a PNG's compressed stream, many at a time.
//!
//! Inflating row by row takes almost twice as long, because the inflater then copies its window
//! once per row and decodes single symbols near the end of each row.

use fdeflate::Decompressor;
use flate2::{Decompress, FlushDecompress, Status};

use super::corrupt;
use super::filter::unfilter;
use crate::image::container::png::ImageData;
use crate::image::decode::memory::ReusableBuffer;
use crate::{ImageFormat, MediaError};

/// The size in bytes of the strip of rows that is inflated at a time; a single longer row is a
/// strip too. It is large enough for the inflater, and stays in the cache until its filters are
/// undone.
const STRIP_BYTES: usize = 256 << 10;

/// The number of bytes at the end of a stream that are inflated row by row, as Pillow inflates the
/// whole stream.
///
/// Pillow fails when a row starts without input, where the inflater could still expand codes that
/// it has already read. It also detects a wrong checksum only together with the last row.
const TAIL_BYTES: usize = 64;

/// The ratio of output to input above which a stream consists mostly of repetitions.
///
/// Streams below it, of photographs, consist of literal bytes. fdeflate decodes two of them at a
/// time and is up to 1.6 times as fast as zlib-rs. With repetitions, zlib-rs is up to 1.3 times as
/// fast.
const MIN_REPETITIVE_RATIO: usize = 3;

/// Returns the zlib stream as one slice. Joins it in `memory` if it is split into several chunks.
pub(super) fn contiguous_stream<'a>(
    mut data: ImageData<'a>,
    memory: &'a mut ReusableBuffer,
) -> Result<&'a [u8], MediaError> {
    let first = data.next().unwrap_or_default();
    let length = first.len() + data.clone().map(<[u8]>::len).sum::<usize>();
    if length == first.len() {
        return Ok(first);
    }
    let mut rest = memory.prepare(ImageFormat::Png, length)?;
    for chunk in std::iter::once(first).chain(data) {
        let (target, remaining) = rest.split_at_mut(chunk.len());
        target.copy_from_slice(chunk);
        rest = remaining;
    }
    Ok(memory.filled(length))
}

/// Inflates rows and undoes their filters.
pub(super) struct FilteredRows<'a> {
    input: &'a [u8],
    inflater: Decompress,
    /// `true` once the stream has ended.
    ended: bool,
    bits_per_pixel: usize,
    /// The row above the strip, and then the inflated rows of the strip.
    memory: &'a mut ReusableBuffer,
    /// The bytes of a row, including its filter type.
    row_bytes: usize,
    /// The number of rows of this pass that have not been inflated.
    remaining_rows: usize,
    /// The number of rows in the strip.
    strip_rows: usize,
    /// The number of rows of the strip that have been returned.
    returned_rows: usize,
}

impl<'a> FilteredRows<'a> {
    /// Creates a reader of the rows in `input`, a zlib stream.
    pub(super) fn new(
        input: &'a [u8],
        bits_per_pixel: usize,
        memory: &'a mut ReusableBuffer,
    ) -> Self {
        Self {
            input,
            inflater: Decompress::new(true),
            ended: false,
            bits_per_pixel,
            memory,
            row_bytes: 0,
            remaining_rows: 0,
            strip_rows: 0,
            returned_rows: 0,
        }
    }

    /// Starts a pass of `rows` rows of `columns` pixels. The first row has no row above it.
    pub(super) fn start_pass(&mut self, columns: usize, rows: usize) -> Result<(), MediaError> {
        self.row_bytes = 1 + (columns * self.bits_per_pixel).div_ceil(8);
        self.remaining_rows = rows;
        self.strip_rows = 0;
        self.returned_rows = 0;
        let strip_bytes = self.row_bytes * (1 + self.next_strip_rows());
        let strip = self.memory.prepare(ImageFormat::Png, strip_bytes)?;
        strip[..self.row_bytes].fill(0);
        Ok(())
    }

    /// Inflates all rows of the pass at once, if fdeflate is faster for this stream. The stream
    /// must end with these rows.
    ///
    /// If anything about the stream is unusual, the state is unchanged, and the rows are inflated
    /// on demand.
    pub(super) fn try_inflate_all(&mut self) -> Result<(), MediaError> {
        let length = self.row_bytes * self.remaining_rows;
        if length / MIN_REPETITIVE_RATIO > self.input.len() {
            return Ok(());
        }
        let memory = self.memory.prepare(ImageFormat::Png, self.row_bytes + length)?;
        memory[..self.row_bytes].fill(0);
        let rows = &mut memory[self.row_bytes..];
        let mut inflater = Decompressor::new();
        let mut read = 0;
        let mut filled = 0;
        while !inflater.is_done() {
            match inflater.read(&self.input[read..], rows, filled, true) {
                Ok((more_read, more_filled)) if more_read + more_filled > 0 => {
                    read += more_read;
                    filled += more_filled;
                }
                _ => return Ok(()),
            }
        }
        if filled == length {
            self.strip_rows = self.remaining_rows;
            self.remaining_rows = 0;
        }
        Ok(())
    }

    /// Returns the number of rows of the next strip.
    fn next_strip_rows(&self) -> usize {
        (STRIP_BYTES / self.row_bytes).max(1).min(self.remaining_rows)
    }

    /// Returns the samples of the next row.
    pub(super) fn next(&mut self) -> Result<&[u8], MediaError> {
        if self.returned_rows == self.strip_rows {
            self.inflate_strip()?;
        }
        let strip = self.memory.prepared(self.row_bytes * (1 + self.strip_rows));
        let (above, rows) =
            strip[self.row_bytes * self.returned_rows..].split_at_mut(self.row_bytes);
        let (filter, samples) =
            rows[..self.row_bytes].split_first_mut().ok_or(corrupt("empty rows"))?;
        unfilter(*filter, self.bits_per_pixel.div_ceil(8), samples, &above[1..])?;
        self.returned_rows += 1;
        Ok(samples)
    }

    /// Inflates the next strip of rows. Data after the last row is ignored.
    fn inflate_strip(&mut self) -> Result<(), MediaError> {
        let rows = self.next_strip_rows();
        let last = self.row_bytes * self.strip_rows;
        let strip = self.memory.prepared(self.row_bytes * (1 + rows.max(self.strip_rows)));
        // The last row of the previous strip is the row above the first row of this one.
        strip.copy_within(last..last + self.row_bytes, 0);
        let strip = &mut strip[self.row_bytes..self.row_bytes * (1 + rows)];
        // The image's last row is inflated with all remaining input.
        let bulk_bytes =
            if rows == self.remaining_rows { strip.len() - self.row_bytes } else { strip.len() };
        let mut filled = 0;
        while filled < strip.len() && !self.ended {
            if self.input.is_empty() {
                return Err(corrupt("the image data ends too early"));
            }
            let (input, end) = match self.input.len().checked_sub(TAIL_BYTES) {
                Some(length @ 1..) if filled < bulk_bytes => (&self.input[..length], bulk_bytes),
                _ => (self.input, (filled / self.row_bytes + 1) * self.row_bytes),
            };
            let total_in = self.inflater.total_in();
            let total_out = self.inflater.total_out();
            let status = self
                .inflater
                .decompress(input, &mut strip[filled..end], FlushDecompress::None)
                .map_err(|_| corrupt("the compressed image data is broken"))?;
            let read = self.inflater.total_in() - total_in;
            let written = self.inflater.total_out() - total_out;
            if read == 0 && written == 0 && status != Status::StreamEnd {
                return Err(corrupt("the compressed image data is broken"));
            }
            self.input = &self.input[read as usize..];
            filled += written as usize;
            self.ended = status == Status::StreamEnd;
        }
        // If the stream ends with a row, all further samples stay 0, as in Pillow.
        if !filled.is_multiple_of(self.row_bytes) {
            return Err(corrupt("the image data ends too early"));
        }
        strip[filled..].fill(0);
        self.remaining_rows -= rows;
        self.strip_rows = rows;
        self.returned_rows = 0;
        Ok(())
    }
}
