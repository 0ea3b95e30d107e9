//! Messages and commands as bytes.
//!
//! A frame is a byte of flags, its length in one byte or in eight (big-endian), and its body. A
//! message is one frame or several, all but the last with [`MORE`]; a command is one frame.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio_util::codec::Decoder;

/// The most bytes of one message, its frames together. Each frame counts as 64 more.
pub const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// The same of what is published, and of answers to a DEALER: an engine that is told of a million
/// tokens at once says 16 MiB of it. A small number takes one byte there and many where it is
/// understood.
pub const MAX_PUBLISHED_BYTES: usize = 32 << 20;
/// The same of a message to a ROUTER, where engines only say of themselves what they are.
pub const MAX_QUESTION_BYTES: usize = 1 << 20;

/// What a frame costs beside its body, so that a message of empty frames has an end.
const FRAME_COSTS: usize = 64;
/// The most bytes of one command.
const MAX_COMMAND_BYTES: usize = 4 << 10;
/// Frames below this many bytes are copied to be sent together; others are sent from where they
/// are.
const SMALL: usize = 4 << 10;
/// Room for what comes next, at most and at least: what an engine says in a step for some hundred
/// requests, and for one.
const READ: usize = 64 << 10;
const LEAST_ROOM: usize = 8 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What a peer says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Message(Vec<Bytes>),
    Command(Bytes),
}

/// Reads what a peer says.
pub(crate) struct Frames {
    /// Frames of the message that is not complete.
    message: Vec<Bytes>,
    /// How many bytes may still come of it.
    left: usize,
    max_message_bytes: usize,
    /// Bytes that are read at once: what is like the last message fits in half of them, as memory
    /// for more costs time even if it stays empty.
    room: usize,
}

impl Frames {
    pub(crate) fn new(max_message_bytes: usize) -> Self {
        Self { message: Vec::new(), left: max_message_bytes, max_message_bytes, room: LEAST_ROOM }
    }
}

pub(crate) fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The flags and the length of a frame, and how many bytes have told them; `None` while they are
/// not all there.
fn header(from: &[u8]) -> Option<(u8, u64, usize)> {
    let (&flags, length) = from.split_first()?;
    if flags & LONG == 0 {
        return Some((flags, u64::from(*length.first()?), 2));
    }
    Some((flags, u64::from_be_bytes(*length.first_chunk()?), 9))
}

impl Decoder for Frames {
    type Item = Said;
    type Error = io::Error;

    fn decode(&mut self, from: &mut BytesMut) -> io::Result<Option<Said>> {
        loop {
            let Some((flags, length, header)) = header(from) else {
                if from.capacity() - from.len() < self.room / 2 {
                    from.reserve(self.room);
                }
                return Ok(None);
            };
            let is_command = flags & COMMAND != 0;
            let most = match flags & !(MORE | LONG | COMMAND) {
                0 if is_command && flags & MORE != 0 => {
                    return Err(invalid("a command of several frames"));
                }
                0 if is_command => MAX_COMMAND_BYTES,
                0 => self
                    .left
                    .checked_sub(FRAME_COSTS)
                    .ok_or_else(|| invalid("a message of too many frames"))?,
                _ => return Err(invalid("flags that no frame has")),
            };
            let length = usize::try_from(length)
                .ok()
                .filter(|&length| length <= most)
                .ok_or_else(|| invalid("a message or command of too many bytes"))?;
            if from.len() < header + length {
                // Room grows by as much as has come: what is only announced costs nothing.
                let missing = header + length - from.len();
                from.reserve(missing.min(from.len().max(READ)));
                return Ok(None);
            }
            from.advance(header);
            let body = from.split_to(length).freeze();
            if is_command {
                return Ok(Some(Said::Command(body)));
            }
            self.message.push(body);
            self.left = most - length;
            if flags & MORE == 0 {
                let bytes = self.max_message_bytes - self.left;
                self.room = bytes.saturating_mul(4).clamp(LEAST_ROOM, READ);
                self.left = self.max_message_bytes;
                return Ok(Some(Said::Message(std::mem::take(&mut self.message))));
            }
        }
    }
}

/// The pieces of a message, none of them empty: small frames together, large ones as they are.
pub(crate) fn put_message(frames: Vec<Bytes>) -> Vec<Bytes> {
    let (mut pieces, mut small) = (Vec::new(), BytesMut::new());
    let last = frames.len().saturating_sub(1);
    for (index, frame) in frames.into_iter().enumerate() {
        put_header(&mut small, if index < last { MORE } else { 0 }, frame.len());
        if frame.len() < SMALL {
            small.put_slice(&frame);
        } else {
            pieces.push(small.split().freeze());
            pieces.push(frame);
        }
    }
    if !small.is_empty() {
        pieces.push(small.freeze());
    }
    pieces
}

