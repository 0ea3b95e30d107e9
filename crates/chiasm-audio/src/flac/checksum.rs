//! The checksums of FLAC, most significant bit first, without inversion.

/// The polynomial of a frame header's checksum.
const CRC8_POLYNOMIAL: u8 = 0x07;
/// The polynomial of a frame's checksum.
const CRC16_POLYNOMIAL: u16 = 0x8005;

/// The checksums of all bytes.
static CRC16_TABLE: [u16; 256] = crc16_table();

const fn crc16_table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ CRC16_POLYNOMIAL };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

/// The checksum of a frame's bytes so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crc16(u16);

impl Crc16 {
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut crc = Self(0);
        bytes.iter().for_each(|&byte| crc.add(byte));
        crc
    }

    pub(super) fn add(&mut self, byte: u8) {
        let index = (self.0 >> 8) as u8 ^ byte;
        self.0 = self.0 << 8 ^ CRC16_TABLE[usize::from(index)];
    }

    pub(super) fn is_zero(self) -> bool {
        self.0 == 0
    }
}

/// Returns the checksum of a frame header.
pub(super) fn crc8(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(
            crc ^ byte,
            |crc, _| {
                if crc & 0x80 == 0 { crc << 1 } else { crc << 1 ^ CRC8_POLYNOMIAL }
            },
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_the_check_string() {
        assert_eq!(crc8(b"123456789"), 0xF4);
        assert_eq!(Crc16::from_bytes(b"123456789").0, 0xFEE8);
    }
}
