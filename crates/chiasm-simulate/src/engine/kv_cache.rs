//! The paged KV cache with prefix reuse.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use chiasm_kv::BlockKey;
use chiasm_kv::event::{BlockRemoved, BlockStored, ExternalHash, KvEvent};

use super::free_queue::{BlockId, FreeQueue};
use crate::sequence::Sequence;

/// An engine's hash of a block. Engines have their own; here the low half of our key does, so that nothing is hashed twice. 0
/// is no hash.
type BlockHash = u64;

fn hash(key: BlockKey) -> BlockHash {
    (key.get() as u64).max(1)
}

fn external(hash: BlockHash) -> ExternalHash {
    ExternalHash::U64(hash)
}

/// Block hashes are uniform already.
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

/// The blocks of one request, the first `stored` of which others can find.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    blocks: Vec<BlockId>,
    stored: usize,
}

impl BlockTable {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    hash: BlockHash,
    references: u32,
    /// The next younger copy with the same hash.
    twin: BlockId,
}

/// What vLLM's `BlockPool` and `FullAttentionManager` do for one group of full-attention layers, as the simulated engine of
/// `chiasm-sim-engine` does, which is compared with vLLM's own traces:
/// - a full block gets its hash when its tokens are scheduled, so that the next request of the same step can hit it;
/// - equal blocks are not merged: a hash may be stored, and later removed, several times; a hit takes the oldest;
/// - a free block keeps its content until it is taken for something else, which is when the eviction is reported;
/// - a request's blocks become free last block first; those without a hash are taken again before all others.
pub(crate) struct KvCache {
    block_size: usize,
    blocks: Vec<Block>,
    /// The oldest block with each hash.
    oldest: HashMap<BlockHash, BlockId, BuildHasherDefault<Uniform>>,
    free: FreeQueue,
    events: Vec<KvEvent>,
}

impl KvCache {
    pub(crate) fn new(num_blocks: u32, block_size: usize) -> Self {
        Self {
            block_size,
            blocks: vec![Block::default()],
            oldest: HashMap::default(),
            free: FreeQueue::new(num_blocks),
            events: Vec::new(),
        }
    }

    /// Blocks that no request holds.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// The longest run of cached blocks at the start of `keys` that covers at most `max_tokens` tokens.
    pub(crate) fn find(&self, keys: &[BlockKey], max_tokens: usize, hits: &mut Vec<BlockId>) {
        hits.clear();
        let keys = keys.iter().take(max_tokens / self.block_size);
        hits.extend(keys.map_while(|key| self.oldest.get(&hash(*key)).copied()));
    }

