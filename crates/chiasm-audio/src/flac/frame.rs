//! The headers of FLAC frames.

use super::StreamInfo;
use super::checksum::crc8;
use crate::error::LengthError;

/// The header of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameHeader {
    /// The size of the header, checksum included.
    pub(super) bytes: usize,
    /// The number of samples of each channel.
    pub(super) samples: u32,
    /// Set if `position` is a number of samples; else it is a number of frames.
    has_sample_number: bool,
    position: u64,
    /// Samples per second; `None` for that of STREAMINFO.
    rate: Option<u32>,
    channels: u32,
    /// The bits of a sample; `None` for those of STREAMINFO.
    bits: Option<u32>,
}

impl FrameHeader {
    /// Reads the header at the beginning of some bytes; `None` if there is none.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let &[sync, strategy, sizes, layout, ..] = bytes else { return None };
        if sync != 0xFF || strategy & 0xFE != 0xF8 || layout & 1 != 0 {
            return None;
        }
        let (position, mut at) = read_number(bytes)?;
        let mut next = |count: usize| {
            let field = bytes.get(at..at + count)?;
            at += count;
            Some(field.iter().fold(0, |value, &byte| value << 8 | u32::from(byte)))
        };
        let samples = match sizes >> 4 {
            0 => return None,
            1 => 192,
            code @ 2..=5 => 576 << (code - 2),
            6 => next(1)? + 1,
            7 => next(2)? + 1,
            code => 256 << (code - 8),
        };
        let rate = match sizes & 0xF {
            0 => None,
            1 => Some(88_200),
            2 => Some(176_400),
            3 => Some(192_000),
            4 => Some(8_000),
            5 => Some(16_000),
            6 => Some(22_050),
            7 => Some(24_000),
            8 => Some(32_000),
            9 => Some(44_100),
            10 => Some(48_000),
            11 => Some(96_000),
            12 => Some(next(1)? * 1_000),
            13 => Some(next(2)?),
            14 => Some(next(2)? * 10),
            _ => return None,
        };
        let channels = match layout >> 4 {
            code @ 0..=7 => u32::from(code) + 1,
            8..=10 => 2,
            _ => return None,
        };
        let bits = match layout >> 1 & 7 {
            0 => None,
            1 => Some(8),
            2 => Some(12),
            4 => Some(16),
            5 => Some(20),
            6 => Some(24),
            7 => Some(32),
            _ => return None,
        };
        let has_sample_number = strategy & 1 == 1;
        let is_right = crc8(bytes.get(..at)?) == *bytes.get(at)?;
        is_right.then_some(Self {
            bytes: at + 1,
            samples,
            has_sample_number,
            position,
            rate,
            channels,
            bits,
        })
    }

    /// Checks that the frame has the format of the stream.
    pub(super) fn check_format(&self, info: &StreamInfo) -> Result<(), LengthError> {
        let is_same = self.rate.is_none_or(|rate| rate == info.rate)
            && self.bits.is_none_or(|bits| bits == info.bits)
            && self.channels == info.channels;
        // The frames of a stream whose frames have different sizes must tell their first sample.
        let is_known = self.has_sample_number || info.block_samples.is_some();
        if is_same && is_known { Ok(()) } else { Err(LengthError::Frames) }
    }

    /// Checks that the frame follows `frames` frames with `samples` samples.
    pub(super) fn check_position(&self, frames: u64, samples: u64) -> Result<(), LengthError> {
        let expected = if self.has_sample_number { samples } else { frames };
        if self.position == expected { Ok(()) } else { Err(LengthError::Frames) }
    }

    /// Returns `true` if the frame has the size of all frames but the last.
    pub(super) fn has_full_size(&self, info: &StreamInfo) -> bool {
        self.has_sample_number || info.block_samples == Some(self.samples)
    }
}

/// Reads the number of the frame or of its first sample, which is encoded as in UTF-8 with up to 36
/// bits. Returns it and its end.
fn read_number(bytes: &[u8]) -> Option<(u64, usize)> {
    const START: usize = 4;
    let first = *bytes.get(START)?;
    let more = match first.leading_ones() as usize {
        0 => return Some((first.into(), START + 1)),
        ones @ 2..=7 => ones - 1,
        _ => return None,
    };
    let end = START + 1 + more;
    let head = u64::from(first) & (0x3F >> more);
    let number = bytes.get(START + 1..end)?.iter().try_fold(head, |number, &byte| {
        (byte >> 6 == 0b10).then(|| number << 6 | u64::from(byte & 0x3F))
    })?;
    Some((number, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_up_to_seven_bytes() {
        let number = |bytes: &[u8]| read_number(&[&[0; 4], bytes].concat());
        assert_eq!(number(&[0x7F]), Some((0x7F, 5)));
        assert_eq!(number(&[0xC2, 0x80]), Some((0x80, 6)));
        assert_eq!(number(&[0xFE, 0xBF, 0xBF, 0xBF, 0xBF, 0xBF, 0xBF]), Some((0xF_FFFF_FFFF, 11)));
        assert_eq!(number(&[0x80]), None);
        assert_eq!(number(&[0xFF]), None);
        assert_eq!(number(&[0xC2, 0x00]), None);
        assert_eq!(number(&[0xC2]), None);
    }
}
