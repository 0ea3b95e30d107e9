use std::fmt;
use std::str::FromStr;

/// The identity of a media item: a hash of its encoded bytes and of everything else that changes
/// its tensors.
///
/// It has 256 bits and is written as 64 lower-case hex digits. Engines receive it in that form, as
/// `mm_hash` and `identifier`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MmHash([u8; 32]);

/// The error for a string that is not 64 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseMmHashError;

impl MmHash {
    /// Creates an identity from a digest.
    pub const fn new(digest: [u8; 32]) -> Self {
        Self(digest)
    }

    /// Returns the digest.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for MmHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        // Formatting byte by byte takes a microsecond, several times per request.
        let mut text = [0; 64];
        for (pair, byte) in text.chunks_exact_mut(2).zip(self.0) {
            pair.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
        }
        f.write_str(std::str::from_utf8(&text).unwrap_or_default())
    }
}

impl fmt::Debug for MmHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MmHash({self})")
    }
}

impl fmt::Display for ParseMmHashError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected 64 hex digits")
    }
}

impl std::error::Error for ParseMmHashError {}

impl FromStr for MmHash {
    type Err = ParseMmHashError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(ParseMmHashError);
        }
        let nibble = |digit: u8| (digit as char).to_digit(16).ok_or(ParseMmHashError);
        let mut digest = [0; 32];
        for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (nibble(pair[0])? << 4 | nibble(pair[1])?) as u8;
        }
        Ok(Self(digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_hash_parses_to_itself() {
        let hash = MmHash::new(std::array::from_fn(|i| (i * 37) as u8));
        assert_eq!(hash.to_string().parse(), Ok(hash));
    }

    #[test]
    fn wrong_length_or_digit_is_refused() {
        assert_eq!("ab".parse::<MmHash>(), Err(ParseMmHashError));
        assert_eq!("g".repeat(64).parse::<MmHash>(), Err(ParseMmHashError));
    }
}
