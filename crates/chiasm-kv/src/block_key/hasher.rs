//! The hasher of maps keyed by [`BlockKey`](crate::BlockKey)s.

use std::hash::{BuildHasherDefault, Hasher};

/// The hash builder for maps such as `HashMap<BlockKey, T, BuildBlockKeyHasher>`.
///
/// A map's key may also pair the block key with a small number, such as a worker id. Block keys are
/// uniform and unknown to clients, so their bits are used without further hashing. Do not use this
/// hasher for keys that contain no block key.
pub type BuildBlockKeyHasher = BuildHasherDefault<BlockKeyHasher>;

/// The hasher of [`BuildBlockKeyHasher`].
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockKeyHasher(u64);

impl Hasher for BlockKeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = self.0.rotate_left(32) ^ number;
    }

    fn write_u128(&mut self, key: u128) {
        self.write_u64(key as u64 ^ (key >> 63) as u64);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::BuildHasher;

    use chiasm_types::{BlockSize, TokenId, WorkerId};

    use super::*;
    use crate::{BlockKey, PromptBlocks, block_keys};

    #[test]
    fn hashes_of_keys_use_all_bits() {
        let tokens: Vec<TokenId> = (0..4096).map(TokenId).collect();
        let prompt = PromptBlocks { tokens: &tokens, ..Default::default() };
        let keys: Vec<BlockKey> = block_keys(&prompt, BlockSize::new(1).unwrap());
        let build = BuildBlockKeyHasher::default();
        let alone = |key: &BlockKey| build.hash_one(key);
        let with_worker = |key: &BlockKey| build.hash_one((WorkerId(3), key));
        let with_other_worker = |key: &BlockKey| build.hash_one((WorkerId(4), key));
        for hashes in
            [Vec::from_iter(keys.iter().map(alone)), keys.iter().map(with_worker).collect()]
        {
            for shift in (0..64).step_by(8) {
                let bytes: HashSet<u8> = hashes.iter().map(|hash| (hash >> shift) as u8).collect();
                assert_eq!(bytes.len(), 256, "bits from {shift}");
            }
        }
        assert!(keys.iter().all(|key| with_worker(key) != with_other_worker(key)));
    }
}
