//! A stream's bytes as lines.

use bytes::{Bytes, BytesMut};

/// The most bytes of one line.
pub(crate) const LONGEST_LINE: usize = 4 << 20;

/// Splits bytes that come in pieces of any size into lines. What it holds is bounded by the longest
/// line and one piece.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    bytes: BytesMut,
    /// How many bytes at the front are known to have no end of a line.
    scanned: usize,
}

/// A line is longer than [`LONGEST_LINE`].
#[derive(Debug, PartialEq)]
pub(crate) struct TooLong;

impl Lines {
    /// Takes the next piece. All lines that were complete have to be taken before.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
    }

    /// The next complete line with something in it, without its end.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, TooLong> {
        loop {
            let Some(end) = self.bytes[self.scanned..].iter().position(|&byte| byte == b'\n')
            else {
                self.scanned = self.bytes.len();
                return if self.scanned > LONGEST_LINE { Err(TooLong) } else { Ok(None) };
            };
            let mut line = self.bytes.split_to(self.scanned + end + 1);
            line.truncate(self.scanned + end);
            self.scanned = 0;
            if line.len() > LONGEST_LINE {
                return Err(TooLong);
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line.freeze()));
            }
        }
    }

    /// Whether a line has begun and not ended.
    pub(crate) fn has_rest(&self) -> bool {
        !self.bytes.trim_ascii().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Bytes>, bool) {
        let (mut lines, mut all) = (Lines::default(), Vec::new());
        for piece in pieces {
            lines.push(piece);
            while let Some(line) = lines.next().unwrap() {
                all.push(line);
            }
        }
        (all, lines.has_rest())
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_make_the_same_lines(text in "[ab\r\n]{0,60}", sizes in prop::collection::vec(1_usize..9, 60)) {
            let (whole, rest) = split([text.as_bytes()]);
            let expected: Vec<&str> = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')).collect();
            let expected: Vec<&str> = expected.into_iter().filter(|line| !line.trim().is_empty()).collect();
            prop_assert_eq!(&whole, &expected);
            let mut left = text.as_bytes();
            let pieces = sizes.iter().map_while(|&size| {
                let (piece, others) = left.split_at(size.min(left.len()));
                left = others;
                (!piece.is_empty()).then_some(piece)
            });
            prop_assert_eq!(split(pieces), (whole, rest));
        }
    }

    #[test]
    fn a_line_without_end_is_refused_and_one_that_is_just_short_enough_is_not() {
        let piece = vec![b'a'; 1 << 20];
        let mut lines = Lines::default();
        for _ in 0..4 {
            lines.push(&piece);
            assert_eq!(lines.next(), Ok(None));
        }
        lines.push(b"\n");
        assert_eq!(lines.next().unwrap().unwrap().len(), LONGEST_LINE);
        for _ in 0..4 {
            lines.push(&piece);
        }
        assert_eq!(lines.next(), Ok(None));
        lines.push(b"a");
        assert_eq!(lines.next(), Err(TooLong));
        let mut lines = Lines::default();
        lines.push(&vec![b'a'; LONGEST_LINE + 1]);
        lines.push(b"\nb\n");
        assert_eq!(lines.next(), Err(TooLong));
    }
}