    /// How many of these blocks are free.
    pub(crate) fn idle(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.blocks[**block as usize].references == 0).count()
    }

    /// Gives an empty table these blocks.
    pub(crate) fn take(&mut self, table: &mut BlockTable, hits: &[BlockId]) {
        for &id in hits {
            let block = &mut self.blocks[id as usize];
            if block.references == 0 {
                self.free.remove(id);
            }
            block.references += 1;
        }
        table.blocks.extend_from_slice(hits);
        table.stored = hits.len();
    }

    /// Gives a table room for so many tokens. Returns how many blocks it took; they must be free.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> usize {
        let missing = tokens.div_ceil(self.block_size).saturating_sub(table.blocks.len());
        for _ in 0..missing {
            let Some(id) = self.free.pop() else {
                debug_assert!(false, "more blocks are promised than there are");
                break;
            };
            if id as usize == self.blocks.len() {
                self.blocks.push(Block::default());
            }
            self.evict(id);
            self.blocks[id as usize].references = 1;
            table.blocks.push(id);
        }
        missing
    }

    /// Makes the blocks findable that are full once `computed` tokens of the sequence are computed.
    pub(crate) fn store(&mut self, table: &mut BlockTable, sequence: &Sequence, keys: &[BlockKey], computed: usize) {
        let (first, end) = (table.stored, computed / self.block_size);
        if first >= end {
            return;
        }
        let hashes = keys[first..end].iter().map(|key| hash(*key));
        for (&id, hash) in table.blocks[first..end].iter().zip(hashes.clone()) {
            self.blocks[id as usize].hash = hash;
            let oldest = *self.oldest.entry(hash).or_insert(id);
            if oldest != id {
                let mut last = oldest;
                while self.blocks[last as usize].twin != 0 {
                    last = self.blocks[last as usize].twin;
                }
                self.blocks[last as usize].twin = id;
            }
        }
        table.stored = end;
        let mut token_ids = Vec::with_capacity((end - first) * self.block_size);
        sequence.tokens(first * self.block_size..end * self.block_size, &mut token_ids);
        self.events.push(KvEvent::BlockStored(BlockStored {
            block_hashes: hashes.map(external).collect(),
            parent_block_hash: first.checked_sub(1).map(|parent| external(hash(keys[parent]))),
            token_ids,
            block_size: self.block_size as u32,
            extra_keys: sequence.extra_keys(first..end, self.block_size),
            ..BlockStored::default()
        }));
    }

    /// Gives a request's blocks back, last one first.
    pub(crate) fn release(&mut self, table: BlockTable) {
        for &id in table.blocks.iter().rev() {
            let block = &mut self.blocks[id as usize];
            block.references -= 1;
            if block.references > 0 {
                continue;
            }
            match block.hash {
                0 => self.free.push_empty(id),
                _ => self.free.push_cached(id),
            }
        }
    }

    fn evict(&mut self, id: BlockId) {
        let Block { hash, twin, .. } = std::mem::take(&mut self.blocks[id as usize]);
        if hash == 0 {
            return;
        }
        match self.oldest.get_mut(&hash) {
            Some(oldest) if *oldest == id && twin != 0 => *oldest = twin,
            Some(oldest) if *oldest == id => drop(self.oldest.remove(&hash)),
            Some(oldest) => {
                let mut before = *oldest;
                while self.blocks[before as usize].twin != id {
                    before = self.blocks[before as usize].twin;
                }
                self.blocks[before as usize].twin = twin;
            }
            None => {}
        }
        // vLLM has an event per block; several in one mean the same.
        match self.events.last_mut() {
            Some(KvEvent::BlockRemoved(removed)) => removed.block_hashes.push(external(hash)),
            _ => self.events.push(KvEvent::BlockRemoved(BlockRemoved {
                block_hashes: vec![external(hash)],
                ..BlockRemoved::default()
            })),
        }
    }

    /// What happened since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Distinct hashes that can be found.
    #[cfg(test)]
    pub(crate) fn distinct(&self) -> usize {
        self.oldest.len()
    }

    #[cfg(test)]
    pub(crate) fn holds(&self, key: BlockKey) -> bool {
        self.oldest.contains_key(&hash(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::Piece;

    const SIZE: usize = 4;

    fn text(seed: u64, length: u32) -> Sequence {
        Sequence::new(&[Piece::Text { seed, length }], Piece::Text { seed: 0, length: 1 })
    }

    struct Fixture {
        cache: KvCache,
        hits: Vec<BlockId>,
    }

    impl Fixture {
        fn new(blocks: u32) -> Self {
            Self { cache: KvCache::new(blocks, SIZE), hits: Vec::new() }
        }

        /// Computes a whole prompt, with what is found of it; tells how many blocks were.
        fn hold(&mut self, sequence: &Sequence) -> (BlockTable, usize) {
            let keys = sequence.keys(chiasm_types::BlockSize::new(SIZE as u32).unwrap());
            let mut table = BlockTable::default();
            self.cache.find(&keys, sequence.prompt() - 1, &mut self.hits);
            self.cache.take(&mut table, &self.hits);
            self.cache.grow(&mut table, sequence.prompt());
            self.cache.store(&mut table, sequence, &keys, sequence.prompt());
            (table, self.hits.len())
        }

        fn compute(&mut self, sequence: &Sequence) -> usize {
            let (table, hits) = self.hold(sequence);
            self.cache.release(table);
            hits
        }
    }

    #[test]
    fn the_last_token_is_always_computed_again() {
        let mut fixture = Fixture::new(10);
        assert_eq!(fixture.compute(&text(1, 12)), 0);
        assert_eq!(fixture.compute(&text(1, 12)), 2);
        assert_eq!(fixture.compute(&text(1, 13)), 3);
    }

    #[test]
    fn the_least_recently_used_goes_first_and_a_chain_from_its_end() {
        let mut fixture = Fixture::new(6);
        fixture.compute(&text(1, 13));
        fixture.compute(&text(2, 9));
        // Blocks without a hash are taken first, so 1 has three blocks, 2 two of them, one is empty.
        fixture.cache.take_events();
        assert_eq!(fixture.compute(&text(3, 8)), 0);
        let removed = fixture.cache.take_events();
        let evicted: Vec<usize> = removed
            .iter()
            .filter_map(|event| match event {
                KvEvent::BlockRemoved(removed) => Some(removed.block_hashes.len()),
                _ => None,
            })
            .collect();
        assert_eq!(evicted, [1]);
        // Of 1 the last block is gone, of 2 none.
        fixture.cache.find(&text(1, 13).keys(chiasm_types::BlockSize::new(4).unwrap()), 13, &mut fixture.hits);
        assert_eq!(fixture.hits.len(), 2);
        fixture.cache.find(&text(2, 9).keys(chiasm_types::BlockSize::new(4).unwrap()), 9, &mut fixture.hits);
        assert_eq!(fixture.hits.len(), 2);
    }

    #[test]
    fn a_hit_block_is_out_of_danger_while_it_is_held() {
        let mut fixture = Fixture::new(4);
        fixture.compute(&text(1, 9));
        let (held, hits) = fixture.hold(&text(1, 9));
        assert_eq!(hits, 2);
        fixture.compute(&text(2, 4));
        assert_eq!(fixture.compute(&text(1, 8)), 1);
        fixture.cache.release(held);
        assert_eq!(fixture.cache.free(), 4);
    }

    #[test]
    fn copies_are_told_and_removed_one_by_one() {
        let mut fixture = Fixture::new(4);
        // A prompt of exactly two blocks hits one and computes the other again.
        let (first, _) = fixture.hold(&text(1, 8));
        let (second, _) = fixture.hold(&text(1, 8));
        fixture.cache.release(first);
        fixture.cache.release(second);
        assert_eq!(fixture.cache.distinct(), 2);
        // One block is unused; two more drive out both copies of the second block.
        fixture.compute(&text(2, 12));
        let count = |events: &[KvEvent]| {
            let of = |event: &KvEvent| match event {
                KvEvent::BlockStored(stored) => stored.block_hashes.len() as isize,
                KvEvent::BlockRemoved(removed) => -(removed.block_hashes.len() as isize),
                _ => 0,
            };
            events.iter().map(of).sum::<isize>()
        };
        assert_eq!(count(&fixture.cache.take_events()), 4);
        assert_eq!(fixture.cache.distinct(), 4);
    }
}
