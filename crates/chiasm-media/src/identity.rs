//! Identity of media: by content, never by where it came from.

use std::fmt;

use chiasm_types::{MmHash, Modality};

/// blake3 of an item's encoded bytes. Written as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContentHash([u8; 32]);

impl ContentHash {
    /// The hash whose bytes these are.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Hashes the whole of an item's encoded bytes.
    pub fn of(bytes: &[u8]) -> Self {
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

/// The identity of a media item: its content, its modality (by its name) and everything else that
/// changes its tensors.
///
/// `fingerprint` is the model's canonical form of the latter (family, revision, effective processor
/// settings). The hash is blake3 in key-derivation mode (a domain of its own) over the content
/// hash, then each part after its length as a little-endian u64, so that no two different inputs
/// read the same.
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
    fn every_part_counts_and_none_runs_into_the_next() {
        let (a, b) = (ContentHash::of(b"a"), ContentHash::of(b"b"));
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
    fn the_identity_is_stable_across_releases() {
        // Engines keep items by this hash: a change invalidates every cache, so it must be a
        // decision, not an accident.
        assert_eq!(
            ContentHash::of(b"chiasm").to_string(),
            blake3::hash(b"chiasm").to_hex().as_str()
        );
        assert_eq!(
            mm_hash(&ContentHash::of(b"chiasm"), &Modality::Image, b"qwen2_vl").to_string(),
            "844eb38c1cd5267ac8bd5e7483f1b8815ec60b9f038a0deab3323675a6024e5c"
        );
    }
}
