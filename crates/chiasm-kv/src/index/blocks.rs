//! Which workers hold a block: one table for all of them, in shards.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::clock::Clock;
use super::holders::{Holders, Place};
use super::table::{Slot, Table};
use crate::BlockKey;

/// A power of two. A shard is locked for the time of one probe, so that readers and writers rarely meet.
const SHARDS: usize = 256;

pub(super) struct Blocks {
    shards: Box<[Shard]>,
    bytes: AtomicUsize,
    len: AtomicUsize,
}

/// On cache lines of its own, lest locks of neighbours disturb each other.
#[repr(align(64))]
struct Shard(RwLock<Table<Block>>);

struct Block {
    key: BlockKey,
    /// Empty in a free slot only.
    holders: Holders,
}

impl Default for Block {
    fn default() -> Self {
        Self { key: BlockKey::NONE, holders: Holders::default() }
    }
}

impl Slot for Block {
    type Key = BlockKey;

    fn key(&self) -> Option<BlockKey> {
        (self.key != BlockKey::NONE).then_some(self.key)
    }

    /// Keys are uniform below 2^127. The lowest bits choose the shard.
    fn hash(key: BlockKey) -> u64 {
        (key.get() >> 63) as u64
    }
}

impl Blocks {
    pub(super) fn new() -> Self {
        let shards: Box<[Shard]> = (0..SHARDS).map(|_| Shard(RwLock::new(Table::new()))).collect();
        let bytes = AtomicUsize::new(size_of_val(&*shards));
        Self { shards, bytes, len: AtomicUsize::new(0) }
    }

    /// Whether the worker did not hold the block before.
    pub(super) fn insert(&self, key: BlockKey, place: Place, clock: &Clock) -> bool {
        let mut shard = self.write(key);
        let (bytes, len) = (shard.bytes(), shard.len());
        let block = shard.get_or_insert_with(key, || Block { key, holders: Holders::default() });
        let heap = block.holders.bytes();
        let new = block.holders.insert(place);
        clock.note(&block.holders.used);
        let more = block.holders.bytes();
        self.count(bytes + heap, shard.bytes() + more);
        self.len.fetch_add(shard.len() - len, Ordering::Relaxed);
        new
    }

    pub(super) fn remove(&self, key: BlockKey, place: Place) {
        let mut shard = self.write(key);
        let bytes = shard.bytes();
        let Some(block) = shard.get_mut(key) else { return };
        let heap = block.holders.bytes();
        block.holders.remove(place);
        let less = block.holders.bytes();
        if block.holders.is_empty() {
            shard.remove(key);
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
        self.count(bytes + heap, shard.bytes() + less);
    }

    pub(super) fn contains(&self, key: BlockKey, place: Place) -> bool {
        self.read(key).get(key).is_some_and(|block| block.holders.contains(place))
    }

    /// Writes those among `from` that hold the block into `into`, as bits, and notes its use.
    pub(super) fn intersect(&self, key: BlockKey, from: &[u64], into: &mut [u64], clock: &Clock) {
        match self.read(key).get(key) {
            Some(block) => {
                block.holders.intersect(from, into);
                clock.note(&block.holders.used);
            }
            None => into.fill(0),
        }
    }

    /// Ticks since the block was used.
    pub(super) fn age(&self, key: BlockKey, clock: &Clock) -> Option<u32> {
        self.read(key).get(key).map(|block| clock.age(&block.holders.used))
    }

    /// Blocks that somebody holds.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Gives back what is free.
    pub(super) fn fit(&self) {
        for shard in &self.shards {
            let mut shard = shard.0.write().unwrap_or_else(PoisonError::into_inner);
            let bytes = shard.bytes();
            shard.fit();
            self.count(bytes, shard.bytes());
        }
    }

    fn count(&self, before: usize, after: usize) {
        if after != before {
            // Wraps around for a decrease, as the sum does.
            self.bytes.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    // A panic inside one of these methods would be a fault of the table; what others can read is still in order.

    fn read(&self, key: BlockKey) -> RwLockReadGuard<'_, Table<Block>> {
        self.shard(key).read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, key: BlockKey) -> RwLockWriteGuard<'_, Table<Block>> {
        self.shard(key).write().unwrap_or_else(PoisonError::into_inner)
    }

    fn shard(&self, key: BlockKey) -> &RwLock<Table<Block>> {
        &self.shards[key.get() as usize % SHARDS].0
    }
}
