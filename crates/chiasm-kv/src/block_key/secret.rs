//! The secret from which all coefficients of block keys are derived.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::OnceLock;

/// A secret that clients must not know: whoever knows it can construct two prompts with the same
/// [`BlockKey`](crate::BlockKey)s.
///
/// Each process draws a secret when it computes its first key. Processes that exchange keys need
/// the same secret; for example, if one reads the
/// [`PrefixIndex::snapshot`](crate::PrefixIndex::snapshot)s of another.
#[derive(Clone, PartialEq, Eq)]
pub struct KeySecret([u8; 32]);

/// The error of installing a secret in a process that already uses another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this process already uses another secret for block keys")]
pub struct KeySecretInUse;

static PROCESS_SECRET: OnceLock<KeySecret> = OnceLock::new();

impl KeySecret {
    /// Creates a secret from bytes, which must be random.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the secret of this process. Draws one if there is none yet.
    pub fn for_process() -> &'static Self {
        PROCESS_SECRET.get_or_init(Self::random)
    }

    /// Makes this the secret of the process.
    ///
    /// # Errors
    /// [`KeySecretInUse`] if the process already has another secret, either set earlier or drawn
    /// for its first key.
    pub fn use_in_process(self) -> Result<(), KeySecretInUse> {
        let used = PROCESS_SECRET.get_or_init(|| self.clone());
        if *used == self { Ok(()) } else { Err(KeySecretInUse) }
    }

    /// Returns the secret's bytes, to be passed to a process that needs the same secret.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns a fingerprint that distinguishes secrets without revealing them.
    pub fn fingerprint(&self) -> [u8; 16] {
        let mut fingerprint = [0; 16];
        self.derive("chiasm 2026 fingerprint of the secret of block keys", b"")
            .fill(&mut fingerprint);
        fingerprint
    }

    /// Derives an endless stream of bytes from the secret, for one purpose and name.
    pub(super) fn derive(&self, purpose: &str, name: &[u8]) -> blake3::OutputReader {
        blake3::Hasher::new_derive_key(purpose).update(&self.0).update(name).finalize_xof()
    }

    /// Draws a secret from the operating system's random numbers.
    pub fn random() -> Self {
        // The standard library keys its hash maps with 128 random bits of the operating system.
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
    fn second_secret_in_process_is_refused() {
        let used = KeySecret::for_process().clone();
        assert_eq!(used.clone().use_in_process(), Ok(()));
        assert_eq!(KeySecret::new([7; 32]).use_in_process(), Err(KeySecretInUse));
        assert_eq!(*KeySecret::for_process(), used);
        assert_ne!(used.fingerprint(), KeySecret::new([7; 32]).fingerprint());
        assert_eq!(format!("{used:?}"), "KeySecret(…)");
    }
}
