//! Encoding and decoding of messages and commands.
//!
//! A frame is a byte of flags, its length in one byte or in eight (big-endian), and its body. A
//! message consists of one or more frames; all but the last have the flag [`MORE`]. A command is
//! one frame.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio_util::codec::Decoder;

/// The maximum size of a message to a PULL, over all its frames. Each frame counts 64 bytes more.
pub const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// The maximum size of a message to a SUB or a DEALER. An engine that gets a million tokens at once
/// publishes 16 MiB. A small number takes one byte on the wire and many bytes once it is decoded.
pub const MAX_PUBLISHED_BYTES: usize = 32 << 20;
/// The maximum size of a message to a ROUTER, to which engines only send their handshakes.
pub const MAX_ROUTER_MESSAGE_BYTES: usize = 1 << 20;

/// The bytes that each frame counts towards the limit in addition to its body. They limit the
/// number of empty frames.
const FRAME_OVERHEAD_BYTES: usize = 64;
/// The maximum size of a command.
const MAX_COMMAND_BYTES: usize = 4 << 10;
/// The size below which frames are copied and sent together. Larger frames are sent without a copy.
const MAX_COPIED_BYTES: usize = 4 << 10;
/// The maximum room for the next read: the output of an engine's step for some hundred requests.
const MAX_READ_BYTES: usize = 64 << 10;
/// The minimum room for the next read: the output of a step for one request.
const MIN_READ_BYTES: usize = 8 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// A message or a command from a peer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Incoming {
    Message(Vec<Bytes>),
    Command(Bytes),
}

/// A decoder of messages and commands.
pub(crate) struct FrameDecoder {
    /// The frames of the incomplete message.
    message: Vec<Bytes>,
    /// The number of bytes that the incomplete message may still have.
    remaining_bytes: usize,
    max_message_bytes: usize,
    /// The room for the next read: four times the size of the last message, within limits. Larger
    /// buffers cost time even if they stay empty.
    read_bytes: usize,
}

impl FrameDecoder {
    pub(crate) fn new(max_message_bytes: usize) -> Self {
        Self {
            message: Vec::new(),
            remaining_bytes: max_message_bytes,
            max_message_bytes,
            read_bytes: MIN_READ_BYTES,
        }
    }
}

