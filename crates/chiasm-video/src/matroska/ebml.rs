//! EBML (RFC 8794): elements with an id, a size and a payload.

use std::ops::Range;

use crate::error::IndexError;

/// An element.
#[derive(Clone, Debug)]
pub(super) struct Element {
    pub(super) id: u32,
    pub(super) body: Range<usize>,
    /// Set if the element has no size and ends where its parent does, or a sibling begins.
    pub(super) is_unsized: bool,
}

/// Iterates over the elements of a range. The last item is an error if an element does not fit.
pub(super) struct Elements<'a> {
    file: &'a [u8],
    rest: Range<usize>,
}

impl<'a> Elements<'a> {
    pub(super) fn new(file: &'a [u8], range: Range<usize>) -> Self {
        Self { file, rest: range }
    }

    /// Continues with the elements inside `element`, which was returned last.
    pub(super) fn enter(&mut self, element: &Element) {
        self.rest.start = element.body.start;
    }

    fn read(&mut self) -> Option<Element> {
        let (id, id_bytes) = number(self.file, self.rest.start, 4, true)?;
        let at = self.rest.start + id_bytes;
        let (size, size_bytes) = number(self.file, at, 8, false)?;
        let start = at + size_bytes;
        let is_unsized = size == (1u64 << (7 * size_bytes)) - 1;
        let end = if is_unsized {
            self.rest.end
        } else {
            start.checked_add(usize::try_from(size).ok()?)?
        };
        if start > self.rest.end || end > self.rest.end {
            return None;
        }
        self.rest.start = end;
        Some(Element { id: id as u32, body: start..end, is_unsized })
    }
}

impl Iterator for Elements<'_> {
    type Item = Result<Element, IndexError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let element = self.read();
        if element.is_none() {
            self.rest.start = self.rest.end;
        }
        Some(element.ok_or(IndexError::Truncated))
    }
}

/// Reads a number of variable length, of up to `max_bytes`. Returns it and its length.
pub(super) fn number(
    file: &[u8],
    at: usize,
    max_bytes: usize,
    keeps_marker: bool,
) -> Option<(u64, usize)> {
    let first = *file.get(at)?;
    let length = first.leading_zeros() as usize + 1;
    if length > max_bytes {
        return None;
    }
    let bytes = file.get(at..at + length)?;
    let value = bytes.iter().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
    let value = if keeps_marker { value } else { value & ((1u64 << (7 * length)) - 1) };
    Some((value, length))
}

/// Reads an unsigned integer of up to eight bytes.
pub(super) fn unsigned(bytes: &[u8]) -> Option<u64> {
    if bytes.len() > 8 {
        return None;
    }
    Some(bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

/// Reads a number with four or eight bytes.
pub(super) fn float(bytes: &[u8]) -> Option<f64> {
    match bytes.len() {
        4 => bytes.first_chunk().map(|&bytes| f64::from(f32::from_be_bytes(bytes))),
        8 => bytes.first_chunk().map(|&bytes| f64::from_be_bytes(bytes)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_past_the_end_is_truncated() {
        let file = [0xe7, 0x81, 5, 0xe7, 0x82, 5];
        let mut elements = Elements::new(&file, 0..file.len());
        assert_eq!(elements.next().unwrap().unwrap().body, 2..3);
        assert_eq!(elements.next().unwrap().unwrap_err(), IndexError::Truncated);
        assert!(elements.next().is_none());
    }

    #[test]
    fn size_of_ones_is_unknown() {
        let file = [0x1f, 0x43, 0xb6, 0x75, 0xff, 0xe7];
        let element = Elements::new(&file, 0..file.len()).next().unwrap().unwrap();
        assert_eq!((element.id, element.is_unsized, element.body), (0x1f43_b675, true, 5..6));
    }
}
