//! Blocks that a worker is believed to hold without having said so.
//!
//! Entries as those of events, under a hash made from the key. If that is the hash of another
//! block, then the presumed block is not believed, and neither are those after it.

use super::{Cache, Entry, Prompts, Trees};
use crate::BlockKey;

impl Cache {
    pub(in crate::index) fn presume(&mut self, chain: &[BlockKey], prompts: &Prompts) {
        let Some(first) = chain.first() else { return };
        let number = Trees::tree_of(*first);
        let (mut parent, mut rest) = (None, chain);
        let (mut segments, mut added) = (Vec::new(), Vec::new());
        while !rest.is_empty() {
            let there = rest.iter().take_while(|key| self.entry(key.as_engine_hash()).is_some());
            let there: Vec<_> =
                there.map(|key| (key, self.position_of(key.as_engine_hash()))).collect();
            let mut tree = prompts.trees.write(number);
            for (key, position) in &there {
                // Another block's hash otherwise, or that of one without a key.
                match position.filter(|position| Trees::tree_with(position.node) == number) {
                    Some(position) if tree.key(position) == Some(**key) => parent = Some(position),
                    _ => return,
                }
            }
            rest = &rest[there.len()..];
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

    /// Returns how many were not there.
    pub(in crate::index) fn forget_presumed(
        &mut self,
        keys: &[BlockKey],
        prompts: &Prompts,
    ) -> u64 {
        let mut unknown = 0;
        for key in keys {
            let position = self.entry(key.as_engine_hash()).and_then(Entry::position);
            let same = position.is_some_and(|position| {
                prompts.trees.read(Trees::tree_with(position.node)).key(position) == Some(*key)
            });
            if same {
                self.forget(key.as_engine_hash(), prompts);
            } else {
                unknown += 1;
            }
        }
        unknown
    }
}
