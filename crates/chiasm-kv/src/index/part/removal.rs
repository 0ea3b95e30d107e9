//! Blocks that are removed, each by its name.

use super::{Forest, Name, Part, Place, Prompts, Spot, Tree};
use crate::index::forest::Writer;
use crate::index::tree::RunId;

/// Blocks on their way out of the tree that they are in: those of a run that follow each other go in one step.
struct Removal<'a> {
    prompts: &'a Prompts,
    place: Place,
    tree: Option<(u32, Writer<'a>)>,
    /// The first of them, if there are any.
    spot: Spot,
    len: u32,
}

impl Part {
    /// One copy less of each of these. Returns how many there were none of.
    pub(in crate::index) fn remove(&mut self, names: &[Name], prompts: &Prompts) -> u64 {
        let mut unknown = 0;
        let mut removal = Removal::new(prompts, self.place);
        for name in names.iter().copied() {
            match self.entries.remove_if(name, |_| true, |entry| !entry.has_several()) {
                None => unknown += 1,
                Some(Ok(entry)) => match entry.spot() {
                    Some(spot) => self.release_one(spot, &mut removal),
                    None => self.counts.unkeyed -= 1,
                },
                Some(Err(entry)) => {
                    let copies = self.copies.entry(name).or_default();
                    *copies = copies.saturating_sub(1);
                    if *copies == 0 {
                        entry.set_several(false);
                        self.copies.remove(&name);
                    }
                }
            }
        }
        removal.finish();
        unknown
    }

    /// Keyed entries are so no longer.
    pub(super) fn release(&mut self, spots: &[Spot], prompts: &Prompts) {
        let mut removal = Removal::new(prompts, self.place);
        spots.iter().for_each(|spot| self.release_one(*spot, &mut removal));
        removal.finish();
    }

    fn release_one(&mut self, spot: Spot, removal: &mut Removal<'_>) {
        let tree = removal.tree(spot.run);
        let Some(spot) = tree.find(spot) else { return };
        if self.more.is_empty() || !self.one_name_less(tree, spot) {
            self.counts.blocks -= 1;
            removal.release(spot);
        }
    }

    /// Whether a block has other names yet.
    fn one_name_less(&mut self, tree: &Tree, spot: Spot) -> bool {
        let Some(key) = tree.key(spot) else { return false };
        let Some(more) = self.more.get_mut(&key) else { return false };
        *more -= 1;
        if *more == 0 {
            self.more.remove(&key);
        }
        true
    }
}

impl<'a> Removal<'a> {
    fn new(prompts: &'a Prompts, place: Place) -> Self {
        Self { prompts, place, tree: None, spot: Spot { run: 0, at: 0 }, len: 0 }
    }

    /// The tree that a run is in, locked.
    fn tree(&mut self, run: RunId) -> &Tree {
        let number = Forest::tree_with(run);
        if self.tree.as_ref().is_some_and(|(locked, _)| *locked != number) {
            self.finish();
        }
        let prompts = self.prompts;
        let (_, tree) = self.tree.get_or_insert_with(|| (number, prompts.forest.write(number)));
        tree
    }

    /// A block of the tree that is locked.
    fn release(&mut self, spot: Spot) {
        let comes_before = self.len > 0 && spot.run == self.spot.run && spot.at + 1 == self.spot.at;
        if !comes_before {
            self.flush();
        }
        self.spot = spot;
        self.len += 1;
    }

    fn flush(&mut self) {
        if let Some((_, tree)) = &mut self.tree
            && self.len > 0
        {
            tree.release(self.spot, self.len, self.place);
        }
        self.len = 0;
    }

    fn finish(&mut self) {
        self.flush();
        self.tree = None;
    }
}
