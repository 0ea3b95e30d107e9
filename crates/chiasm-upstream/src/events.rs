//! The stream of server-sent events, cut into its data.

use bytes::BytesMut;
use chiasm_backend::{Begun, BegunPart};

/// Most bytes of one event: a prompt of a million tokens is told back in one.
const MOST: usize = 32 << 20;

/// A server sends an event that is longer than any that is expected, or too many long ones at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

/// Bytes that have come, and how far they were looked at.
#[derive(Debug)]
pub(crate) struct Events {
    came: BytesMut,
    looked: usize,
    begun: BegunPart,
}

impl Events {
    /// None yet. What has come of a long one is counted in `begun`.
    pub(crate) fn counted(begun: &Begun) -> Self {
        Self { came: BytesMut::new(), looked: 0, begun: begun.part() }
    }

    /// Takes in what has come.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        let length = self.came.len() + bytes.len();
        if length > MOST || !self.begun.has_room_for(length) {
            return Err(TooLong);
        }
        self.came.extend_from_slice(bytes);
        Ok(())
    }

    /// The data of the next event that has come whole. Lines that are no data, such as comments
    /// that keep a connection alive, are passed over; data of several lines, which no server that
    /// is known sends, is several.
    pub(crate) fn next(&mut self) -> Option<BytesMut> {
        loop {
            let end = self.looked
                + self.came[self.looked..].iter().position(|byte| *byte == b'\n').or_else(
                    || {
                        self.looked = self.came.len();
                        None
                    },
                )?;
            let mut line = self.came.split_to(end + 1);
            self.looked = 0;
            // There is less now, which there is room for.
            let _ = self.begun.has_room_for(self.came.len());
            line.truncate(end);
            if line.ends_with(b"\r") {
                line.truncate(end - 1);
            }
            if line.starts_with(b"data:") {
                let skipped = if line.starts_with(b"data: ") { 6 } else { 5 };
                return Some(line.split_off(skipped));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_the_same_wherever_the_stream_is_cut() {
        let text = b": alive\n\ndata: {\"a\": 1}\n\ndata:two\r\n\r\nevent: x\ndata: [DONE]\n\n";
        for size in 1..text.len() {
            let (mut events, mut found) = (Events::counted(&Begun::default()), Vec::new());
            for piece in text.chunks(size) {
                events.push(piece).unwrap();
                while let Some(data) = events.next() {
                    found.push(data);
                }
            }
            assert_eq!(found, [&b"{\"a\": 1}"[..], b"two", b"[DONE]"], "{size}");
        }
    }

    #[test]
    fn an_event_without_an_end_is_given_up() {
        let mut events = Events::counted(&Begun::default());
        let piece = vec![b'x'; 1 << 20];
        let refused =
            (0..64).map(|_| events.push(&piece)).position(|pushed| pushed == Err(TooLong));
        assert_eq!(refused, Some(32));
        assert!(events.next().is_none());
    }

    #[test]
    fn an_event_counts_until_it_has_come() {
        let begun = Begun::default();
        let piece = vec![b'x'; 30 << 20];
        let mut all: Vec<_> = (0..9).map(|_| Events::counted(&begun)).collect();
        let taken =
            all.iter_mut().map(|events| events.push(&piece)).take_while(Result::is_ok).count();
        assert_eq!(taken, 8);
        all[8] = Events::counted(&begun);
        assert_eq!(all[8].push(b"data: x\n"), Ok(()), "short ones are not kept from anybody");
        assert_eq!(all[8].next().as_deref(), Some(&b"x"[..]));
        all[0].push(b"\n").unwrap();
        assert!(all[0].next().is_none());
        assert_eq!(all[8].push(&piece), Ok(()));
    }
}
