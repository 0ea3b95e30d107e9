//! The identity of media: by content, never by source.

use std::fmt;

use chiasm_types::{MmHash, Modality};

/// The blake3 hash of an item's encoded bytes. Displayed as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentHash([u8; 32]);

impl ContentHash {
    /// Wraps the bytes of a hash.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of the hash.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Hashes an item's encoded bytes, all of them.
    pub fn digest(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).into())
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentHash({self})")
    }
}

/// Returns the identity of a media item: a hash of its content, its modality's name and everything
/// else that changes its tensors.
///
/// `fingerprint` is the model's canonical form of everything else: family, revision and effective
/// processor settings.
///
/// The hash is blake3 in key-derivation mode, which gives it a domain of its own. Its input is the
/// content hash, then the modality's name and the fingerprint. Each of the two follows its length
/// as a little-endian u64, so that different inputs never encode to the same bytes.
pub fn mm_hash(content: &ContentHash, modality: &Modality, fingerprint: &[u8]) -> MmHash {
    let mut hasher = blake3::Hasher::new_derive_key("chiasm 2026 mm_hash v1");
    hasher.update(&content.0);
    for part in [modality.name().as_bytes(), fingerprint] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    MmHash::new(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mm_hash_depends_on_every_part() {
        let a = ContentHash::digest(b"a");
        let b = ContentHash::digest(b"b");
        let hashes = [
            mm_hash(&a, &Modality::from_name("image"), b"x"),
            mm_hash(&b, &Modality::from_name("image"), b"x"),
            mm_hash(&a, &Modality::from_name("video"), b"x"),
            mm_hash(&a, &Modality::from_name("image"), b"y"),
            mm_hash(&a, &Modality::from_name("imagex"), b""),
            mm_hash(&a, &Modality::from_name("imag"), b"ex"),
        ];
        for (i, left) in hashes.iter().enumerate() {
            assert!(hashes[i + 1..].iter().all(|right| left != right));
        }
        assert_eq!(hashes[0], mm_hash(&a, &Modality::from_name("image"), b"x"));
    }

    #[test]
    fn mm_hash_is_stable_across_releases() {
        // Engines cache items by this hash. A change invalidates every cache, so it must be
        // deliberate.
        assert_eq!(
            ContentHash::digest(b"chiasm").to_string(),
            blake3::hash(b"chiasm").to_hex().as_str()
        );
        assert_eq!(
            mm_hash(&ContentHash::digest(b"chiasm"), &Modality::Image, b"qwen2_vl").to_string(),
            "844eb38c1cd5267ac8bd5e7483f1b8815ec60b9f038a0deab3323675a6024e5c"
        );
    }
}
