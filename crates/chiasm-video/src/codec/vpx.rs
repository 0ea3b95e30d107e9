//! VP8 and VP9: the headers of frames.

use super::picture::{Picture, RandomAccess, StreamHeader};
use crate::error::IndexError;

/// The start code of a VP8 key frame.
const VP8_START_CODE: [u8; 3] = [0x9d, 0x01, 0x2a];
/// The start code of a VP9 key frame.
const VP9_START_CODE: [u8; 3] = [0x49, 0x83, 0x42];
/// The colour space of RGB, in the header of a VP9 key frame.
const VP9_RGB: u32 = 7;

/// Reads the header of a VP8 frame (RFC 6386, clause 9.1).
pub(super) fn read_vp8(sample: &[u8]) -> Result<Picture, IndexError> {
    let tag = *sample.first().ok_or(IndexError::Pictures)?;
    let is_shown = tag & 0x10 != 0;
    if !is_shown {
        return Err(IndexError::Pictures);
    }
    let start = if tag & 1 == 0 { RandomAccess::Closed } else { RandomAccess::No };
    Ok(Picture { start, is_droppable: false, has_b_slice: false, ends_sequence: false })
}

/// Reads the size of a VP8 key frame.
pub(super) fn vp8_size(sample: &[u8]) -> Result<StreamHeader, IndexError> {
    let header: &[u8; 10] = sample.first_chunk().ok_or(IndexError::CodecHeader)?;
    if header[0] & 1 != 0 || header[3..6] != VP8_START_CODE {
        return Err(IndexError::CodecHeader);
    }
    let side = |low: u8, high: u8| i64::from(u16::from_le_bytes([low, high]) & 0x3fff);
    StreamHeader::new(side(header[6], header[7]), side(header[8], header[9]))
}

/// Checks that a VP8 frame does not state another size. Only key frames state one.
pub(super) fn check_vp8_size(sample: &[u8], expected: StreamHeader) -> Result<(), IndexError> {
    let is_key = sample.first().is_some_and(|tag| tag & 1 == 0);
    if is_key && vp8_size(sample)? != expected { Err(IndexError::CodecHeader) } else { Ok(()) }
}

/// Checks that no frame of a VP9 sample states another size. Inter frames can.
pub(super) fn check_vp9_size(sample: &[u8], expected: StreamHeader) -> Result<(), IndexError> {
    for frame in superframe(sample)? {
        let header = Vp9Header::read(frame).ok_or(IndexError::Pictures)?;
        let Some((width, height)) = header.size else { continue };
        if (width, height) != (expected.width, expected.height) {
            return Err(IndexError::CodecHeader);
        }
    }
    Ok(())
}

/// Reads the headers of a VP9 frame or superframe. Exactly one of its frames must be shown.
pub(super) fn read_vp9(sample: &[u8]) -> Result<Picture, IndexError> {
    let mut shown = 0;
    let mut start = RandomAccess::No;
    for (index, frame) in superframe(sample)?.into_iter().enumerate() {
        let header = Vp9Header::read(frame).ok_or(IndexError::Pictures)?;
        shown += usize::from(header.is_shown);
        if header.is_key && index == 0 {
            start = RandomAccess::Closed;
        }
    }
    if shown != 1 {
        return Err(IndexError::Pictures);
    }
    Ok(Picture { start, is_droppable: false, has_b_slice: false, ends_sequence: false })
}

/// Reads the size of a VP9 key frame.
pub(super) fn vp9_size(sample: &[u8]) -> Result<StreamHeader, IndexError> {
    let frames = superframe(sample)?;
    let header = frames.first().and_then(|frame| Vp9Header::read(frame));
    let Some(Vp9Header { is_key: true, size: Some((width, height)), .. }) = header else {
        return Err(IndexError::CodecHeader);
    };
    StreamHeader::new(width.into(), height.into())
}