/// Returns an error for invalid data from a peer.
pub(crate) fn invalid(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// The header of a frame.
struct FrameHeader {
    flags: u8,
    body_bytes: u64,
    header_bytes: usize,
}

impl FrameHeader {
    /// Parses a header; `None` if it is incomplete.
    fn parse(from: &[u8]) -> Option<Self> {
        let (&flags, length) = from.split_first()?;
        if flags & LONG == 0 {
            return Some(Self { flags, body_bytes: u64::from(*length.first()?), header_bytes: 2 });
        }
        let body_bytes = u64::from_be_bytes(*length.first_chunk()?);
        Some(Self { flags, body_bytes, header_bytes: 9 })
    }
}

impl Decoder for FrameDecoder {
    type Item = Incoming;
    type Error = io::Error;

    fn decode(&mut self, from: &mut BytesMut) -> io::Result<Option<Incoming>> {
        loop {
            let Some(FrameHeader { flags, body_bytes, header_bytes }) = FrameHeader::parse(from)
            else {
                if from.capacity() - from.len() < self.read_bytes / 2 {
                    from.reserve(self.read_bytes);
                }
                return Ok(None);
            };
            let is_command = flags & COMMAND != 0;
            let max_bytes = match flags & !(MORE | LONG | COMMAND) {
                0 if is_command && flags & MORE != 0 => {
                    return Err(invalid("a command with several frames"));
                }
                0 if is_command => MAX_COMMAND_BYTES,
                0 => self
                    .remaining_bytes
                    .checked_sub(FRAME_OVERHEAD_BYTES)
                    .ok_or_else(|| invalid("a message with too many frames"))?,
                _ => return Err(invalid("invalid frame flags")),
            };
            let length = usize::try_from(body_bytes)
                .ok()
                .filter(|&length| length <= max_bytes)
                .ok_or_else(|| invalid("a message or command that is too large"))?;
            if from.len() < header_bytes + length {
                // The buffer grows with the bytes that have arrived, so that a frame that is only
                // announced takes no memory.
                let missing = header_bytes + length - from.len();
                from.reserve(missing.min(from.len().max(MAX_READ_BYTES)));
                return Ok(None);
            }
            from.advance(header_bytes);
            let body = from.split_to(length).freeze();
            if is_command {
                return Ok(Some(Incoming::Command(body)));
            }
            self.message.push(body);
            self.remaining_bytes = max_bytes - length;
            if flags & MORE == 0 {
                let bytes = self.max_message_bytes - self.remaining_bytes;
                self.read_bytes = bytes.saturating_mul(4).clamp(MIN_READ_BYTES, MAX_READ_BYTES);
                self.remaining_bytes = self.max_message_bytes;
                return Ok(Some(Incoming::Message(std::mem::take(&mut self.message))));
            }
        }
    }
}

/// Encodes a message as non-empty pieces. Small frames are copied into one piece; large
/// frames are pieces of their own.
pub(crate) fn encode_message(frames: Vec<Bytes>) -> Vec<Bytes> {
    let mut pieces = Vec::new();
    let mut small = BytesMut::new();
    let last = frames.len().saturating_sub(1);
    for (index, frame) in frames.into_iter().enumerate() {
        put_header(&mut small, if index < last { MORE } else { 0 }, frame.len());
        if frame.len() < MAX_COPIED_BYTES {
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

/// Encodes a command.
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

    fn decode(bytes: &[u8]) -> io::Result<Option<Incoming>> {
        FrameDecoder::new(LIMIT).decode(&mut BytesMut::from(bytes))
    }

    fn encode(frames: Vec<Bytes>) -> Vec<u8> {
        let pieces = encode_message(frames);
        assert!(pieces.iter().all(|piece| !piece.is_empty()));
        pieces.concat()
    }

    #[test]
    fn frames_match_the_specification() {
        assert_eq!(encode(vec!["ab".into(), Bytes::new()]), b"\x01\x02ab\x00\x00");
        let long = encode(vec![vec![7; 256].into()]);
        assert_eq!(long[..9], *b"\x02\0\0\0\0\0\0\x01\0");
        assert_eq!(decode(b"\x04\x03\x01AB").unwrap(), Some(Incoming::Command("\x01AB".into())));
        assert_eq!(
            decode(b"\x01\x02ab\x00\x00").unwrap(),
            Some(Incoming::Message(vec!["ab".into(), Bytes::new()]))
        );
    }

    #[test]
    fn announced_bytes_take_no_memory() {
        let mut decoder = FrameDecoder::new(MAX_MESSAGE_BYTES);
        let mut from = BytesMut::from(&b"\x02\0\0\0\0\x3f\0\0\0"[..]);
        assert_eq!(decoder.decode(&mut from).unwrap(), None);
        assert!(from.capacity() < 1 << 20, "{}", from.capacity());
    }

    #[test]
    fn too_large_frames_are_refused() {
        for header in [
            &b"\x02\x10\0\0\0\0\0\0\0"[..],
            b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x02\0\0\0\0\0\0\x03\xe9",
            b"\x06\0\0\0\0\0\0\x10\x01",
            b"\x05\x01",
            b"\x08\x01",
        ] {
            assert!(decode(header).is_err(), "{header:?}");
        }
        // The limit covers all frames of a message, and empty frames count as well.
        let whole = encode(vec![vec![1; LIMIT - 2 * FRAME_OVERHEAD_BYTES].into(), Bytes::new()]);
        assert!(decode(&whole).unwrap().is_some());
        let too_large =
            encode(vec![vec![1; LIMIT - 2 * FRAME_OVERHEAD_BYTES + 1].into(), Bytes::new()]);
        assert!(decode(&too_large).is_err());
        assert!(decode(&[1, 0].repeat(LIMIT)).is_err());
    }

    #[test]
    fn each_message_has_the_whole_limit() {
        let mut decoder = FrameDecoder::new(LIMIT);
        let one = encode(vec![vec![1; 900].into()]);
        let mut from = BytesMut::from(&one.repeat(3)[..]);
        for _ in 0..3 {
            assert!(decoder.decode(&mut from).unwrap().is_some());
        }
    }

    /// Messages of up to three frames.
    fn messages() -> impl Strategy<Value = Vec<Vec<Vec<u8>>>> {
        let frame = prop::collection::vec(any::<u8>(), 0..600);
        prop::collection::vec(prop::collection::vec(frame, 1..4), 1..5)
    }

    proptest! {
        #[test]
        fn encoded_messages_decode_to_themselves(
            messages in messages(),
            large in 0_usize..9000,
            step in 1_usize..2000,
        ) {
            let to_frames = |message: Vec<Vec<u8>>| -> Vec<Bytes> {
                message.into_iter().map(Bytes::from).collect()
            };
            let mut messages: Vec<Vec<Bytes>> = messages.into_iter().map(to_frames).collect();
            messages[0].push(vec![3; large].into());
            let bytes: Vec<u8> =
                messages.iter().flat_map(|message| encode(message.clone())).collect();
            let mut decoder = FrameDecoder::new(1 << 20);
            let mut from = BytesMut::new();
            let mut decoded = Vec::new();
            for piece in bytes.chunks(step) {
                from.extend_from_slice(piece);
                while let Some(incoming) = decoder.decode(&mut from).unwrap() {
                    let Incoming::Message(message) = incoming else {
                        panic!("no command was sent")
                    };
                    decoded.push(message);
                }
            }
            prop_assert_eq!(decoded, messages);
            prop_assert!(from.is_empty());
        }

        #[test]
        fn random_bytes_are_decoded_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let mut decoder = FrameDecoder::new(LIMIT);
            let mut from = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = decoder.decode(&mut from) {}
            prop_assert!(from.capacity() < 4 * MAX_READ_BYTES);
        }
    }
}
