//! Boxes: a size, a name and a payload.

use std::ops::Range;

use crate::bytes::{array_at, u32_at, u64_at};
use crate::error::IndexError;

/// A box inside a file.
#[derive(Clone, Debug)]
pub(super) struct Mp4Box {
    pub(super) kind: [u8; 4],
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) header_bytes: usize,
    /// The whole box, header included.
    pub(super) range: Range<usize>,
}

impl Mp4Box {
    /// Returns the range behind the header.
    pub(super) fn body(&self) -> Range<usize> {
        self.start + self.header_bytes..self.end
    }

    /// Returns the bytes behind the header.
    pub(super) fn payload<'a>(&self, file: &'a [u8]) -> &'a [u8] {
        file.get(self.body()).unwrap_or_default()
    }
}

/// Iterates over the boxes of a range. Stops at a box that does not fit.
pub(super) struct Boxes<'a> {
    file: &'a [u8],
    rest: Range<usize>,
}

impl<'a> Boxes<'a> {
    pub(super) fn new(file: &'a [u8], range: Range<usize>) -> Self {
        Self { file, rest: range }
    }

    /// Returns `true` if all boxes so far did fit.
    pub(super) fn is_at_end(&self) -> bool {
        self.rest.len() < 8
    }
}

impl Iterator for Boxes<'_> {
    type Item = Mp4Box;

    fn next(&mut self) -> Option<Mp4Box> {
        let start = self.rest.start;
        if self.rest.len() < 8 {
            return None;
        }
        let (size, header_bytes) = match u32_at(self.file, start)? {
            0 => (self.rest.len(), 8),
            1 => (usize::try_from(u64_at(self.file, start + 8)?).ok()?, 16),
            size => (size as usize, 8),
        };
        let end = start.checked_add(size)?;
        if size < header_bytes || end > self.rest.end {
            return None;
        }
        self.rest.start = end;
        let kind = array_at(self.file, start + 4)?;
        Some(Mp4Box { kind, start, end, header_bytes, range: start..end })
    }
}

/// Returns the first box with a name.
pub(super) fn child(file: &[u8], range: Range<usize>, name: &[u8; 4]) -> Option<Mp4Box> {
    Boxes::new(file, range).find(|found| found.kind == *name)
}

/// Returns the first box at the end of a path of names.
pub(super) fn descendant(file: &[u8], range: Range<usize>, path: &[&[u8; 4]]) -> Option<Mp4Box> {
    let (name, rest) = path.split_first()?;
    let found = child(file, range, name)?;
    if rest.is_empty() { Some(found) } else { descendant(file, found.body(), rest) }
}

/// Returns the number of entries of a table behind its count, at most those that have bytes.
pub(super) fn checked_count(
    body: &[u8],
    count: u32,
    entry_bytes: usize,
    at: usize,
) -> Result<usize, IndexError> {
    let count = usize::try_from(count).map_err(|_| IndexError::Malformed)?;
    let available = body.len().saturating_sub(at) / entry_bytes;
    if count > available { Err(IndexError::Malformed) } else { Ok(count) }
}

/// Returns the entries of a full box that begins with their number.
pub(super) fn rows<'a>(
    body: &'a [u8],
    entry_bytes: usize,
) -> Result<std::slice::ChunksExact<'a, u8>, IndexError> {
    let count = u32_at(body, 4).ok_or(IndexError::Malformed)?;
    let count = checked_count(body, count, entry_bytes, 8)?;
    Ok(body[8..8 + count * entry_bytes].chunks_exact(entry_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_past_the_end_are_left_out() {
        let file = b"\0\0\0\x09free!\0\0\0\x09skip";
        let mut boxes = Boxes::new(file, 0..file.len());
        assert_eq!(boxes.next().unwrap().payload(file), b"!");
        assert!(boxes.next().is_none());
        assert!(!boxes.is_at_end());
    }

    #[test]
    fn size_of_zero_reaches_to_the_end() {
        let file = b"\0\0\0\0mdat...";
        assert_eq!(child(file, 0..file.len(), b"mdat").unwrap().payload(file), b"...");
    }
}
