//! The frames of Dynamo's TCP plane: requests to a worker, what it acknowledges them with, and the
//! two-part messages of an answer.
//!
//! ```text
//! request         path length: u16  path  headers length: u16  headers as JSON  payload length: u32  payload
//! acknowledgement length: u32  nothing, or why the request is not taken
//! two-part        header length: u64  body length: u64  checksum: u64, 0 for none  header  body
//! ```
//!
//! All numbers are big-endian. Checked against workers of Dynamo 1.6.1.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Bytes of a two-part message before its header.
const LENGTHS: usize = 24;

/// A message that nobody of this plane sends, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    /// A part is longer than one may be.
    #[error("a message has {0} bytes, more than are taken")]
    TooLong(u64),
    /// A request is longer than the plane has room for.
    #[error("a request has {0} bytes, and may have 4 GiB")]
    TooMuch(usize),
}

/// What may be in a two-part message.
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
    /// Its bytes.
    pub(crate) fn encode(header: &[u8], body: &[u8]) -> BytesMut {
        let mut bytes = BytesMut::with_capacity(LENGTHS + header.len() + body.len());
        bytes.put_u64(header.len() as u64);
        bytes.put_u64(body.len() as u64);
        bytes.put_u64(0);
        bytes.put_slice(header);
        bytes.put_slice(body);
        bytes
    }

    /// Takes one off the front of what has come; `None` as long as it is not all there. Lengths are
    /// held against `bounds` before anything is kept for them.
    pub(crate) fn decode(came: &mut BytesMut, bounds: Bounds) -> Result<Option<Self>, FrameError> {
        let Some(mut lengths) = came.get(..LENGTHS) else { return Ok(None) };
        let (header, body, _checksum) = (lengths.get_u64(), lengths.get_u64(), lengths.get_u64());
        if header > bounds.header || body > bounds.body {
            return Err(FrameError::TooLong(header.saturating_add(body)));
        }
        // Both fit: bounds are far below what a machine can address.
        let (header, body) = (header as usize, body as usize);
        if came.len() < LENGTHS + header + body {
            // At most what the sender has announced, and a bit at a time.
            came.reserve((LENGTHS + header + body - came.len()).min(1 << 20));
            return Ok(None);
        }
        came.advance(LENGTHS);
        let header = came.split_to(header).freeze();
        Ok(Some(Self { header, body: came.split_to(body).freeze() }))
    }
}

/// A request for the endpoint at a path of a worker.
pub(crate) fn request(path: &str, payload: &[u8]) -> Result<BytesMut, FrameError> {
    /// No headers.
    const HEADERS: &[u8] = b"{}";
    let too_much = |_| FrameError::TooMuch(path.len().saturating_add(payload.len()));
    let path_length = u16::try_from(path.len()).map_err(too_much)?;
    let payload_length = u32::try_from(payload.len()).map_err(too_much)?;
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
    fn a_message_comes_whole_or_not_yet() {
        let mut all = TwoPart::encode(br#""sentinel""#, b"");
        all.extend(TwoPart::encode(b"", b"body"));
        let first = TwoPart { header: Bytes::from_static(br#""sentinel""#), body: Bytes::new() };
        let second = TwoPart { header: Bytes::new(), body: Bytes::from_static(b"body") };
        let mut came = BytesMut::new();
        let mut read = Vec::new();
        for byte in all {
            came.put_u8(byte);
            read.extend(TwoPart::decode(&mut came, BOUNDS).unwrap());
        }
        assert_eq!((read, came.len()), (vec![first, second], 0));
    }

    #[test]
    fn lengths_beyond_all_bounds_are_refused_before_anything_is_kept_for_them() {
        for (header, body) in
            [(101, 0), (0, 1001), (u64::MAX, 0), (0, u64::MAX), (u64::MAX, u64::MAX)]
        {
            let mut came = BytesMut::new();
            came.put_u64(header);
            came.put_u64(body);
            came.put_u64(0);
            assert!(TwoPart::decode(&mut came, BOUNDS).is_err());
            assert!(came.capacity() < 1000);
        }
        let mut came = TwoPart::encode(&[0; 100], &[0; 1000]);
        assert!(TwoPart::decode(&mut came, BOUNDS).unwrap().is_some());
    }

    #[test]
    fn a_request_is_a_path_headers_and_a_payload() {
        assert_eq!(&request("p", b"xyz").unwrap()[..], b"\0\x01p\0\x02{}\0\0\0\x03xyz");
        assert!(request(&"p".repeat(1 << 16), b"").is_err());
    }

    proptest::proptest! {
        #[test]
        fn whatever_comes_is_a_message_or_refused(bytes: Vec<u8>, small in 0..3_u8) {
            let mut bytes = bytes;
            // Otherwise nearly all lengths are too long.
            if small > 0 {
                for (_, byte) in bytes.iter_mut().enumerate().filter(|(at, _)| (0..7).chain(8..15).any(|zero| zero == *at)) {
                    *byte = 0;
                }
            }
            let mut came = BytesMut::from(&bytes[..]);
            while let Ok(Some(message)) = TwoPart::decode(&mut came, BOUNDS) {
                proptest::prop_assert!(message.header.len() <= 100 && message.body.len() <= 1000);
            }
            proptest::prop_assert!(came.len() <= bytes.len());
        }

        #[test]
        fn what_is_written_is_read(header in proptest::collection::vec(0..=255_u8, 0..100), body in proptest::collection::vec(0..=255_u8, 0..1000)) {
            let mut came = TwoPart::encode(&header, &body);
            let read = TwoPart::decode(&mut came, BOUNDS).unwrap().unwrap();
            proptest::prop_assert_eq!((&read.header[..], &read.body[..], came.len()), (&header[..], &body[..], 0));
        }
    }
}
