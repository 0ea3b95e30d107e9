//! GIF's variant of LZW, with Pillow's leniency.

use super::corrupt;
use crate::MediaError;

/// Codes have at most twelve bits.
const TABLE: usize = 1 << 12;

/// The palette indices of a frame, in stored order.
pub(super) struct Indices<'a> {
    bits: Bits<'a>,
    /// The first code that is no index: it clears the table.
    clear: usize,
    width: u32,
    /// The next code to define.
    next: usize,
    /// For each defined code the code of all but its last index, and that index.
    prefix: Box<[u16; TABLE]>,
    suffix: Box<[u8; TABLE]>,
    /// The code before this one, and the first index it stands for; `None` after a clear.
    last: Option<(usize, u8)>,
    /// Indices of the current code that are still to come, in reverse.
    pending: Vec<u8>,
}

impl<'a> Indices<'a> {
    /// Reads sub-blocks at the start of `data`; `code_bits` is the minimum code size in front of them.
    pub(super) fn new(data: &'a [u8], code_bits: u8) -> Result<Self, MediaError> {
        if code_bits > 11 {
            return Err(corrupt("the code size is out of range"));
        }
        let clear = 1 << code_bits;
        Ok(Self {
            bits: Bits { data, block: &[], buffer: 0, count: 0 },
            clear,
            width: u32::from(code_bits) + 1,
            next: clear + 2,
            prefix: Box::new([0; TABLE]),
            suffix: Box::new([0; TABLE]),
            last: None,
            pending: Vec::new(),
        })
    }

    /// Reads the next `row.len()` indices.
    pub(super) fn fill(&mut self, row: &mut [u8]) -> Result<(), MediaError> {
        let mut filled = 0;
        while filled < row.len() {
            match self.pending.pop() {
                Some(index) => {
                    row[filled] = index;
                    filled += 1;
                }
                None => self.decode_code()?,
            }
        }
        Ok(())
    }

    fn decode_code(&mut self) -> Result<(), MediaError> {
        let code = self.bits.read(self.width)?;
        if code == self.clear {
            // Right after a clear another one changes nothing, nor does the first of all.
            self.width = self.clear.trailing_zeros() + 1;
            self.next = self.clear + 2;
            self.last = None;
            return Ok(());
        }
        if code == self.clear + 1 {
            return Err(corrupt("the image data ends too early"));
        }
        let Some((last, last_first)) = self.last else {
            if code > self.clear {
                return Err(corrupt("a code that is not defined"));
            }
            self.pending.push(code as u8);
            self.last = Some((code, code as u8));
            return Ok(());
        };
        let mut walk = code;
        if code > self.next {
            return Err(corrupt("a code that is not defined"));
        }
        if code == self.next {
            // The code that is defined right now: the last one and its own first index again.
            self.pending.push(last_first);
            walk = last;
        }
        while walk >= self.clear {
            if walk >= TABLE || self.pending.len() >= TABLE {
                return Err(corrupt("a code that is not defined"));
            }
            self.pending.push(self.suffix[walk]);
            walk = usize::from(self.prefix[walk]);
        }
        let first = walk as u8;
        self.pending.push(first);
        if self.next < TABLE {
            self.prefix[self.next] = last as u16;
            self.suffix[self.next] = first;
            if self.next == (1 << self.width) - 1 && self.width < 12 {
                self.width += 1;
            }
            self.next += 1;
        }
        self.last = Some((code, first));
        Ok(())
    }
}

/// Codes out of a chain of sub-blocks, least significant bit first.
struct Bits<'a> {
    data: &'a [u8],
    block: &'a [u8],
    buffer: u32,
    count: u32,
}

impl Bits<'_> {
    fn read(&mut self, width: u32) -> Result<usize, MediaError> {
        while self.count < width {
            while self.block.is_empty() {
                // Pillow reads on behind an empty block, and needs each block as a whole.
                let (&length, rest) = self.data.split_first().ok_or(corrupt("the image data ends too early"))?;
                (self.block, self.data) =
                    rest.split_at_checked(length.into()).ok_or(corrupt("the image data ends too early"))?;
            }
            self.buffer |= u32::from(self.block[0]) << self.count;
            self.count += 8;
            self.block = &self.block[1..];
        }
        let code = self.buffer & ((1 << width) - 1);
        self.buffer >>= width;
        self.count -= width;
        Ok(code as usize)
    }
}
