//! The stream of server-sent events, cut into its data.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::BytesMut;

/// Most bytes of one event: a prompt of a million tokens is told back in one.
const MOST: usize = 32 << 20;
/// Most bytes of all events of one server that have begun and not ended, of which those up to [`FREE`] bytes count as nothing: a server
/// that begins them and says no more must not take all memory with the requests that it is given.
const MOST_BEGUN: usize = 256 << 20;
/// More than nearly all events have.
const FREE: usize = 64 << 10;

/// A server sends an event that is longer than any that is expected, or too many long ones at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

/// Bytes of long events that a server has begun, in all of its answers. Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Begun(Arc<AtomicUsize>);

/// Bytes that have come, and how far they were looked at.
#[derive(Debug)]
pub(crate) struct Events {
    came: BytesMut,
    looked: usize,
    begun: Begun,
    /// How many bytes of `came` are counted there.
    counted: usize,
}

impl Events {
    /// None yet. What has come of a long one is counted in `begun`.
    pub(crate) fn counted(begun: Begun) -> Self {
        Self { came: BytesMut::new(), looked: 0, begun, counted: 0 }
    }

    /// Takes in what has come.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        let length = self.came.len() + bytes.len();
        if length > MOST {
            return Err(TooLong);
        }
        let more = length.saturating_sub(FREE).saturating_sub(self.counted);
        if more > 0 {
            self.counted += more;
            if self.begun.0.fetch_add(more, Relaxed) + more > MOST_BEGUN {
                return Err(TooLong);
            }
        }
        self.came.extend_from_slice(bytes);
        Ok(())
    }

    /// Counts no more than is there.
    fn uncount(&mut self) {
        let less = self.counted.saturating_sub(self.came.len().saturating_sub(FREE));
        if less > 0 {
            self.begun.0.fetch_sub(less, Relaxed);
            self.counted -= less;
        }
    }

    /// The data of the next event that has come whole. Lines that are no data, such as comments that keep a connection alive, are
    /// passed over; data of several lines, which no server that is known sends, is several.
    pub(crate) fn next(&mut self) -> Option<BytesMut> {
        loop {
            let end = self.looked
                + self.came[self.looked..].iter().position(|byte| *byte == b'\n').or_else(|| {
                    self.looked = self.came.len();
                    None
                })?;
            let mut line = self.came.split_to(end + 1);
            self.looked = 0;
            self.uncount();
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

impl Drop for Events {
    fn drop(&mut self) {
        self.begun.0.fetch_sub(self.counted, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_the_same_wherever_the_stream_is_cut() {
        let text = b": alive\n\ndata: {\"a\": 1}\n\ndata:two\r\n\r\nevent: x\ndata: [DONE]\n\n";
        for size in 1..text.len() {
            let (mut events, mut found) = (Events::counted(Begun::default()), Vec::new());
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
        let mut events = Events::counted(Begun::default());
        let piece = vec![b'x'; 1 << 20];
        let refused = (0..64).map(|_| events.push(&piece)).position(|pushed| pushed == Err(TooLong));
        assert_eq!(refused, Some(32));
        assert!(events.next().is_none());
    }

    #[test]
    fn long_events_of_one_server_are_bounded_together() {
        let (begun, piece) = (Begun::default(), vec![b'x'; 30 << 20]);
        let all: Vec<_> = (0..9)
            .map(|_| {
                let mut events = Events::counted(begun.clone());
                let pushed = events.push(&piece);
                (events, pushed)
            })
            .collect();
        let taken = all.iter().take_while(|(_, pushed)| pushed.is_ok()).count();
        assert_eq!(taken, MOST_BEGUN / piece.len());
        let mut usual = Events::counted(begun.clone());
        assert_eq!(usual.push(b"data: x\n"), Ok(()), "short ones are not kept from anybody");
        assert_eq!(usual.next().as_deref(), Some(&b"x"[..]));
        drop(all);
        let mut long = Events::counted(begun.clone());
        long.push(&piece).unwrap();
        long.push(b"\n").unwrap();
        assert!(begun.0.load(Relaxed) > 0 && long.next().is_none());
        assert_eq!(begun.0.load(Relaxed), 0);
    }
}
