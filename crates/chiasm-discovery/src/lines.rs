//! Splitting of a byte stream into lines.

use bytes::{Bytes, BytesMut};

/// The maximum length of a line.
pub(crate) const MAX_LINE_BYTES: usize = 4 << 20;

/// A splitter of byte pieces of any size into lines. Its memory is bounded by the longest line and
/// one piece.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    bytes: BytesMut,
    /// The number of bytes at the front that contain no line break.
    scanned: usize,
}

/// A line is longer than [`MAX_LINE_BYTES`].
#[derive(Debug, PartialEq)]
pub(crate) struct LineTooLong;

impl Lines {
    /// Appends the next piece. The caller must have taken all complete lines.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
    }

    /// Returns the next complete line without its line break. Blank lines are skipped.
    pub(crate) fn next(&mut self) -> Result<Option<Bytes>, LineTooLong> {
        loop {
            let Some(end) = self.bytes[self.scanned..].iter().position(|&byte| byte == b'\n')
            else {
                self.scanned = self.bytes.len();
                return if self.scanned > MAX_LINE_BYTES { Err(LineTooLong) } else { Ok(None) };
            };
            let mut line = self.bytes.split_to(self.scanned + end + 1);
            line.truncate(self.scanned + end);
            self.scanned = 0;
            if line.len() > MAX_LINE_BYTES {
                return Err(LineTooLong);
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line.freeze()));
            }
        }
    }

    /// Returns `true` if there is an incomplete line.
    pub(crate) fn has_rest(&self) -> bool {
        !self.bytes.trim_ascii().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<Bytes>, bool) {
        let mut lines = Lines::default();
        let mut all = Vec::new();
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
        fn piece_sizes_do_not_change_lines(
            text in "[ab\r\n]{0,60}",
            sizes in prop::collection::vec(1_usize..9, 60),
        ) {
            let (whole, rest) = split([text.as_bytes()]);
            let expected: Vec<&str> = text
                .split_inclusive('\n')
                .filter_map(|line| line.strip_suffix('\n'))
                .filter(|line| !line.trim().is_empty())
                .collect();
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
    fn only_line_over_limit_is_refused() {
        let piece = vec![b'a'; 1 << 20];
        let mut lines = Lines::default();
        for _ in 0..4 {
            lines.push(&piece);
            assert_eq!(lines.next(), Ok(None));
        }
        lines.push(b"\n");
        assert_eq!(lines.next().unwrap().unwrap().len(), MAX_LINE_BYTES);
        for _ in 0..4 {
            lines.push(&piece);
        }
        assert_eq!(lines.next(), Ok(None));
        lines.push(b"a");
        assert_eq!(lines.next(), Err(LineTooLong));
        let mut lines = Lines::default();
        lines.push(&vec![b'a'; MAX_LINE_BYTES + 1]);
        lines.push(b"\nb\n");
        assert_eq!(lines.next(), Err(LineTooLong));
    }
}
