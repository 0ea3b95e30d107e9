//! All blocks of a worker, with or without entries.

use std::collections::{HashMap, HashSet};

use super::anchors::{Anchors, are_enough};
use super::{Entry, Forest, Name, Part, PartCounts, Prompts, Spot, Tree};
use crate::index::tree::RunId;

impl Part {
    /// Each run that blocks are held of, with the first of them and one more than the last, until `visit` says false.
    fn walk(&self, prompts: &Prompts, mut visit: impl FnMut(&Tree, RunId, u32, u32) -> bool) {
        let starts = self.starts();
        let mut seen = HashSet::new();
        for starts in starts.chunk_by(|one, other| Forest::same_tree(one.run, other.run)) {
            let tree = prompts.forest.read(Forest::tree_with(starts[0].run));
            for start in starts {
                let mut here = tree.find(*start).map(|spot| spot.run);
                while let Some(id) = here.filter(|run| seen.insert(*run)) {
                    let run = tree.run(id);
                    let held = run.holders.get(self.place, run.len());
                    if held.is_some_and(|(from, to)| !visit(&tree, id, from, to)) {
                        return;
                    }
                    here = tree.before(Spot { run: id, at: 0 }).map(|spot| spot.run);
                }
            }
        }
    }

    /// Looks for a block that is neither anchored nor has an entry.
    pub(in crate::index) fn search(&mut self, name: Name, prompts: &Prompts) -> Option<Spot> {
        if self.entry(name).is_some() {
            return self.spot_of(name);
        }
        let blocks = self.counts.blocks;
        if self.anchors.as_mut()?.charge(blocks) {
            self.enter_all(prompts);
            self.removals = Some(0);
            return self.spot_of(name);
        }
        let mut found = None;
        self.walk(prompts, |tree, run, from, to| {
            let names = &tree.run(run).blocks.names()[from as usize..to as usize];
            let at = names.iter().position(|other| *other == name);
            found = at.map(|at| Spot { run, at: from + at as u32 });
            found.is_none()
        });
        if let (Some(anchors), Some(spot)) = (&mut self.anchors, found) {
            anchors.insert(name, spot);
        }
        found
    }

    /// Makes entries of all blocks, so that each of them is found at once.
    pub(in crate::index) fn enter_all(&mut self, prompts: &Prompts) {
        self.removals = None;
        if self.anchors.is_none() {
            return;
        }
        let mut entries: HashMap<Spot, u32> = HashMap::new();
        for spot in self.entries.iter().filter_map(Entry::spot) {
            let tree = prompts.forest.read(Forest::tree_with(spot.run));
            tree.find(spot).into_iter().for_each(|spot| *entries.entry(spot).or_default() += 1);
        }
        let mut missing = Vec::with_capacity(self.counts.blocks);
        self.walk(prompts, |tree, run, from, to| {
            for at in from..to {
                let (spot, more) = (Spot { run, at }, || self.more.get(&tree.run(run).blocks.key(at)).copied());
                // Each name but one is counted among `more`.
                let names = 1 + if self.more.is_empty() { 0 } else { more().unwrap_or_default() };
                if entries.get(&spot).copied().unwrap_or_default() < names {
                    missing.push((tree.run(run).blocks.name(at), spot));
                }
            }
            true
        });
        self.anchors = None;
        for (name, spot) in missing {
            let (entry, is_new) = self.entries.entry(name, |_| true, || Entry::new(name, Some(spot)));
            if is_new {
                continue;
            }
            // One hash of two blocks: neither counts.
            let other = entry.spot();
            entry.set_several(true);
            entry.set_spot(None);
            *self.copies.entry(name).or_default() += 1;
            self.counts.unkeyed += usize::from(other.is_some());
            self.collided.extend(other);
            self.collided.push(spot);
        }
        self.release_collided(prompts);
    }

    /// Gives up the entries that are not needed: the other way round.
    fn leave_all(&mut self, prompts: &Prompts) {
        let (mut anchors, mut needless) = (Anchors::default(), Vec::new());
        let trees: Vec<_> = prompts.forest.each().collect();
        for entry in self.entries.iter().filter(|entry| !entry.has_several()) {
            let found = entry.spot().and_then(|spot| {
                let tree = &trees[Forest::tree_with(spot.run) as usize];
                Some((tree, tree.find(spot)?))
            });
            let Some((tree, spot)) = found else { continue };
            let run = tree.run(spot.run);
            if run.blocks.name(spot.at) != entry.name || self.more.contains_key(&run.blocks.key(spot.at)) {
                continue;
            }
            needless.push(entry.name);
            if run.holders.get(self.place, run.len()).is_some_and(|(_, to)| to == spot.at + 1) {
                anchors.insert(entry.name, spot);
            }
        }
        drop(trees);
        for name in needless {
            self.entries.remove(name, |_| true);
        }
        self.entries.fit();
        (self.anchors, self.removals) = (Some(anchors), None);
    }

