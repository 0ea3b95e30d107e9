//! Parses a stream of server-sent events into the data of each event.

use bytes::BytesMut;
use chiasm_backend::{PartialMessage, PartialMessages};

/// The maximum size of one event. A server may return a prompt of a million tokens in one event.
const MAX_EVENT_BYTES: usize = 32 << 20;

/// An event exceeds [`MAX_EVENT_BYTES`], or the server's partial events together take too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

/// The parser of one stream.
#[derive(Debug)]
pub(crate) struct Events {
    buffer: BytesMut,
    /// The length of the part of `buffer` that has been searched for a line end.
    scanned: usize,
    partial: PartialMessage,
}

impl Events {
    /// Creates a parser whose long partial events count against `partial`.
    pub(crate) fn new(partial: &PartialMessages) -> Self {
        Self { buffer: BytesMut::new(), scanned: 0, partial: partial.start_message() }
    }

    /// Appends received bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        let length = self.buffer.len() + bytes.len();
        if length > MAX_EVENT_BYTES || !self.partial.set_buffered_bytes(length) {
            return Err(TooLong);
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the data of the next complete event.
    ///
    /// Lines without data are skipped, such as comments that keep a connection alive. Data of
    /// several lines is returned as several events; no known server sends such data.
    pub(crate) fn next(&mut self) -> Option<BytesMut> {
        loop {
            let line_end = self.buffer[self.scanned..].iter().position(|byte| *byte == b'\n');
            let Some(line_end) = line_end else {
                self.scanned = self.buffer.len();
                return None;
            };
            let end = self.scanned + line_end;
            let mut line = self.buffer.split_to(end + 1);
            self.scanned = 0;
            // Shrinking the buffer is always within the limit.
            let _ = self.partial.set_buffered_bytes(self.buffer.len());
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
    fn data_does_not_depend_on_how_the_stream_is_cut() {
        let text = b": alive\n\ndata: {\"a\": 1}\n\ndata:two\r\n\r\nevent: x\ndata: [DONE]\n\n";
        for size in 1..text.len() {
            let mut events = Events::new(&PartialMessages::default());
            let mut found = Vec::new();
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
    fn event_over_the_size_limit_is_refused() {
        let mut events = Events::new(&PartialMessages::default());
        let piece = vec![b'x'; 1 << 20];
        let refused =
            (0..64).map(|_| events.push(&piece)).position(|pushed| pushed == Err(TooLong));
        assert_eq!(refused, Some(32));
        assert!(events.next().is_none());
    }

    #[test]
    fn partial_events_count_until_they_are_complete() {
        let partial = PartialMessages::default();
        let piece = vec![b'x'; 30 << 20];
        let mut all: Vec<_> = (0..9).map(|_| Events::new(&partial)).collect();
        let accepted =
            all.iter_mut().map(|events| events.push(&piece)).take_while(Result::is_ok).count();
        assert_eq!(accepted, 8);
        all[8] = Events::new(&partial);
        assert_eq!(all[8].push(b"data: x\n"), Ok(()), "short events are always accepted");
        assert_eq!(all[8].next().as_deref(), Some(&b"x"[..]));
        all[0].push(b"\n").unwrap();
        assert!(all[0].next().is_none());
        assert_eq!(all[8].push(&piece), Ok(()));
    }
}
