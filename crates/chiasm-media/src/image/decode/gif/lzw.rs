//! GIF's variant of LZW, with Pillow's leniency.
//!
//! It is our own since the crates `gif` and `weezl` read less than Pillow, and at two thirds of the
//! speed (the table in [`decode`](super::super)). Of 3,000 files that Pillow had written and that
//! were then changed, this module made Pillow's pixels of all; `gif` 0.14 refused 277 of 534 with
//! empty sub-blocks between others, where Pillow reads on, and differed in 85 of 465 with one byte
//! of the codes changed.
//!
//! What a code stands for always stands in the output already: a code is defined as the string of
//! the one before and the next index, and these were just written. So the table holds places in the
//! output, and a string is one copy.

use super::corrupt;
use crate::MediaError;

/// Codes have at most twelve bits.
const TABLE: usize = 1 << 12;

/// Bytes that are written at once, and so how many must follow the last index in the output.
pub(super) const SLACK: usize = 16;

/// A string of indices in the output.
#[derive(Clone, Copy, Default)]
struct Place {
    start: u32,
    length: u32,
}

/// Fills `indices` up to [`SLACK`] bytes before its end from the sub-blocks at the start of `data`.
/// `code_bits` is the minimum code size in front of them.
pub(super) fn unpack(data: &[u8], code_bits: u8, indices: &mut [u8]) -> Result<(), MediaError> {
    if code_bits > 11 {
        return Err(corrupt("the code size is out of range"));
    }
    let undefined = || corrupt("a code that is not defined");
    let count = indices.len().saturating_sub(SLACK);
    let mut bits = Bits { data, block: &[], buffer: 0, count: 0 };
    // The first code that is no index: it clears the table.
    let clear = 1 << code_bits;
    let first_width = u32::from(code_bits) + 1;
    let (mut width, mut next) = (first_width, clear + 2);
    let mut table = [Place::default(); TABLE];
    // What the code before this one wrote; nothing after a clear.
    let mut last: Option<Place> = None;
    let mut filled = 0;
    while filled < count {
        let code = bits.read(width)?;
        if code == clear {
            // Right after a clear another one changes nothing, nor does the first of all.
            (width, next, last) = (first_width, clear + 2, None);
            continue;
        }
        if code == clear + 1 {
            return Err(corrupt("the image data ends too early"));
        }
        let start = filled as u32;
        let Some(before) = last else {
            if code > clear {
                return Err(undefined());
            }
            indices[filled] = code as u8;
            filled += 1;
            last = Some(Place { start, length: 1 });
            continue;
        };
        let length = if code < clear {
            indices[filled] = code as u8;
            1
        } else if code < next {
            let place = table[code];
            repeat(indices, filled, place, count);
            place.length
        } else if code == next {
            // The code that is defined right now: the last one and its own first index again.
            repeat(indices, filled, before, count);
            let end = filled + before.length as usize;
            if end < count {
                indices[end] = indices[before.start as usize];
            }
            before.length + 1
        } else {
            return Err(undefined());
        };
        if next < TABLE {
            table[next] = Place { start: before.start, length: before.length + 1 };
            if next == (1 << width) - 1 && width < 12 {
                width += 1;
            }
            next += 1;
        }
        last = Some(Place { start, length });
        filled += length as usize;
    }
    Ok(())
}

/// Copies a string to `filled`, as far as the first `count` indices go.
#[inline(always)]
fn repeat(indices: &mut [u8], filled: usize, place: Place, count: usize) {
    let (start, length) = (place.start as usize, place.length as usize);
    if length <= SLACK {
        // Most strings are short, and a copy of fixed length is quick. What it writes too much is
        // written over later.
        let mut string = [0; SLACK];
        string.copy_from_slice(&indices[start..start + SLACK]);
        indices[filled..filled + SLACK].copy_from_slice(&string);
    } else {
        let length = length.min(count - filled);
        indices.copy_within(start..start + length, filled);
    }
}

/// Codes out of a chain of sub-blocks, least significant bit first.
struct Bits<'a> {
    data: &'a [u8],
    block: &'a [u8],
    buffer: u64,
    count: u32,
}

impl Bits<'_> {
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

    /// Takes what the current block has, and the next block only if that is not enough.
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
            // Pillow reads on behind an empty block, and needs each block as a whole.
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

    /// A clear code and the indices 0, 1 and 2 in three bits each, then 3 and the end code in four
    /// each.
    const CODES: [u8; 3] = [0x44, 0x34, 0x05];

    fn indices(blocks: &[u8]) -> Result<Vec<u8>, MediaError> {
        let mut indices = vec![0; 4 + SLACK];
        unpack(blocks, 2, &mut indices)?;
        indices.truncate(4);
        Ok(indices)
    }

    #[test]
    fn sub_blocks_may_be_of_any_length_even_empty() {
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
    fn data_that_ends_before_the_last_index_is_an_error() {
        let [a, b, c] = CODES;
        for blocks in [&[][..], &[0], &[1, a, 0], &[3, a, b], &[1, a, 9, b, c]] {
            assert!(indices(blocks).is_err(), "{blocks:?}");
        }
    }
}
