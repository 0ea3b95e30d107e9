//! The modelled engine's KV cache: what `chiasm-engine-caches` decides, told in events as short as they can be.

use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZeroU64;

use chiasm_engine_caches::{BlockId, BlockTable, PagedCache};
use chiasm_kv::BlockKey;
use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

use crate::sequence::Sequence;

/// An engine's hash of a block. Engines have their own; here the low half of our key does, so that nothing is hashed twice.
type BlockHash = NonZeroU64;

fn hash(key: BlockKey) -> BlockHash {
    NonZeroU64::new(key.get() as u64).unwrap_or(NonZeroU64::MIN)
}

fn external(hash: BlockHash) -> ExternalHash {
    ExternalHash::U64(hash.get())
}

/// Passes a number through: block hashes are uniform already.
#[derive(Default)]
struct Uniform(u64);

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

/// The cache, and the events since they were last taken.
pub(crate) struct KvCache {
    block_size: usize,
    cache: PagedCache<BlockHash, BuildHasherDefault<Uniform>>,
    events: Vec<KvEvent>,
}

impl KvCache {
    pub(crate) fn new(num_blocks: u32, block_size: usize) -> Self {
        Self { block_size, cache: PagedCache::new(num_blocks, block_size), events: Vec::new() }
    }

    /// Number of blocks that no request holds.
    pub(crate) fn free(&self) -> usize {
        self.cache.free()
    }

    /// Share of the blocks that requests hold, 0 to 1.
    pub(crate) fn usage(&self) -> f64 {
        self.cache.usage()
    }

    /// Finds the longest run of cached blocks at the start of `keys` that covers at most `max_tokens` tokens.
    pub(crate) fn find(&self, keys: &[BlockKey], max_tokens: usize, hits: &mut Vec<BlockId>) {
        self.cache.find(keys.iter().copied().map(hash), max_tokens, hits);
    }

    /// How many of these blocks are free.
    pub(crate) fn idle(&self, blocks: &[BlockId]) -> usize {
        self.cache.idle(blocks)
    }

    /// Gives an empty table these blocks.
    pub(crate) fn take(&mut self, table: &mut BlockTable, hits: &[BlockId]) {
        self.cache.take(table, hits);
    }

    /// Gives a table room for so many tokens. Returns how many blocks it took; they must be free.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> usize {
        let Self { cache, events, .. } = self;
        // vLLM has an event per block; several in one mean the same.
        cache.grow(table, tokens, |hash| match events.last_mut() {
            Some(KvEvent::BlockRemoved(removed)) => removed.block_hashes.push(external(hash)),
            _ => events.push(KvEvent::BlockRemoved(BlockRemoved {
                block_hashes: vec![external(hash)],
                ..BlockRemoved::default()
            })),
        })
    }

    /// Makes the blocks findable that are full once `computed` tokens of the sequence are computed.
    pub(crate) fn store(&mut self, table: &mut BlockTable, sequence: &Sequence, keys: &[BlockKey], computed: usize) {
        let stored = self.cache.store(table, computed, |block| hash(keys[block]));
        if stored.is_empty() {
            return;
        }
        let mut token_ids = Vec::with_capacity(stored.len() * self.block_size);
        sequence.tokens(stored.start * self.block_size..stored.end * self.block_size, &mut token_ids);
        self.events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: keys[stored.clone()].iter().map(|key| external(hash(*key))).collect(),
            parent_block_hash: stored.start.checked_sub(1).map(|parent| external(hash(keys[parent]))),
            token_ids,
            block_size: self.block_size as u32,
            extra_keys: sequence.extra_keys(stored, self.block_size),
            ..BlockStored::default()
        }));
    }

    /// Gives a request's blocks back, last one first; the table is empty afterwards.
    pub(crate) fn release(&mut self, table: &mut BlockTable) {
        self.cache.release(table);
    }

    /// What happened since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Number of different hashes that can be found.
    #[cfg(test)]
    pub(crate) fn distinct(&self) -> usize {
        self.cache.distinct()
    }

    #[cfg(test)]
    pub(crate) fn holds(&self, key: BlockKey) -> bool {
        let mut hits = Vec::new();
        self.find(&[key], self.block_size, &mut hits);
        !hits.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::Piece;

    #[test]
    fn copies_are_told_and_removed_one_by_one() {
        const SIZE: usize = 4;
        let mut cache = KvCache::new(4, SIZE);
        let mut hold = |seed, length| {
            let sequence = Sequence::new(&[Piece::Text { seed, length }], Piece::Text { seed: 0, length: 1 });
            let keys = sequence.keys(chiasm_types::BlockSize::new(SIZE as u32).unwrap());
            let (mut table, mut hits) = (BlockTable::default(), Vec::new());
            cache.find(&keys, sequence.prompt() - 1, &mut hits);
            cache.take(&mut table, &hits);
            cache.grow(&mut table, sequence.prompt());
            cache.store(&mut table, &sequence, &keys, sequence.prompt());
            table
        };
        // A prompt of exactly two blocks hits one and computes the other again.
        let mut tables = [hold(1, 8), hold(1, 8)];
        tables.iter_mut().for_each(|table| cache.release(table));
        let count = |events: &[KvEvent]| {
            let of = |event: &KvEvent| match event {
                KvEvent::BlockStored(stored) => stored.block_hashes.len() as isize,
                KvEvent::BlockRemoved(removed) => -(removed.block_hashes.len() as isize),
                _ => 0,
            };
            events.iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(count(&cache.take_events()), [2, 1]);
    }
}
