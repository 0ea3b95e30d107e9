//! The KV events of a modelled engine, in their shortest form.

use std::hash::Hasher;
use std::num::NonZeroU64;
use std::ops::Range;

use chiasm_kv::BlockKey;
use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

use crate::sequence::Sequence;

/// An engine's hash of a block. Real engines compute their own; here it is the low half of the
/// block key, so that nothing is hashed twice.
pub(super) type BlockHash = NonZeroU64;

/// Returns the engine's hash of a block.
pub(super) fn block_hash(key: BlockKey) -> BlockHash {
    NonZeroU64::new(key.get() as u64).unwrap_or(NonZeroU64::MIN)
}

fn external(hash: BlockHash) -> ExternalHash {
    ExternalHash::U64(hash.get())
}

/// A hasher that returns its input: block hashes are uniform already.
#[derive(Default)]
pub(super) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
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

/// The events since the last call of [`CacheEvents::take`].
pub(super) struct CacheEvents {
    block_size: usize,
    events: Vec<KvEvent>,
}

impl CacheEvents {
    /// Creates an empty list.
    pub(super) fn new(block_size: usize) -> Self {
        Self { block_size, events: Vec::new() }
    }

    /// Records that other requests can find these blocks of a sequence. `keys` are the keys of all
    /// its blocks.
    pub(super) fn stored(&mut self, sequence: &Sequence, keys: &[BlockKey], blocks: Range<usize>) {
        let mut token_ids = Vec::with_capacity(blocks.len() * self.block_size);
        sequence
            .tokens(blocks.start * self.block_size..blocks.end * self.block_size, &mut token_ids);
        self.events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: keys[blocks.clone()]
                .iter()
                .map(|key| external(block_hash(*key)))
                .collect(),
            parent_block_hash: blocks
                .start
                .checked_sub(1)
                .map(|parent| external(block_hash(keys[parent]))),
            token_ids,
            block_size: self.block_size as u32,
            extra_keys: sequence.extra_keys(blocks, self.block_size),
            ..BlockStored::default()
        }));
    }

    /// Records that a block was evicted. vLLM sends an event for each; here several are merged into
    /// one, which means the same.
    pub(super) fn evicted(&mut self, hash: BlockHash) {
        match self.events.last_mut() {
            Some(KvEvent::BlockRemoved(removed)) => removed.block_hashes.push(external(hash)),
            _ => self.events.push(KvEvent::BlockRemoved(BlockRemoved {
                block_hashes: vec![external(hash)],
                ..BlockRemoved::default()
            })),
        }
    }

    /// Returns the events and clears the list.
    pub(super) fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }
}
