//! What keys are made of: what a block holds, or what its engine calls it.

use std::fmt;
use std::sync::Arc;

use super::secret::KeySecret;
use super::{BlockKey, words};
use crate::event::ExternalHash;

/// What the keys of a worker's blocks are made of. Keys of different schemes are never equal, so
/// workers of several schemes can be in one index: a lookup by the keys of one finds the workers of
/// that one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KeyScheme {
    /// What events say that blocks hold: tokens, media, LoRA, salt. For prompts
    /// [`block_keys`](crate::block_keys) makes them.
    #[default]
    Content,
    /// What the engine calls its blocks, as its events say nothing else of them. For prompts
    /// [`EngineHashing::keys`](crate::EngineHashing::keys) makes them, from hashes that are made as
    /// the engine does.
    EngineHashes(EngineHashKeys),
}

/// Keys of blocks that are told of by their engine's hashes alone.
///
/// The hashes have to be chained: one tells its block and all before it. Two blocks that have one
/// hash are one to the engine, and so they are here.
#[derive(Clone)]
pub struct EngineHashKeys {
    name: Arc<str>,
    masks: [u64; 2],
}

/// Bytes that a name may have.
const MOST: usize = 255;

impl EngineHashKeys {
    /// Keys of engines that hash alike: `name` says which, in up to 255 bytes. Under another name
    /// the same hashes have other keys. `None` for a name that is too long.
    pub fn new(name: &str) -> Option<Self> {
        (name.len() <= MOST).then(|| Self::of(name))
    }

    /// The same for a name that is short.
    pub(super) fn of(name: &str) -> Self {
        let mut bytes = [0; 32];
        KeySecret::of_process()
            .derive("chiasm 2026 block keys of engines' hashes", name.as_bytes())
            .fill(&mut bytes);
        let [high, low, ..] = words(&bytes);
        Self { name: name.into(), masks: [high, low] }
    }

    /// The name that these keys were made with.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The key of the block that such an engine calls by a hash.
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
        let (high, low) = (mixed(high ^ self.masks[0]), mixed(low ^ self.masks[1]));
        // 127 bits, of which those from the highest down and from the lowest up are what tables and
        // trees go by.
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

/// Spreads what nothing says to be uniform over all bits, one to one (splitmix64's last steps:
/// Steele, Lea and Flood 2014).
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
    fn keys_follow_from_name_and_hash_and_spread_over_all_bits() {
        let (one, other) =
            (EngineHashKeys::new("one").unwrap(), EngineHashKeys::new("other").unwrap());
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
    fn names_are_short() {
        assert!(EngineHashKeys::new(&"x".repeat(255)).is_some());
        assert!(EngineHashKeys::new(&"x".repeat(256)).is_none());
    }
}
