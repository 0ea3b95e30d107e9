//! Blocks that follow each other, and how their first one is found.

use std::sync::atomic::AtomicU32;

use super::blocks::Blocks;
use super::{NONE, RunId, Spot};
use crate::BlockKey;
use crate::index::holders::Holders;
use crate::index::table::Slot;

/// One cache line.
#[repr(align(64))]
pub(in crate::index) struct Run {
    /// The blocks. Those that nobody holds are kept while something comes after them.
    pub(in crate::index) blocks: Blocks,
    pub(in crate::index) holders: Holders,
    /// The block before the first; its run is [`NONE`] at the start of a prompt.
    parent: Spot,
    /// The run that its blocks went on in before it was split.
    tail: First,
    /// Runs that start after its last block, beside the tail.
    pub(super) children: u32,
    pub(in crate::index) used: AtomicU32,
}

impl Default for Run {
    /// A run of no blocks.
    fn default() -> Self {
        let (blocks, holders, used) = (Blocks::default(), Holders::default(), AtomicU32::new(0));
        Self { blocks, holders, parent: Spot { run: NONE, at: 0 }, tail: First::FREE, children: 0, used }
    }
}

impl Run {
    pub(super) fn new(blocks: Blocks, holders: Holders, parent: Option<Spot>) -> Self {
        Self { blocks, holders, parent: parent.unwrap_or(Spot { run: NONE, at: 0 }), ..Self::default() }
    }

    pub(super) fn parent(&self) -> Option<Spot> {
        (self.parent.run != NONE).then_some(self.parent)
    }

    pub(super) fn tail(&self) -> Option<RunId> {
        (!self.tail.is_free()).then_some(self.tail.run)
    }

    /// The tail if it may go on with a block. Most prompts part where a run was split.
    pub(super) fn tail_with(&self, key: BlockKey) -> Option<RunId> {
        self.tail().filter(|_| self.tail.tag == First::tag(key))
    }

    pub(super) fn set_tail(&mut self, tail: Option<First>) {
        self.tail = tail.unwrap_or(First::FREE);
    }

    /// Takes the tail off, to be handed on to another run.
    pub(super) fn take_tail(&mut self) -> Option<First> {
        let tail = std::mem::replace(&mut self.tail, First::FREE);
        (!tail.is_free()).then_some(tail)
    }

    pub(in crate::index) fn len(&self) -> u32 {
        self.blocks.len()
    }

    pub(super) fn bytes(&self) -> usize {
        self.blocks.bytes() + self.holders.bytes()
    }

    /// How many of the keys are those of this run from `at` on. Keys are chained: if two agree, those before do.
    pub(in crate::index) fn agrees<T>(&self, at: u32, others: &[T], key: impl Fn(&T) -> BlockKey) -> u32 {
        let most = ((self.len() - at) as usize).min(others.len());
        let same = |other: usize| self.blocks.key(at + other as u32) == key(&others[other]);
        if most == 0 || same(most - 1) {
            return most as u32;
        }
        if !same(0) {
            return 0;
        }
        let (mut low, mut high) = (1, most - 1);
        while low < high {
            let middle = low.midpoint(high);
            if same(middle) {
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
