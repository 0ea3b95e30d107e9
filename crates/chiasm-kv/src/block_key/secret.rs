//! What block keys are made with that nobody else knows.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::OnceLock;

/// What whoever sends prompts must not know: with it, two prompts can be found that have the same
/// [`BlockKey`](crate::BlockKey)s.
///
/// Each process draws one when it makes its first key. Processes that exchange keys, as those do
/// that read each other's [`PrefixIndex::snapshot`](crate::PrefixIndex::snapshot)s, need the same
/// one.
#[derive(Clone, PartialEq, Eq)]
pub struct KeySecret([u8; 32]);

/// The process has made keys with another secret already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this process has made block keys with another secret already")]
pub struct KeySecretInUse;

static OF_PROCESS: OnceLock<KeySecret> = OnceLock::new();

impl KeySecret {
    /// The secret of these bytes, which must be random.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The secret of this process. It is drawn now if there is none.
    pub fn of_process() -> &'static Self {
        OF_PROCESS.get_or_init(Self::random)
    }

    /// Makes this the secret of the process.
    ///
    /// # Errors
    /// When the process has another one already: because it was given one, or has made keys.
    pub fn use_in_process(self) -> Result<(), KeySecretInUse> {
        let used = OF_PROCESS.get_or_init(|| self.clone());
        if *used == self { Ok(()) } else { Err(KeySecretInUse) }
    }

    /// The secret's bytes, for a process that is to have the same one.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Tells secrets apart without giving them away.
    pub fn fingerprint(&self) -> [u8; 16] {
        let mut fingerprint = [0; 16];
        self.derive("chiasm 2026 fingerprint of the secret of block keys", b"")
            .fill(&mut fingerprint);
        fingerprint
    }

    /// Bytes without end that follow from the secret and a name, for one purpose.
    pub(super) fn derive(&self, purpose: &str, name: &[u8]) -> blake3::OutputReader {
        blake3::Hasher::new_derive_key(purpose).update(&self.0).update(name).finalize_xof()
    }

    /// A secret of the operating system's random numbers.
    pub fn random() -> Self {
        // The standard library's hash maps are keyed with 128 random bits of the operating system.
        let random = RandomState::new();
        let words = [random.hash_one(0_u8), random.hash_one(1_u8)];
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        Self(blake3::derive_key("chiasm 2026 secret of block keys", &bytes))
    }
}

impl fmt::Debug for KeySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeySecret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_secret() {
        let used = KeySecret::of_process().clone();
        assert_eq!(used.clone().use_in_process(), Ok(()));
        assert_eq!(KeySecret::new([7; 32]).use_in_process(), Err(KeySecretInUse));
        assert_eq!(*KeySecret::of_process(), used);
        assert_ne!(used.fingerprint(), KeySecret::new([7; 32]).fingerprint());
        assert_eq!(format!("{used:?}"), "KeySecret(…)");
    }
}