    /// Takes out anchors that lead nowhere, when there may be many, and entries that may have become needless.
    pub(super) fn tidy(&mut self, prompts: &Prompts) {
        if self.removals.is_some_and(|removals| are_enough(removals, self.counts.blocks)) {
            self.leave_all(prompts);
        }
        let Some(mut anchors) = self.anchors.take_if(|anchors| anchors.want_sweeping()) else { return };
        let trees: Vec<_> = prompts.forest.each().collect();
        anchors.sweep(|name, spot| {
            let tree = &trees[Forest::tree_with(spot.run) as usize];
            tree.find(spot).is_some_and(|spot| tree.name(spot) == name && tree.holds(spot, self.place))
        });
        self.anchors = Some(anchors);
    }

    /// Forgets blocks of runs that are at least so old, and those without a key, up to a number. What the engine says of
    /// them later is as of blocks that we never heard of. Returns how many.
    pub(in crate::index) fn shed(&mut self, oldest: u32, most: usize, prompts: &Prompts) -> usize {
        let unkeyed = self.entries.iter().filter(|entry| entry.spot().is_none()).map(|entry| entry.name);
        let unkeyed: Vec<Name> = unkeyed.take(most).collect();
        for name in &unkeyed {
            self.entries.remove(*name, |_| true);
            self.copies.remove(name);
        }
        self.counts.unkeyed -= unkeyed.len();
        let (mut left, mut chosen) = (most - unkeyed.len(), Vec::new());
        self.walk(prompts, |tree, run, from, to| {
            if prompts.uses.age(&tree.run(run).used) >= oldest && left > 0 {
                // The last blocks, lest the run be split.
                let blocks = left.min((to - from) as usize) as u32;
                chosen.push((run, to - blocks, to));
                left -= blocks as usize;
            }
            left > 0
        });
        let before = self.counts;
        for chosen in chosen.chunk_by(|one, other| Forest::same_tree(one.0, other.0)) {
            let number = Forest::tree_with(chosen[0].0);
            chosen.chunks(RUNS).for_each(|chosen| self.shed_runs(number, chosen, prompts));
            self.drop_entries_of_released(number, prompts);
        }
        self.entries.fit();
        let PartCounts { blocks, more, .. } = self.counts;
        let shed = unkeyed.len() + (before.blocks - blocks) + (before.more - more);
        self.counts.shed += shed as u64;
        shed
    }

    /// Runs of one tree, each with the first of the blocks that go and one more than the last.
    fn shed_runs(&mut self, number: u32, chosen: &[(RunId, u32, u32)], prompts: &Prompts) {
        let mut tree = prompts.forest.write(number);
        for (run, from, to) in chosen.iter().copied() {
            let first = Spot { run, at: from };
            if !self.more.is_empty() {
                let keys = (from..to).filter_map(|at| tree.key(Spot { run, at }));
                let more: u32 = keys.filter_map(|key| self.more.remove(&key)).sum();
                self.counts.more -= more as usize;
            }
            let before = tree.find(first).and_then(|first| tree.before(first));
            if let (Some(anchors), Some(before)) = (&mut self.anchors, before) {
                anchors.insert(tree.name(before), before);
            }
            tree.release(first, to - from, self.place);
            self.counts.blocks -= (to - from) as usize;
        }
    }

    /// Takes out the entries of blocks of one tree that are not held any more.
    fn drop_entries_of_released(&mut self, number: u32, prompts: &Prompts) {
        let known = self.entries.iter().filter_map(|entry| Some((entry.name, entry.spot()?)));
        let known: Vec<_> = known.filter(|(_, spot)| Forest::tree_with(spot.run) == number).collect();
        let mut gone: Vec<Name> = Vec::new();
        for some in known.chunks(ENTRIES) {
            let tree = prompts.forest.read(number);
            gone.extend(some.iter().filter(|(_, spot)| !tree.holds(*spot, self.place)).map(|(name, _)| *name));
        }
        for name in gone {
            self.entries.remove(name, |_| true);
            self.copies.remove(&name);
        }
    }
}

/// Runs that are shed with a tree locked, and entries that are looked up in one: so many that lookups wait for some
/// microseconds.
const RUNS: usize = 32;
const ENTRIES: usize = 256;
