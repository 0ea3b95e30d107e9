//! Blocks that a worker is believed to hold without having said so.
//!
//! Entries as those of events, under a name made from the key. If that is the name of another block, then the presumed
//! block is not believed, and neither are those after it.

use super::{Entry, Shared, WorkerBlocks};
use crate::BlockKey;

impl WorkerBlocks {
    pub(in crate::index) fn presume(&mut self, chain: &[BlockKey], shared: &Shared) {
        let (mut parent, mut added) = (None, Vec::new());
        for key in chain {
            let name = key.name();
            match self.entries.get(name) {
                Some(entry) if entry.key() != *key => return,
                Some(entry) if entry.held() => {}
                // Copies of an unknown block: an event gave it this name.
                Some(entry) if entry.copies() > 0 => return,
                _ => {
                    let known = Some((*key, parent.unwrap_or(name)));
                    self.add_copy(name, known, shared, &mut added);
                }
            }
            parent = Some(name);
        }
    }

    pub(in crate::index) fn forget_presumed(&mut self, keys: &[BlockKey], shared: &Shared) {
        for key in keys {
            let presumed = |entry: &&Entry| entry.held() && entry.key() == *key;
            match self.entries.get(key.name()).filter(presumed) {
                Some(_) => self.forget(key.name(), shared),
                None => self.stats.unknown_removals += 1,
            }
        }
    }
}
