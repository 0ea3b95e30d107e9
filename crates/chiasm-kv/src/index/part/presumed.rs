//! Blocks that a worker is believed to hold without having said so.
//!
//! Entries as those of events, under a name made from the key. If that is the name of another block, then the presumed
//! block is not believed, and neither are those after it.

use super::{Entry, Forest, Part, Prompts};
use crate::BlockKey;

impl Part {
    pub(in crate::index) fn presume(&mut self, chain: &[BlockKey], prompts: &Prompts) {
        let Some(first) = chain.first() else { return };
        let number = Forest::tree_of(*first);
        let (mut parent, mut rest) = (None, chain);
        let (mut segments, mut added) = (Vec::new(), Vec::new());
        while !rest.is_empty() {
            let there = rest.iter().take_while(|key| self.entry(key.name()).is_some());
            let there: Vec<_> = there.map(|key| (key, self.spot_of(key.name()))).collect();
            let mut tree = prompts.forest.write(number);
            for (key, spot) in &there {
                // Another block's name otherwise, or that of one without a key.
                match spot.filter(|spot| Forest::tree_with(spot.run) == number) {
                    Some(spot) if tree.key(spot) == Some(**key) => parent = Some(spot),
                    _ => return,
                }
            }
            rest = &rest[there.len()..];
            let missing = rest.iter().take_while(|key| self.entry(key.name()).is_none()).count();
            let (keys, after) = rest.split_at(missing);
            let names: Vec<_> = keys.iter().map(|key| key.name()).collect();
            segments.clear();
            tree.hold(parent, keys, self.place, &prompts.uses, &mut segments);
            self.name(&names, keys, &segments, &mut added);
            self.settle_doubts(&mut tree, &mut added);
            parent = keys.last().and_then(|key| self.spot_of(key.name())).or(parent);
            rest = after;
        }
    }

    /// Returns how many were not there.
    pub(in crate::index) fn forget_presumed(&mut self, keys: &[BlockKey], prompts: &Prompts) -> u64 {
        let mut unknown = 0;
        for key in keys {
            let spot = self.entry(key.name()).and_then(Entry::spot);
            let same =
                spot.is_some_and(|spot| prompts.forest.read(Forest::tree_with(spot.run)).key(spot) == Some(*key));
            if same {
                self.forget(key.name(), prompts);
            } else {
                unknown += 1;
            }
        }
        unknown
    }
}
