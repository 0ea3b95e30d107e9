//! Blocks that follow each other, and how their first one is found.

use std::sync::atomic::AtomicU32;

use super::{NONE, RunId, Spot};
use crate::BlockKey;
use crate::index::holders::Holders;
use crate::index::table::Slot;

/// 64 bytes.
pub(in crate::index) struct Run {
    /// Of its blocks. Those that nobody holds are kept while something comes after them.
    pub(in crate::index) keys: Vec<BlockKey>,
    pub(in crate::index) holders: Holders,
    /// The block before the first; its run is [`NONE`] at the start of a prompt.
    parent: Spot,
    /// Where it went on before it was split, or [`NONE`].
    tail: RunId,
    /// Runs that start after its last block, beside the tail.
    pub(super) children: u32,
    pub(in crate::index) used: AtomicU32,
}

impl Default for Run {
    /// Of no blocks.
    fn default() -> Self {
        let (keys, holders, used) = (Vec::new(), Holders::default(), AtomicU32::new(0));
        Self { keys, holders, parent: Spot { run: NONE, at: 0 }, tail: NONE, children: 0, used }
    }
}

impl Run {
    pub(super) fn new(keys: Vec<BlockKey>, holders: Holders, parent: Option<Spot>) -> Self {
        Self { keys, holders, parent: parent.unwrap_or(Spot { run: NONE, at: 0 }), ..Self::default() }
    }

    pub(super) fn parent(&self) -> Option<Spot> {
        (self.parent.run != NONE).then_some(self.parent)
    }

    pub(super) fn tail(&self) -> Option<RunId> {
        (self.tail != NONE).then_some(self.tail)
    }

    pub(super) fn set_tail(&mut self, tail: Option<RunId>) {
        self.tail = tail.unwrap_or(NONE);
    }

    pub(in crate::index) fn len(&self) -> u32 {
        self.keys.len() as u32
    }

    pub(super) fn bytes(&self) -> usize {
        self.keys.capacity() * size_of::<BlockKey>() + self.holders.bytes()
    }

    /// Into memory of few different sizes, which allocators have at hand; most of glibc's `realloc` is not even tried that way.
    pub(super) fn extend(&mut self, keys: &[BlockKey]) {
        let len = self.keys.len() + keys.len();
        if len > self.keys.capacity() {
            let mut grown = Vec::with_capacity(len.max(self.keys.len() * 9 / 8).next_multiple_of(4));
            grown.extend_from_slice(&self.keys);
            self.keys = grown;
        }
        self.keys.extend_from_slice(keys);
    }

    /// How many of the keys are those of this run from `at` on. Keys are chained: if two agree, those before do.
    pub(in crate::index) fn agrees(&self, at: u32, keys: &[BlockKey]) -> u32 {
        let ours = &self.keys[at as usize..];
        let most = ours.len().min(keys.len());
        if most == 0 || ours[most - 1] == keys[most - 1] {
            return most as u32;
        }
        if ours[0] != keys[0] {
            return 0;
        }
        let (mut low, mut high) = (1, most - 1);
        while low < high {
            let middle = low.midpoint(high);
            if ours[middle] == keys[middle] {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low as u32
    }
}

/// A run by a part of its first key; the rest of it is in the run.
#[derive(Clone, Copy)]
pub(super) struct First {
    tag: u32,
    pub(super) run: RunId,
}

impl First {
    pub(super) fn new(key: BlockKey, run: RunId) -> Self {
        Self { tag: Self::tag(key), run }
    }

    /// Keys are uniform below 2^127.
    fn tag(key: BlockKey) -> u32 {
        (key.get() >> 95) as u32
    }

    pub(super) fn hash_of(key: BlockKey) -> u64 {
        u64::from(Self::tag(key)) << 32
    }
}

impl Slot for First {
    const FREE: Self = Self { tag: 0, run: NONE };

    fn is_free(&self) -> bool {
        self.run == NONE
    }

    fn hash(&self) -> u64 {
        if self.is_free() { u64::MAX } else { u64::from(self.tag) << 32 }
    }
}
