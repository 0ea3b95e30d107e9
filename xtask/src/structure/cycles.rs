//! Cycles: groups of files in which each file depends on all others, directly or indirectly.

use std::collections::{BTreeMap, BTreeSet};

use super::references::References;
use super::source::Package;

/// The names of the items that a file uses from another file, by the indices `(user, definer)`.
pub(super) type Arrows = BTreeMap<(usize, usize), BTreeSet<String>>;

/// Returns the arrows between the files of a package.
pub(super) fn arrows(package: &Package, references: &References) -> Arrows {
    let mut arrows = Arrows::new();
    for reference in references {
        let from = package.modules[reference.from].file;
        let to = package.modules[reference.to].file;
        if from != to {
            arrows.entry((from, to)).or_default().insert(reference.item.clone());
        }
    }
    arrows
}

/// Returns the cycles of at least two files, the largest first.
pub(super) fn cycles(files: usize, arrows: &Arrows) -> Vec<BTreeSet<usize>> {
    let reached: Vec<BTreeSet<usize>> = (0..files).map(|file| reachable(file, arrows)).collect();
    let mut cycles = BTreeSet::new();
    for file in 0..files {
        let mutual = reached[file].iter().copied().filter(|other| reached[*other].contains(&file));
        cycles.insert(mutual.collect::<BTreeSet<_>>());
    }
    let mut cycles: Vec<_> = cycles.into_iter().filter(|cycle| cycle.len() > 1).collect();
    cycles.sort_by_key(|cycle| std::cmp::Reverse(cycle.len()));
    cycles
}

/// Returns the files that arrows lead to from `start`; contains `start` if it is in a cycle.
fn reachable(start: usize, arrows: &Arrows) -> BTreeSet<usize> {
    let mut reached = BTreeSet::new();
    let mut pending = vec![start];
    while let Some(file) = pending.pop() {
        for (_, to) in arrows.range((file, 0)..=(file, usize::MAX)).map(|(arrow, _)| *arrow) {
            if reached.insert(to) {
                pending.push(to);
            }
        }
    }
    reached
}
