//! GIF's variant of LZW, as lenient as Pillow.
//!
//! The crates `gif` and `weezl` accept fewer files than Pillow, and reach two thirds of the speed
//! (see the table in [`decode`](super::super)). On 3,000 files that Pillow wrote and that were then
//! modified, this module always yields Pillow's pixels. `gif` 0.14 refused 277 of 534 files with
//! empty sub-blocks between others, where Pillow continues. It differed in 85 of 465 files with one
//! byte of the codes changed.
//!
//! The string of a code is always in the output already. A code is defined as the string of the
//! previous code plus the next index, and both were just written. The table therefore holds
//! positions in the output, and a string is one copy.

use super::corrupt;
use crate::MediaError;

/// The size of the code table: codes have at most twelve bits.
const TABLE_SIZE: usize = 1 << 12;

/// The number of bytes that are copied at once. The output buffer must extend by this many bytes
/// past the last index.
pub(super) const SLACK_BYTES: usize = 16;

/// The position of a string of indices in the output.
#[derive(Clone, Copy, Default)]
struct Span {
    start: u32,
    length: u32,
}

/// Decodes the sub-blocks at the start of `data` into `indices`, up to [`SLACK_BYTES`] before its
/// end.
///
/// `code_bits` is the minimum code size, which precedes the sub-blocks.
pub(super) fn unpack(data: &[u8], code_bits: u8, indices: &mut [u8]) -> Result<(), MediaError> {
    if code_bits > 11 {
        return Err(corrupt("the code size is out of range"));
    }
    let undefined = || corrupt("a code that is not defined");
    let count = indices.len().saturating_sub(SLACK_BYTES);
    let mut bits = BitReader { data, block: &[], buffer: 0, count: 0 };
    // The clear code is the first code after the indices.
    let clear = 1 << code_bits;
    let first_width = u32::from(code_bits) + 1;
    let mut width = first_width;
    let mut next = clear + 2;
    let mut table = [Span::default(); TABLE_SIZE];
    // The output of the previous code; `None` after a clear code.
    let mut last: Option<Span> = None;
    let mut filled = 0;
    while filled < count {
        let code = bits.read(width)?;
        if code == clear {
            width = first_width;
            next = clear + 2;
            last = None;
            continue;
        }
        if code == clear + 1 {
            return Err(corrupt("the image data ends too early"));
        }
        let start = filled as u32;
        let Some(previous) = last else {
            if code > clear {
                return Err(undefined());
            }
            indices[filled] = code as u8;
            filled += 1;
            last = Some(Span { start, length: 1 });
            continue;
        };
        let length = if code < clear {
            indices[filled] = code as u8;
            1
        } else if code < next {
            let span = table[code];
            copy_string(indices, filled, span, count);
            span.length
        } else if code == next {
            // The code that this step defines: the previous string plus that string's first index.
            copy_string(indices, filled, previous, count);
            let end = filled + previous.length as usize;
            if end < count {
                indices[end] = indices[previous.start as usize];
            }
            previous.length + 1
        } else {
            return Err(undefined());
        };
        if next < TABLE_SIZE {
            table[next] = Span { start: previous.start, length: previous.length + 1 };
            if next == (1 << width) - 1 && width < 12 {
                width += 1;
            }
            next += 1;
        }
        last = Some(Span { start, length });
        filled += length as usize;
    }
    Ok(())
}

/// Copies a string to position `filled`, up to the first `count` indices.
#[inline(always)]
fn copy_string(indices: &mut [u8], filled: usize, span: Span, count: usize) {
    let start = span.start as usize;
    let length = span.length as usize;
    if length <= SLACK_BYTES {
        // Most strings are short, and a copy of fixed length is fast. Later strings overwrite the
        // excess bytes.
        let mut string = [0; SLACK_BYTES];
        string.copy_from_slice(&indices[start..start + SLACK_BYTES]);
        indices[filled..filled + SLACK_BYTES].copy_from_slice(&string);
    } else {
        let length = length.min(count - filled);
        indices.copy_within(start..start + length, filled);
    }
}

/// A reader of codes from a chain of sub-blocks, least significant bit first.
struct BitReader<'a> {
    /// The data after the current sub-block.
    data: &'a [u8],
    /// The unread part of the current sub-block.
    block: &'a [u8],
    buffer: u64,
    /// The number of bits in `buffer`.
    count: u32,
}

impl BitReader<'_> {
    /// Reads a code of `width` bits.
    #[inline(always)]
    fn read(&mut self, width: u32) -> Result<usize, MediaError> {
        if self.count < width {
            self.refill(width)?;
        }
        let code = self.buffer & ((1 << width) - 1);
        self.buffer >>= width;
        self.count -= width;
        Ok(code as usize)
    }

    /// Fills the buffer to at least `width` bits, from the next sub-block only if necessary.
    fn refill(&mut self, width: u32) -> Result<(), MediaError> {
        loop {
            while self.count <= 56
                && let [byte, rest @ ..] = self.block
            {
                self.buffer |= u64::from(*byte) << self.count;
                self.count += 8;
                self.block = rest;
            }
            if self.count >= width {
                return Ok(());
            }
            // Pillow continues after an empty sub-block, and requires every sub-block to be
            // complete.
            let (&length, rest) =
                self.data.split_first().ok_or(corrupt("the image data ends too early"))?;
            (self.block, self.data) = rest
                .split_at_checked(length.into())
                .ok_or(corrupt("the image data ends too early"))?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clear code and the indices 0, 1 and 2 in three bits each, then the index 3 and the end
    /// code in four bits each.
    const CODES: [u8; 3] = [0x44, 0x34, 0x05];

    fn indices(blocks: &[u8]) -> Result<Vec<u8>, MediaError> {
        let mut indices = vec![0; 4 + SLACK_BYTES];
        unpack(blocks, 2, &mut indices)?;
        indices.truncate(4);
        Ok(indices)
    }

    #[test]
    fn sub_blocks_of_any_length_are_decoded() {
        let [a, b, c] = CODES;
        for blocks in [
            &[3, a, b, c, 0][..],
            &[1, a, 2, b, c, 0],
            &[1, a, 0, 1, b, 0, 0, 1, c, 0],
            &[0, 3, a, b, c],
        ] {
            assert_eq!(indices(blocks).unwrap(), [0, 1, 2, 3], "{blocks:?}");
        }
    }

    #[test]
    fn truncated_data_is_an_error() {
        let [a, b, c] = CODES;
        for blocks in [&[][..], &[0], &[1, a, 0], &[3, a, b], &[1, a, 9, b, c]] {
            assert!(indices(blocks).is_err(), "{blocks:?}");
        }
    }
}
