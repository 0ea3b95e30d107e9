//! The frames of Dynamo's TCP plane: requests to a worker, their acknowledgements, and the two-part
//! messages of an answer.
//!
//! ```text
//! request         path length: u16  path  headers length: u16  headers as JSON
//!                 payload length: u32  payload
//! acknowledgement length: u32  empty, or the reason of a refusal
//! two-part        header length: u64  body length: u64  checksum: u64, 0 for none  header  body
//! ```
//!
//! All numbers are big-endian. Checked against workers of Dynamo 1.6.1.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// The number of bytes of a two-part message before its header.
const TWO_PART_PREFIX_BYTES: usize = 24;

/// An error of a malformed message, or of a request that can't be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    /// A message is longer than its bounds.
    #[error("a message of {0} bytes exceeds the limit")]
    TooLong(u64),
    /// A request is longer than the plane's fields can express.
    #[error("a request of {0} bytes exceeds 4 GiB")]
    TooMuch(usize),
}

/// The maximum sizes of a two-part message, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) header: u64,
    pub(crate) body: u64,
}

/// A message of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TwoPart {
    pub(crate) header: Bytes,
    pub(crate) body: Bytes,
}

impl TwoPart {
    /// Encodes a message.
    pub(crate) fn encode(header: &[u8], body: &[u8]) -> BytesMut {
        let mut bytes = BytesMut::with_capacity(TWO_PART_PREFIX_BYTES + header.len() + body.len());
        bytes.put_u64(header.len() as u64);
        bytes.put_u64(body.len() as u64);
        bytes.put_u64(0);
        bytes.put_slice(header);
        bytes.put_slice(body);
        bytes
    }

    /// Decodes a message from the front of `buffer`; `None` if it is incomplete. The lengths are
    /// checked against `bounds` before memory is reserved for them.
    pub(crate) fn decode(
        buffer: &mut BytesMut,
        bounds: Bounds,
    ) -> Result<Option<Self>, FrameError> {
        let Some(mut prefix) = buffer.get(..TWO_PART_PREFIX_BYTES) else { return Ok(None) };
        let header_length = prefix.get_u64();
        let body_length = prefix.get_u64();
        if header_length > bounds.header || body_length > bounds.body {
            return Err(FrameError::TooLong(header_length.saturating_add(body_length)));
        }
        // Both fit: the bounds are far below the address space.
        let header_length = header_length as usize;
        let body_length = body_length as usize;
        let length = TWO_PART_PREFIX_BYTES + header_length + body_length;
        if buffer.len() < length {
            // At most the announced length, and in small steps.
            buffer.reserve((length - buffer.len()).min(1 << 20));
            return Ok(None);
        }
        buffer.advance(TWO_PART_PREFIX_BYTES);
        let header = buffer.split_to(header_length).freeze();
        Ok(Some(Self { header, body: buffer.split_to(body_length).freeze() }))
    }
}

/// Encodes a request for the endpoint at `path` of a worker.
pub(crate) fn request(path: &str, payload: &[u8]) -> Result<BytesMut, FrameError> {
    /// Requests have no headers.
    const HEADERS: &[u8] = b"{}";
    let too_long = |_| FrameError::TooMuch(path.len().saturating_add(payload.len()));
    let path_length = u16::try_from(path.len()).map_err(too_long)?;
    let payload_length = u32::try_from(payload.len()).map_err(too_long)?;
    let mut bytes = BytesMut::with_capacity(8 + HEADERS.len() + path.len() + payload.len());
    bytes.put_u16(path_length);
    bytes.put_slice(path.as_bytes());
    bytes.put_u16(HEADERS.len() as u16);
    bytes.put_slice(HEADERS);
    bytes.put_u32(payload_length);
    bytes.put_slice(payload);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { header: 100, body: 1000 };

    #[test]
    fn message_is_decoded_once_complete() {
        let mut all = TwoPart::encode(br#""sentinel""#, b"");
        all.extend(TwoPart::encode(b"", b"body"));
        let first = TwoPart { header: Bytes::from_static(br#""sentinel""#), body: Bytes::new() };
        let second = TwoPart { header: Bytes::new(), body: Bytes::from_static(b"body") };
        let mut buffer = BytesMut::new();
        let mut decoded = Vec::new();
        for byte in all {
            buffer.put_u8(byte);
            decoded.extend(TwoPart::decode(&mut buffer, BOUNDS).unwrap());
        }
        assert_eq!((decoded, buffer.len()), (vec![first, second], 0));
    }

    #[test]
    fn too_long_message_is_refused_before_allocation() {
        for (header, body) in
            [(101, 0), (0, 1001), (u64::MAX, 0), (0, u64::MAX), (u64::MAX, u64::MAX)]
        {
            let mut buffer = BytesMut::new();
            buffer.put_u64(header);
            buffer.put_u64(body);
            buffer.put_u64(0);
            assert!(TwoPart::decode(&mut buffer, BOUNDS).is_err());
            assert!(buffer.capacity() < 1000);
        }
        let mut buffer = TwoPart::encode(&[0; 100], &[0; 1000]);
        assert!(TwoPart::decode(&mut buffer, BOUNDS).unwrap().is_some());
    }

    #[test]
    fn request_is_encoded_with_path_or_refused() {
        assert_eq!(&request("p", b"xyz").unwrap()[..], b"\0\x01p\0\x02{}\0\0\0\x03xyz");
        assert!(request(&"p".repeat(1 << 16), b"").is_err());
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_are_decoded_or_refused(bytes: Vec<u8>, small in 0..3_u8) {
            let mut bytes = bytes;
            // Without zeros nearly all lengths are too long.
            if small > 0 {
                for (at, byte) in bytes.iter_mut().enumerate() {
                    if (0..7).contains(&at) || (8..15).contains(&at) {
                        *byte = 0;
                    }
                }
            }
            let mut buffer = BytesMut::from(&bytes[..]);
            while let Ok(Some(message)) = TwoPart::decode(&mut buffer, BOUNDS) {
                proptest::prop_assert!(message.header.len() <= 100 && message.body.len() <= 1000);
            }
            proptest::prop_assert!(buffer.len() <= bytes.len());
        }

        #[test]
        fn encoded_message_is_decoded(
            header in proptest::collection::vec(0..=255_u8, 0..100),
            body in proptest::collection::vec(0..=255_u8, 0..1000),
        ) {
            let mut buffer = TwoPart::encode(&header, &body);
            let decoded = TwoPart::decode(&mut buffer, BOUNDS).unwrap().unwrap();
            let parts = (&decoded.header[..], &decoded.body[..], buffer.len());
            proptest::prop_assert_eq!(parts, (&header[..], &body[..], 0));
        }
    }
}
