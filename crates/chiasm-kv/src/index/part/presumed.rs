//! Blocks that a worker is believed to hold without having said so.
//!
//! Entries as those of events, under a name made from the key. If that is the name of another block, then the presumed
//! block is not believed, and neither are those after it.

use super::{Entry, Identity, Part, Shared};
use crate::BlockKey;

impl Part {
    pub(in crate::index) fn presume(&mut self, chain: &[BlockKey], shared: &Shared) {
        let (mut parent, mut added) = (None, Vec::new());
        for key in chain {
            let name = key.name();
            match self.entries.get(name) {
                Some(entry) if entry.key() != *key => return,
                Some(entry) if entry.held() => {}
                // Copies of an unknown block: an event gave it this name.
                Some(entry) if entry.copies() > 0 => return,
                _ => self.store(name, Some(Identity { key: *key, parent }), shared, &mut added),
            }
            parent = Some((name, *key));
        }
    }

    /// Returns how many were not there.
    pub(in crate::index) fn forget_presumed(&mut self, keys: &[BlockKey], shared: &Shared) -> u64 {
        let mut unknown = 0;
        for key in keys {
            let presumed = |entry: &&Entry| entry.held() && entry.key() == *key;
            match self.entries.get(key.name()).filter(presumed) {
                Some(_) => self.forget(key.name(), shared),
                None => unknown += 1,
            }
        }
        unknown
    }
}