pub(crate) fn put_command(to: &mut BytesMut, command: &[u8]) {
    put_header(to, COMMAND, command.len());
    to.put_slice(command);
}

fn put_header(to: &mut BytesMut, flags: u8, length: usize) {
    if let Ok(length) = u8::try_from(length) {
        to.put_slice(&[flags, length]);
    } else {
        to.put_u8(flags | LONG);
        to.put_u64(length as u64);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 1000;

    fn said(bytes: &[u8]) -> io::Result<Option<Said>> {
        Frames::new(LIMIT).decode(&mut BytesMut::from(bytes))
    }

    fn written(frames: Vec<Bytes>) -> Vec<u8> {
        let pieces = put_message(frames);
        assert!(pieces.iter().all(|piece| !piece.is_empty()));
        pieces.concat()
    }

    #[test]
    fn frames_have_the_bytes_of_the_specification() {
        assert_eq!(written(vec!["ab".into(), Bytes::new()]), b"\x01\x02ab\x00\x00");
        let long = written(vec![vec![7; 256].into()]);
        assert_eq!(long[..9], *b"\x02\0\0\0\0\0\0\x01\0");
        assert_eq!(said(b"\x04\x03\x01AB").unwrap(), Some(Said::Command("\x01AB".into())));
        assert_eq!(
            said(b"\x01\x02ab\x00\x00").unwrap(),
            Some(Said::Message(vec!["ab".into(), Bytes::new()]))
        );
    }

    #[test]
    fn what_is_announced_takes_no_memory() {
        let mut frames = Frames::new(MAX_MESSAGE_BYTES);
        let mut from = BytesMut::from(&b"\x02\0\0\0\0\x3f\0\0\0"[..]);
        assert_eq!(frames.decode(&mut from).unwrap(), None);
        assert!(from.capacity() < 1 << 20, "{}", from.capacity());
    }

    #[test]
    fn nothing_is_too_large() {
        for header in [
            &b"\x02\x10\0\0\0\0\0\0\0"[..],
            b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x02\0\0\0\0\0\0\x03\xe9",
            b"\x06\0\0\0\0\0\0\x10\x01",
            b"\x05\x01",
            b"\x08\x01",
        ] {
            assert!(said(header).is_err(), "{header:?}");
        }
        // Frames count together, and those with nothing in them count too.
        let whole = written(vec![vec![1; LIMIT - 2 * FRAME_COSTS].into(), Bytes::new()]);
        assert!(said(&whole).unwrap().is_some());
        assert!(
            said(&written(vec![vec![1; LIMIT - 2 * FRAME_COSTS + 1].into(), Bytes::new()]))
                .is_err()
        );
        assert!(said(&[1, 0].repeat(LIMIT)).is_err());
    }

    #[test]
    fn each_message_has_the_whole_limit() {
        let mut frames = Frames::new(LIMIT);
        let one = written(vec![vec![1; 900].into()]);
        let mut from = BytesMut::from(&one.repeat(3)[..]);
        for _ in 0..3 {
            assert!(frames.decode(&mut from).unwrap().is_some());
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            messages in prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 1..4), 1..5),
            large in 0_usize..9000,
            step in 1_usize..2000,
        ) {
            let mut messages: Vec<Vec<Bytes>> =
                messages.into_iter().map(|message| message.into_iter().map(Bytes::from).collect()).collect();
            messages[0].push(vec![3; large].into());
            let bytes: Vec<u8> = messages.iter().flat_map(|message| written(message.clone())).collect();
            let (mut frames, mut from, mut read) = (Frames::new(1 << 20), BytesMut::new(), Vec::new());
            for piece in bytes.chunks(step) {
                from.extend_from_slice(piece);
                while let Some(said) = frames.decode(&mut from).unwrap() {
                    let Said::Message(message) = said else { panic!("no command was sent") };
                    read.push(message);
                }
            }
            prop_assert_eq!(read, messages);
            prop_assert!(from.is_empty());
        }

        #[test]
        fn nonsense_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let (mut frames, mut from) = (Frames::new(LIMIT), BytesMut::from(&bytes[..]));
            while let Ok(Some(_)) = frames.decode(&mut from) {}
            prop_assert!(from.capacity() < 4 * READ);
        }
    }
}
