//! What happens in the modelled engine's KV cache, in events as short as they can be.

use std::hash::Hasher;
use std::num::NonZeroU64;
use std::ops::Range;

use chiasm_kv::BlockKey;
use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

use crate::sequence::Sequence;

/// An engine's hash of a block. Engines have their own; here the low half of our key does, so that
/// nothing is hashed twice.
pub(super) type BlockHash = NonZeroU64;

pub(super) fn hash(key: BlockKey) -> BlockHash {
    NonZeroU64::new(key.get() as u64).unwrap_or(NonZeroU64::MIN)
}

fn external(hash: BlockHash) -> ExternalHash {
    ExternalHash::U64(hash.get())
}

/// Passes a number through: block hashes are uniform already.
#[derive(Default)]
pub(super) struct Uniform(u64);

impl Hasher for Uniform {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 ^ u64::from(*byte));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

/// The events since they were last taken.
pub(super) struct CacheEvents {
    block_size: usize,
    events: Vec<KvEvent>,
}

impl CacheEvents {
    pub(super) fn new(block_size: usize) -> Self {
        Self { block_size, events: Vec::new() }
    }

    /// Others can find these blocks of a sequence; `keys` are those of all its blocks.
    pub(super) fn stored(&mut self, sequence: &Sequence, keys: &[BlockKey], blocks: Range<usize>) {
        let mut token_ids = Vec::with_capacity(blocks.len() * self.block_size);
        sequence
            .tokens(blocks.start * self.block_size..blocks.end * self.block_size, &mut token_ids);
        self.events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: keys[blocks.clone()].iter().map(|key| external(hash(*key))).collect(),
            parent_block_hash: blocks
                .start
                .checked_sub(1)
                .map(|parent| external(hash(keys[parent]))),
            token_ids,
            block_size: self.block_size as u32,
            extra_keys: sequence.extra_keys(blocks, self.block_size),
            ..BlockStored::default()
        }));
    }

    /// A block is gone. vLLM has an event for each; several in one mean the same.
    pub(super) fn evicted(&mut self, hash: BlockHash) {
        match self.events.last_mut() {
            Some(KvEvent::BlockRemoved(removed)) => removed.block_hashes.push(external(hash)),
            _ => self.events.push(KvEvent::BlockRemoved(BlockRemoved {
                block_hashes: vec![external(hash)],
                ..BlockRemoved::default()
            })),
        }
    }

    pub(super) fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }
}
