//! The two schemes of block keys: derived from a block's content, or from its engine's hash.

use std::fmt;
use std::sync::Arc;

use super::secret::KeySecret;
use super::{BlockKey, words};
use crate::event::ExternalHash;

/// The data from which the keys of a worker's blocks are derived.
///
/// Keys of different schemes are never equal, so one index can hold workers of several schemes. A
/// lookup by keys of one scheme finds the workers of that scheme.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KeyScheme {
    /// The content that events report: tokens, media, LoRA adapter and salt. The keys of a prompt
    /// come from [`block_keys`](crate::block_keys).
    #[default]
    Content,
    /// The engine's own hashes, for engines whose events report nothing else. The keys of a prompt
    /// come from [`EngineHashing::keys`](crate::EngineHashing::keys), which computes the same
    /// hashes as the engine.
    EngineHashes(EngineHashKeys),
}

/// A mapping from an engine's block hashes to block keys.
///
/// The hashes must be chained: each identifies its block and all blocks before it. Blocks with the
/// same hash are the same block, as they are to the engine.
#[derive(Clone)]
pub struct EngineHashKeys {
    name: Arc<str>,
    masks: [u64; 2],
}

/// The maximum length of a name, in bytes: a snapshot writes the length as one byte.
const MAX_NAME_BYTES: usize = 255;

impl EngineHashKeys {
    /// Creates the mapping for all engines that share a hash function, identified by `name`.
    ///
    /// Under another name the same hashes have other keys. Returns `None` if the name is longer
    /// than 255 bytes.
    pub fn new(name: &str) -> Option<Self> {
        (name.len() <= MAX_NAME_BYTES).then(|| Self::from_short_name(name))
    }

    /// Creates the mapping like [`EngineHashKeys::new`], for a name of at most 255 bytes.
    pub(super) fn from_short_name(name: &str) -> Self {
        let mut bytes = [0; 32];
        KeySecret::for_process()
            .derive("chiasm 2026 block keys of engines' hashes", name.as_bytes())
            .fill(&mut bytes);
        let [high, low, ..] = words(&bytes);
        Self { name: name.into(), masks: [high, low] }
    }

    /// Returns the name of the hash function.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the key of the block with this engine hash.
    pub fn key(&self, hash: &ExternalHash) -> BlockKey {
        let [high, low] = match hash {
            ExternalHash::U64(hash) => [*hash; 2],
            ExternalHash::Bytes(bytes) => {
                let [high, low, ..] = words(&blake3::derive_key(
                    "chiasm 2026 block keys of engines' long hashes",
                    bytes,
                ));
                [high, low]
            }
        };
        let high = mixed(high ^ self.masks[0]);
        let low = mixed(low ^ self.masks[1]);
        // Tables use the highest of the 127 bits, trees the lowest.
        BlockKey((u128::from(high) << 63) | u128::from(low >> 1))
    }
}

impl PartialEq for EngineHashKeys {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for EngineHashKeys {}

impl fmt::Debug for EngineHashKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EngineHashKeys").field(&self.name).finish()
    }
}

/// Spreads a number that may not be uniform over all bits. The function is a bijection: the last
/// steps of splitmix64 (Steele, Lea and Flood 2014).
pub(crate) fn mixed(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn keys_depend_on_name_plus_hash_in_all_bits() {
        let one = EngineHashKeys::new("one").unwrap();
        let other = EngineHashKeys::new("other").unwrap();
        assert_eq!(one, EngineHashKeys::new("one").unwrap());
        let hashes = || {
            let bytes =
                (0..500_u32).map(|number| ExternalHash::Bytes(number.to_le_bytes().to_vec()));
            (0..500).map(ExternalHash::U64).chain(bytes)
        };
        let keys: HashSet<BlockKey> =
            hashes().flat_map(|hash| [one.key(&hash), other.key(&hash)]).collect();
        assert_eq!(keys.len(), 2000);
        assert!(
            hashes().all(|hash| keys.contains(&EngineHashKeys::new("one").unwrap().key(&hash)))
        );
        for bit in 0..127 {
            let set = keys.iter().filter(|key| key.get() >> bit & 1 == 1).count();
            assert!((800..1200).contains(&set), "bit {bit} is set in {set} of 2,000");
        }
        assert!(keys.iter().all(|key| key.get() >> 127 == 0));
    }

    #[test]
    fn name_over_255_bytes_is_refused() {
        assert!(EngineHashKeys::new(&"x".repeat(255)).is_some());
        assert!(EngineHashKeys::new(&"x".repeat(256)).is_none());
    }
}