/// Splits a superframe into its frames (VP9 specification, annex B).
fn superframe(sample: &[u8]) -> Result<Vec<&[u8]>, IndexError> {
    let marker = *sample.last().ok_or(IndexError::Pictures)?;
    let size_bytes = usize::from(marker >> 3 & 3) + 1;
    let count = usize::from(marker & 7) + 1;
    let index_bytes = 2 + size_bytes * count;
    let is_superframe = marker & 0xe0 == 0xc0
        && sample.len() > index_bytes
        && sample[sample.len() - index_bytes] == marker;
    if !is_superframe {
        return Ok(vec![sample]);
    }
    let (mut rest, index) = sample.split_at(sample.len() - index_bytes);
    let mut frames = Vec::with_capacity(count);
    for size in index[1..index.len() - 1].chunks(size_bytes) {
        let size = size.iter().rev().fold(0, |value, &byte| value << 8 | usize::from(byte));
        if size == 0 || size > rest.len() {
            return Err(IndexError::Pictures);
        }
        let (frame, behind) = rest.split_at(size);
        frames.push(frame);
        rest = behind;
    }
    Ok(frames)
}

/// The begin of an uncompressed header (VP9 specification, clause 6.2).
struct Vp9Header {
    is_key: bool,
    is_shown: bool,
    /// The size, if the frame has one of its own.
    size: Option<(u32, u32)>,
}

impl Vp9Header {
    fn read(frame: &[u8]) -> Option<Self> {
        let mut position = 0usize;
        let mut bits = |count: usize| -> Option<u32> {
            let mut value = 0;
            for _ in 0..count {
                let byte = *frame.get(position / 8)?;
                value = value << 1 | u32::from(byte >> (7 - position % 8) & 1);
                position += 1;
            }
            Some(value)
        };
        if bits(2)? != 2 {
            return None;
        }
        let profile = bits(1)? | bits(1)? << 1;
        if profile == 3 {
            bits(1)?;
        }
        if bits(1)? == 1 {
            return Some(Self { is_key: false, is_shown: true, size: None });
        }
        let is_key = bits(1)? == 0;
        let is_shown = bits(1)? == 1;
        let is_error_resilient = bits(1)? == 1;
        let is_intra_only = !is_key && !is_shown && bits(1)? == 1;
        if !is_key && !is_error_resilient {
            bits(2)?;
        }
        if !is_key && !is_intra_only {
            // The frames to replace, and the three to refer to.
            bits(8 + 3 * 4)?;
            // The size of a frame that is referred to is the size of a key frame.
            let has_own_size = bits(1)? == 0 && bits(1)? == 0 && bits(1)? == 0;
            let size = if has_own_size { Some((bits(16)? + 1, bits(16)? + 1)) } else { None };
            return Some(Self { is_key, is_shown, size });
        }
        for byte in VP9_START_CODE {
            if bits(8)? != u32::from(byte) {
                return None;
            }
        }
        if is_key || profile > 0 {
            if profile >= 2 {
                bits(1)?;
            }
            if bits(3)? != VP9_RGB {
                bits(if profile & 1 == 1 { 4 } else { 1 })?;
            } else if profile & 1 == 1 {
                bits(1)?;
            }
        }
        if is_intra_only {
            // The frames to replace.
            bits(8)?;
        }
        let size = (bits(16)? + 1, bits(16)? + 1);
        Some(Self { is_key, is_shown, size: Some(size) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of a text of bits.
    fn packed(bits: &str) -> Vec<u8> {
        let bits: Vec<u8> = bits.bytes().filter(|bit| *bit != b' ').map(|bit| bit - b'0').collect();
        let byte = |bits: &[u8]| (0..8).fold(0, |byte, at| byte << 1 | bits.get(at).unwrap_or(&0));
        bits.chunks(8).map(byte).collect()
    }

    #[test]
    fn vp9_inter_frame_with_another_size_is_refused() {
        let expected = StreamHeader::new(64, 32).unwrap();
        // Profile 0, an inter frame that is shown, without error resilience.
        let inter = "10 00 0 1 1 0 00 00000000 000000000000";
        let own = format!("{inter} 000 0000000000111111 0000000000011111");
        assert_eq!(check_vp9_size(&packed(&own), expected), Ok(()));
        let other = format!("{inter} 000 0000000000011111 0000000000011111");
        assert_eq!(check_vp9_size(&packed(&other), expected), Err(IndexError::CodecHeader));
        assert_eq!(check_vp9_size(&packed(&format!("{inter} 01")), expected), Ok(()));
    }
}
