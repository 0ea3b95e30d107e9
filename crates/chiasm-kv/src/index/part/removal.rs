//! Blocks that are removed, each by its name.

use super::{Forest, Name, Part, Place, Prompts, Spot, Tree};
use crate::index::forest::Writer;
use crate::index::tree::RunId;

/// What is known of a removed name before the tree is looked at.
enum Taken {
    /// The block is here, as its entry said, which is gone.
    Spot(Spot),
    /// There was no entry.
    NoEntry,
    /// One copy of several, or of a block without a key: nothing is left to do.
    Done,
}

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
        // Engines evict the last blocks of a prompt first.
        let mut next = self.anchors.as_mut().and_then(|anchors| anchors.take_next());
        let mut removal = Removal::new(prompts, self.place);
        for name in names.iter().copied() {
            let mut taken = self.take(name);
            let mut found = None;
            if let Taken::NoEntry = taken {
                found = self.without_entry(name, next, &mut removal);
                if found.is_none()
                    && let Some(anchors) = &mut self.anchors
                {
                    anchors.set_next(next);
                    removal.finish();
                    found = self.search(name, prompts).filter(|_| self.anchors.is_some());
                    // All may have entries now.
                    taken = self.take(name);
                }
            }
            let spot = match (taken, found) {
                (Taken::Done, _) => continue,
                (Taken::Spot(spot), _) => removal.tree(spot.run).find(spot),
                (Taken::NoEntry, found) => {
                    unknown += u64::from(found.is_none());
                    found
                }
            };
            let Some(spot) = spot else { continue };
            let tree = removal.tree(spot.run);
            if !self.more.is_empty() && self.one_name_less(tree, spot) {
                continue;
            }
            let before = tree.before(spot).map(|before| (tree.name(before), before));
            if let Some(anchors) = &mut self.anchors {
                let left = next.filter(|(next, _)| *next != name);
                left.into_iter().for_each(|(name, spot)| anchors.insert(name, spot));
                // Few others are anchored, and those are swept up.
                if left.is_some() || next.is_none() || spot.at + 1 == tree.run(spot.run).len() {
                    let is = |other: Spot| Forest::same_tree(other.run, spot.run) && tree.find(other) == Some(spot);
                    anchors.remove(name, is);
                }
            }
            next = before;
            self.counts.blocks -= 1;
            removal.release(spot);
        }
        removal.finish();
        if let Some(anchors) = &mut self.anchors {
            anchors.set_next(next);
            anchors.credit(names.len());
        }
        self.removals = self.removals.map(|removals| removals + names.len());
        self.tidy(prompts);
        unknown
    }

    /// One copy less in the entries.
    fn take(&mut self, name: Name) -> Taken {
        if self.entries.len() == 0 {
            return Taken::NoEntry;
        }
        match self.entries.remove_if(name, |_| true, |entry| !entry.has_several()) {
            None => return Taken::NoEntry,
            Some(Ok(entry)) => match entry.spot() {
                Some(spot) => return Taken::Spot(spot),
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
        Taken::Done
    }

    /// Finds a block without an entry, if it is the next one or anchored.
    fn without_entry(&self, name: Name, next: Option<(Name, Spot)>, removal: &mut Removal<'_>) -> Option<Spot> {
        let anchors = self.anchors.as_ref()?;
        let guess = match next.filter(|(next, _)| *next == name) {
            Some((_, spot)) => spot,
            None => {
                let spot = anchors.get(name)?;
                // Lest a block that is on its way out is found again.
                removal.flush();
                spot
            }
        };
        self.confirm(removal.tree(guess.run), name, guess).map(|(spot, _)| spot)
    }

    /// Whether a block has other names yet.
    fn one_name_less(&mut self, tree: &Tree, spot: Spot) -> bool {
        let Some(key) = tree.key(spot) else { return false };
        let Some(more) = self.more.get_mut(&key) else { return false };
        *more -= 1;
        self.counts.more -= 1;
        if *more == 0 {
            self.more.remove(&key);
        }
        true
    }

    /// Keyed entries are so no longer.
    pub(super) fn release(&mut self, spots: &[Spot], prompts: &Prompts) {
        let mut removal = Removal::new(prompts, self.place);
        for spot in spots {
            let Some(spot) = removal.tree(spot.run).find(*spot) else { continue };
            let tree = removal.tree(spot.run);
            if !self.one_name_less(tree, spot) {
                if let (Some(anchors), Some(before)) = (&mut self.anchors, tree.before(spot)) {
                    anchors.insert(tree.name(before), before);
                }
                self.counts.blocks -= 1;
                removal.release(spot);
            }
        }
        removal.finish();
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
