//! The decoder's configuration (ISO 14496-1 and 14496-3).

use crate::error::LengthError;

/// The sample rates by their code.
const RATES: [u32; 13] = [
    96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000,
    7_350,
];
/// The sample rate from which encoders do not extend sound to twice the rate. Below it, only a
/// decoder sees the extension, unless the configuration denies it.
const MIN_PLAIN_RATE: u32 = 32_000;

/// The configuration of AAC in its low-complexity profile, with 1,024 samples per packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AacConfig {
    pub(super) rate: u32,
    pub(super) channels: u32,
}

impl AacConfig {
    /// Reads the payload of an `esds` box.
    pub(super) fn read(esds: &[u8]) -> Result<Self, LengthError> {
        const MPEG4_AUDIO: u8 = 0x40;
        // Behind version and flags.
        let mut rest = esds.get(4..).ok_or(LengthError::Malformed)?;
        let stream = descriptor(&mut rest, 3)?;
        // Behind the stream's id, without any of the optional fields.
        let mut rest = match stream {
            [_, _, flags, rest @ ..] if flags & 0xE0 == 0 => rest,
            _ => return Err(LengthError::Encoding),
        };
        let decoder = descriptor(&mut rest, 4)?;
        let (kind, mut rest) = decoder.split_at_checked(13).ok_or(LengthError::Malformed)?;
        if kind[0] != MPEG4_AUDIO {
            return Err(LengthError::Encoding);
        }
        Self::read_specific(descriptor(&mut rest, 5)?)
    }

    /// Reads an `AudioSpecificConfig`.
    fn read_specific(bytes: &[u8]) -> Result<Self, LengthError> {
        const LOW_COMPLEXITY: u32 = 2;
        const BAND_REPLICATION: u32 = 5;
        const EXTENSION_MARK: u32 = 0x2B7;

        let mut bits = Bits { bytes, at: 0 };
        let profile = bits.read(5)?;
        let rate = RATES.get(bits.read(4)? as usize).copied();
        let channels = match bits.read(4)? {
            channels @ 1..=6 => channels,
            7 => 8,
            _ => return Err(LengthError::Encoding),
        };
        // Packets of 960 samples, a core coder and further fields.
        let has_unknown_flags = bits.read(3)? != 0;
        let Some(rate) = rate.filter(|_| profile == LOW_COMPLEXITY && !has_unknown_flags) else {
            return Err(LengthError::Encoding);
        };
        let is_plain = match bits.read(11) {
            Ok(EXTENSION_MARK) => {
                if bits.read(5)? != BAND_REPLICATION || bits.read(1)? != 0 {
                    return Err(LengthError::Extension);
                }
                true
            }
            _ => rate >= MIN_PLAIN_RATE,
        };
        if is_plain { Ok(Self { rate, channels }) } else { Err(LengthError::Extension) }
    }
}

/// Returns the body of a descriptor, and leaves what follows it.
fn descriptor<'a>(rest: &mut &'a [u8], tag: u8) -> Result<&'a [u8], LengthError> {
    let (first, mut tail) = rest.split_first().ok_or(LengthError::Malformed)?;
    if *first != tag {
        return Err(LengthError::Malformed);
    }
    let mut size = 0;
    for _ in 0..4 {
        let (byte, more) = tail.split_first().ok_or(LengthError::Malformed)?;
        tail = more;
        size = size << 7 | usize::from(byte & 0x7F);
        if byte & 0x80 == 0 {
            break;
        }
    }
    let (body, tail) = tail.split_at_checked(size).ok_or(LengthError::Malformed)?;
    *rest = tail;
    Ok(body)
}

/// Bits, most significant first.
struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Bits<'_> {
    /// Reads at most 16 bits.
    fn read(&mut self, count: usize) -> Result<u32, LengthError> {
        let mut value = 0;
        for at in self.at..self.at + count {
            let byte = self.bytes.get(at / 8).ok_or(LengthError::Malformed)?;
            value = value << 1 | u32::from(byte >> (7 - at % 8) & 1);
        }
        self.at += count;
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specific(bytes: &[u8]) -> Result<(u32, u32), LengthError> {
        AacConfig::read_specific(bytes).map(|config| (config.rate, config.channels))
    }

    #[test]
    fn low_complexity_is_read() {
        assert_eq!(specific(&[0x12, 0x10]), Ok((44_100, 2)));
        assert_eq!(specific(&[0x14, 0x08, 0x56, 0xE5, 0x00]), Ok((16_000, 1)));
    }

    #[test]
    fn hidden_extension_is_refused() {
        // 16 kHz without a word about the extension, and with one.
        assert_eq!(specific(&[0x14, 0x08]), Err(LengthError::Extension));
        assert_eq!(specific(&[0x14, 0x08, 0x56, 0xE5, 0x80]), Err(LengthError::Extension));
        assert_eq!(specific(&[0x12, 0x10, 0x56, 0xE5, 0xA0]), Err(LengthError::Extension));
    }

    #[test]
    fn other_profiles_are_refused() {
        // HE-AAC, 960 samples, channels by a table, a reserved rate.
        for bytes in [[0x2B, 0x10], [0x12, 0x14], [0x12, 0x00], [0x16, 0x90]] {
            assert_eq!(specific(&bytes), Err(LengthError::Encoding), "{bytes:x?}");
        }
        assert_eq!(specific(&[0x12]), Err(LengthError::Malformed));
    }

    #[test]
    fn descriptors_may_have_long_sizes() {
        let esds = [
            &[0, 0, 0, 0, 3, 0x80, 0x80, 0x80, 0x19, 0, 1, 0][..],
            &[4, 0x11, 0x40, 0x15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            &[5, 0x02, 0x12, 0x10],
            &[6, 1, 2],
        ]
        .concat();
        let config = AacConfig::read(&esds).unwrap();
        assert_eq!(config, AacConfig { rate: 44_100, channels: 2 });
        assert_eq!(AacConfig::read(&esds[..20]), Err(LengthError::Malformed));
    }
}
