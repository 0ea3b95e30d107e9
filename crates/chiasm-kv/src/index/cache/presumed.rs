//! Presumed blocks: blocks that a worker presumably holds, although no event has stored them.
//!
//! They are entries like those of events, with a hash derived from the key. If another block
//! already has that hash, the presumed block and all blocks after it are not recorded.

use super::{Cache, Entry, Prompts, Trees};
use crate::BlockKey;

impl Cache {
    /// Records the blocks of a chain, from the start of a prompt on.
    pub(in crate::index) fn presume(&mut self, chain: &[BlockKey], prompts: &Prompts) {
        let Some(first) = chain.first() else { return };
        let number = Trees::tree_of(*first);
        let mut parent = None;
        let mut rest = chain;
        let mut segments = Vec::new();
        let mut added = Vec::new();
        while !rest.is_empty() {
            let known = rest.iter().take_while(|key| self.entry(key.as_engine_hash()).is_some());
            let known: Vec<_> =
                known.map(|key| (key, self.position_of(key.as_engine_hash()))).collect();
            let mut tree = prompts.trees.write(number);
            for (key, position) in &known {
                // Otherwise the hash belongs to another block or to one without a key.
                match position.filter(|position| Trees::tree_with(position.node) == number) {
                    Some(position) if tree.key(position) == Some(**key) => parent = Some(position),
                    _ => return,
                }
            }
            rest = &rest[known.len()..];
            let missing =
                rest.iter().take_while(|key| self.entry(key.as_engine_hash()).is_none()).count();
            let (keys, after) = rest.split_at(missing);
            let hashes: Vec<_> = keys.iter().map(|key| key.as_engine_hash()).collect();
            segments.clear();
            tree.hold(parent, keys, self.holder, &prompts.uses, &mut segments);
            self.count_copies(&hashes, keys, &segments, &mut added);
            self.recheck(&mut tree, &mut added);
            parent = keys.last().and_then(|key| self.position_of(key.as_engine_hash())).or(parent);
            rest = after;
        }
    }

    /// Removes presumed blocks. Returns the number of blocks that were not recorded.
    pub(in crate::index) fn forget_presumed(
        &mut self,
        keys: &[BlockKey],
        prompts: &Prompts,
    ) -> u64 {
        let mut unknown = 0;
        for key in keys {
            let position = self.entry(key.as_engine_hash()).and_then(Entry::position);
            let is_presumed = position.is_some_and(|position| {
                prompts.trees.read(Trees::tree_with(position.node)).key(position) == Some(*key)
            });
            if is_presumed {
                self.remove_all_copies(key.as_engine_hash(), prompts);
            } else {
                unknown += 1;
            }
        }
        unknown
    }
}
