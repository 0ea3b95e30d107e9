//! The blocks of a run: what they are and what they are called.

use crate::BlockKey;
use crate::index::part::Name;

/// A block as an engine tells of it: its key, and the engine's name for it.
#[derive(Clone, Copy)]
pub(in crate::index) struct Block {
    pub(in crate::index) key: BlockKey,
    pub(in crate::index) name: Name,
}

/// Keys side by side, as lookups want them, and behind them the names, in one piece of memory: two words for each key there is
/// room for, then one for each name.
#[derive(Default)]
pub(in crate::index) struct Blocks {
    words: Box<[u64]>,
    len: u32,
}

/// Words of a block.
const WORDS: usize = 3;

impl Blocks {
    pub(super) fn new(blocks: &[Block]) -> Self {
        let mut new = Self::with_room_for(blocks.len());
        new.push(blocks);
        new
    }

    fn with_room_for(blocks: usize) -> Self {
        Self { words: vec![0; WORDS * blocks].into(), len: 0 }
    }

    pub(in crate::index) fn len(&self) -> u32 {
        self.len
    }

    fn room(&self) -> usize {
        self.words.len() / WORDS
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    pub(in crate::index) fn key(&self, at: u32) -> BlockKey {
        let [low, high] = self.words.as_chunks().0[at as usize];
        BlockKey::of_words(low, high)
    }

    pub(in crate::index) fn name(&self, at: u32) -> Name {
        self.names()[at as usize]
    }

    pub(in crate::index) fn names(&self) -> &[Name] {
        let first = (WORDS - 1) * self.room();
        &self.words[first..first + self.len as usize]
    }

    /// Adds blocks at the end. When memory is too small, takes one of few different sizes, which allocators have at hand;
    /// most of glibc's `realloc` is not even tried that way.
    pub(super) fn extend(&mut self, blocks: &[Block]) {
        let len = self.len as usize + blocks.len();
        if len > self.room() {
            self.move_to(len.max(self.len as usize * 9 / 8).next_multiple_of(4));
        }
        self.push(blocks);
    }

    /// There has to be room.
    fn push(&mut self, blocks: &[Block]) {
        let (from, to) = (self.len as usize, self.len as usize + blocks.len());
        let (keys, names) = self.words.split_at_mut((WORDS - 1) * (self.words.len() / WORDS));
        for (into, block) in keys.as_chunks_mut().0[from..to].iter_mut().zip(blocks) {
            *into = block.key.words();
        }
        names[from..to].iter_mut().zip(blocks).for_each(|(into, block)| *into = block.name);
        self.len = to as u32;
    }

    /// Moves to memory for so many blocks, which are no less than there are.
    fn move_to(&mut self, room: usize) {
        let (mut moved, len) = (Self::with_room_for(room), self.len as usize);
        moved.words[..2 * len].copy_from_slice(&self.words[..2 * len]);
        moved.words[2 * room..2 * room + len].copy_from_slice(self.names());
        moved.len = self.len;
        *self = moved;
    }

    /// Memory is given back when much of it is free.
    pub(super) fn truncate(&mut self, len: u32) {
        self.len = self.len.min(len);
        if self.room() > 8 + self.len as usize * 5 / 4 {
            self.move_to(self.len as usize);
        }
    }

    /// Keeps the first ones and returns the others, each with no more memory than it needs.
    pub(super) fn split_off(&mut self, at: u32) -> Self {
        let rest = (at..self.len).map(|at| Block { key: self.key(at), name: self.name(at) });
        let rest = Self::new(&rest.collect::<Vec<_>>());
        self.len = self.len.min(at);
        self.move_to(self.len as usize);
        rest
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn are_what_a_list_would_be(steps in vec((0..3_u32, 0..40_u32), 0..40)) {
            let (mut blocks, mut model, mut next) = (Blocks::default(), Vec::new(), 0_u64);
            for (kind, number) in steps {
                match kind {
                    0 => {
                        let new = |name: u64| Block { key: BlockKey::of_words(!name, name >> 1), name };
                        let more: Vec<_> = (next..next + u64::from(number)).map(new).collect();
                        next += u64::from(number);
                        blocks.extend(&more);
                        model.extend(more.iter().map(|block| (block.key, block.name)));
                    }
                    1 => {
                        blocks.truncate(number);
                        model.truncate(number as usize);
                        prop_assert!(blocks.bytes() <= 24 * (8 + model.len() * 5 / 4).max(model.len() * 2 + 48));
                    }
                    _ => {
                        let at = number.min(blocks.len());
                        let (rest, expected) = (blocks.split_off(at), model.split_off(at as usize));
                        prop_assert_eq!((0..rest.len()).map(|at| (rest.key(at), rest.name(at))).collect::<Vec<_>>(), expected);
                        prop_assert_eq!(rest.bytes(), 24 * rest.len() as usize);
                    }
                }
                let found: Vec<_> = (0..blocks.len()).map(|at| (blocks.key(at), blocks.name(at))).collect();
                prop_assert_eq!(&found, &model);
                prop_assert_eq!(blocks.names(), model.iter().map(|(_, name)| *name).collect::<Vec<_>>());
            }
        }
    }
}
