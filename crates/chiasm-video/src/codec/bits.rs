//! A reader of bits in the raw payload of a NAL unit.

/// The maximum length of a parameter set; real ones have less than a hundred bytes.
const MAX_PAYLOAD_BYTES: usize = 4096;

/// Returns the payload behind the first `header` bytes of a NAL unit, without its emulation
/// prevention bytes. Cuts off what is too long.
pub(super) fn payload(nal: &[u8], header: usize) -> Vec<u8> {
    let mut data = Vec::with_capacity(nal.len().min(MAX_PAYLOAD_BYTES));
    let mut zeros = 0;
    for &byte in nal.iter().take(MAX_PAYLOAD_BYTES).skip(header) {
        if zeros >= 2 && byte == 3 {
            zeros = 0;
            continue;
        }
        zeros = if byte == 0 { zeros + 1 } else { 0 };
        data.push(byte);
    }
    data
}

/// A position in a payload without its emulation prevention bytes.
pub(super) struct Bits {
    data: Vec<u8>,
    position: usize,
}

impl Bits {
    /// Creates a reader behind the first `header` bytes of a NAL unit.
    pub(super) fn new(nal: &[u8], header: usize) -> Self {
        Self { data: payload(nal, header), position: 0 }
    }

    /// Reads one bit.
    pub(super) fn flag(&mut self) -> Option<bool> {
        let byte = self.data.get(self.position / 8)?;
        let bit = byte >> (7 - self.position % 8) & 1;
        self.position += 1;
        Some(bit == 1)
    }

    /// Reads up to 32 bits.
    pub(super) fn bits(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for _ in 0..count {
            value = value << 1 | u32::from(self.flag()?);
        }
        Some(value)
    }

    /// Skips bits.
    pub(super) fn skip(&mut self, count: usize) {
        self.position = self.position.saturating_add(count);
    }

    /// Reads an unsigned Exp-Golomb number below 2^32 - 1.
    pub(super) fn ue(&mut self) -> Option<u32> {
        let mut zeros = 0;
        while !self.flag()? {
            zeros += 1;
            if zeros > 31 {
                return None;
            }
        }
        let rest = self.bits(zeros)?;
        Some((1u32 << zeros) - 1 + rest)
    }

    /// Reads a signed Exp-Golomb number.
    pub(super) fn se(&mut self) -> Option<i64> {
        let code = i64::from(self.ue()?);
        Some(if code % 2 == 1 { (code + 1) / 2 } else { -code / 2 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_golomb_numbers_are_read() {
        let mut bits = Bits::new(&[0, 0b1010_0110, 0b0100_0010, 0b1000_0000], 1);
        assert_eq!(
            (bits.ue(), bits.ue(), bits.ue(), bits.ue()),
            (Some(0), Some(1), Some(2), Some(3))
        );
        assert_eq!(bits.ue(), Some(4));
    }

    #[test]
    fn emulation_prevention_bytes_are_skipped() {
        let mut bits = Bits::new(&[9, 0, 0, 3, 1], 1);
        assert_eq!(bits.bits(24), Some(1));
        assert_eq!(bits.flag(), None);
    }
}
