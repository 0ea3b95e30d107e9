//! The headers of MPEG audio frames.

use crate::bytes::u32_at;

/// The kilobits per second of MPEG-1, by their code.
const BITRATES: [u32; 15] = [0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320];
/// The kilobits per second of MPEG-2 and MPEG-2.5, by their code.
const LOW_BITRATES: [u32; 15] = [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160];
/// The sample rates of MPEG-1, by their code.
const RATES: [u32; 3] = [44_100, 48_000, 32_000];

/// The header of a frame of layer III.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    /// The size of the frame, header included.
    pub(super) bytes: usize,
    /// The number of samples of each channel.
    pub(super) samples: u32,
    /// Samples per second.
    pub(super) rate: u32,
    /// The number of channels.
    pub(super) channels: u32,
}

impl FrameHeader {
    /// Reads a header; `None` if there is none, or one of another layer or of a free bit rate.
    pub(super) fn read(file: &[u8], at: usize) -> Option<Self> {
        let header = u32_at(file, at)?;
        let layer = header >> 17 & 3;
        if header >> 21 != 0x7FF || layer != 1 {
            return None;
        }
        let divisor = match header >> 19 & 3 {
            0 => 4,
            2 => 2,
            3 => 1,
            _ => return None,
        };
        let is_mpeg1 = divisor == 1;
        let bitrates = if is_mpeg1 { BITRATES } else { LOW_BITRATES };
        let bitrate = *bitrates.get((header >> 12 & 0xF) as usize)?;
        let rate = *RATES.get((header >> 10 & 3) as usize)? / divisor;
        let samples = if is_mpeg1 { 1_152 } else { 576 };
        if bitrate == 0 {
            return None;
        }
        let padding = header >> 9 & 1;
        let bytes = samples / 8 * 1_000 * bitrate / rate + padding;
        let channels = if header >> 6 & 3 == 3 { 1 } else { 2 };
        Some(Self { bytes: bytes as usize, samples, rate, channels })
    }

    /// Returns `true` if the sound does not change its format from another frame to this one.
    pub(super) fn has_format_of(&self, other: &Self) -> bool {
        let Self { bytes: _, samples, rate, channels } = *self;
        (samples, rate, channels) == (other.samples, other.rate, other.channels)
    }

    /// Returns the bytes of the side information, behind the header.
    pub(super) fn side_bytes(&self) -> usize {
        match (self.samples == 1_152, self.channels == 1) {
            (true, false) => 32,
            (true, true) | (false, false) => 17,
            (false, true) => 9,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_from_bit_and_sample_rates() {
        let read = |header: u32| FrameHeader::read(&header.to_be_bytes(), 0);
        let header =
            |bytes, samples, rate, channels| Some(FrameHeader { bytes, samples, rate, channels });
        assert_eq!(read(0xFFFB_9000), header(417, 1_152, 44_100, 2));
        assert_eq!(read(0xFFFB_92C0), header(418, 1_152, 44_100, 1));
        assert_eq!(read(0xFFF3_88C4), header(288, 576, 16_000, 1));
        assert_eq!(read(0xFFE3_88C4), header(576, 576, 8_000, 1));
        for refused in [0xFFFB_0000, 0xFFFB_F000, 0xFFFB_9C00, 0xFFEB_9000, 0xFFFD_9000, 0] {
            assert_eq!(read(refused), None, "{refused:x}");
        }
    }
}
