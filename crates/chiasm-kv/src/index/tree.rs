//! Prompts as a tree: runs of blocks that follow each other, and who holds which of them.
//!
//! A key tells everything before its block, so a run is found by the key of its first block, and two runs agree up to the
//! last block in which they agree. Prompts part at the ends of runs only: where a new one parts within a run, the run is
//! split. Each holder of a run holds one piece of it: where that would be two, the run is split too.
//!
//! Whoever names a block by run and position keeps its name good when runs are split: positions beyond a run's end go on in
//! its tail.

mod run;

use std::sync::atomic::AtomicU32;

use super::holders::{Holders, Place};
use super::table::Table;
use super::use_counter::UseCounter;
use crate::BlockKey;
use run::First;
pub(super) use run::Run;

/// Names a run in 31 bits: the number of its tree in the highest four, then its number there.
pub(super) type RunId = u32;

/// Stands for no run.
pub(super) const NONE: RunId = (1 << 31) - 1;

/// Bits of a run's number.
pub(super) const RUN_BITS: u32 = 27;

/// Number of blocks that a run may have: so many as a byte has numbers. Longer prompts are several runs. In tests short prompts
/// are that too.
const MOST_BLOCKS: usize = if cfg!(test) { 16 } else { 256 };

/// Where a block is: the run that it was in when it got this name, and its number there from 0 on. When the run is split, the name
/// stays good; [`Tree::find`] follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Spot {
    pub(super) run: RunId,
    pub(super) at: u32,
}

/// Prompts that may begin with the same block, as runs.
pub(super) struct Tree {
    /// The tree's number, where [`RunId`]s have it.
    tag: u32,
    runs: Vec<Run>,
    /// Numbers of runs that are no more.
    free: Vec<u32>,
    /// Runs that are no tails.
    first: Table<First>,
    /// Bytes on the heap that runs have beyond their slots.
    heap: usize,
    /// Number of blocks that somebody holds.
    blocks: usize,
}

/// Consecutive blocks of a prompt in one run, that a worker holds now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) spot: Spot,
    pub(super) len: u32,
    /// The piece of them that the worker held before, counted from the first: `from..to`.
    pub(super) before: (u32, u32),
}

impl Tree {
    pub(super) fn new(number: u32) -> Self {
        let (runs, free, first) = (Vec::new(), Vec::new(), Table::new());
        Self { tag: number << RUN_BITS, runs, free, first, heap: 0, blocks: 0 }
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(|run| run.len() > 0)
    }

    /// The runs in `most` slots from the slot `from` on; `None` beyond the last one.
    pub(super) fn some_runs(&self, from: usize, most: usize) -> Option<impl Iterator<Item = &Run>> {
        let runs = self.runs.get(from..).filter(|runs| !runs.is_empty())?;
        Some(runs[..runs.len().min(most)].iter().filter(|run| run.len() > 0))
    }

    /// Bytes on the heap.
    pub(super) fn bytes(&self) -> usize {
        self.heap + self.runs.capacity() * size_of::<Run>() + self.free.capacity() * 4 + self.first.bytes()
    }

    pub(super) fn run(&self, run: RunId) -> &Run {
        &self.runs[(run - self.tag) as usize]
    }

    fn run_mut(&mut self, run: RunId) -> &mut Run {
        &mut self.runs[(run - self.tag) as usize]
    }

    /// Follows splits to where a block is now; `None` if it is no more.
    pub(super) fn find(&self, mut spot: Spot) -> Option<Spot> {
        loop {
            let run = self.runs.get((spot.run - self.tag) as usize)?;
            if spot.at < run.len() {
                return Some(spot);
            }
            spot = Spot { run: run.tail()?, at: spot.at - run.len() };
        }
    }

    /// Looks at what is needed of a run to change it.
    pub(super) fn touch(&self, spot: Spot) -> u64 {
        let run = self.runs.get((spot.run - self.tag) as usize);
        run.and_then(|run| run.keys().last()).map_or(0, |key| key.get() as u64)
    }

    /// The key of a block; `None` if it is no more.
    pub(super) fn key(&self, spot: Spot) -> Option<BlockKey> {
        self.find(spot).map(|spot| self.run(spot.run).keys()[spot.at as usize])
    }

    /// The run that goes on with a block after the last of another, or at the start.
    pub(super) fn next(&self, after: Option<RunId>, key: BlockKey) -> Option<RunId> {
        let tail = after.and_then(|run| self.run(run).tail_with(key));
        tail.filter(|tail| self.run(*tail).keys()[0] == key).or_else(|| {
            let is = |first: &First| self.run(first.run).keys()[0] == key;
            self.first.get(First::hash_of(key), is).map(|first| first.run)
        })
    }

    /// The run that [`Tree::next`] finds, with how many of the keys it has. Looks at its last key first: the others are
    /// seldom needed.
    pub(super) fn follow(&self, after: Option<RunId>, keys: &[BlockKey]) -> Option<(RunId, u32)> {
        let agrees = |run: RunId| {
            let agree = self.run(run).agrees(0, keys);
            (agree > 0).then_some((run, agree))
        };
        let key = *keys.first()?;
        let tail = after.and_then(|run| self.run(run).tail_with(key));
        tail.and_then(agrees).or_else(|| self.first.find_map(First::hash_of(key), |first| agrees(first.run)))
    }

    /// Whether a worker holds a block.
    pub(super) fn holds(&self, spot: Spot, place: Place) -> bool {
        self.find(spot).is_some_and(|spot| {
            let run = self.run(spot.run);
            run.holders.get(place, run.len()).is_some_and(|(from, to)| (from..to).contains(&spot.at))
        })
    }

    /// A worker holds these blocks now, which follow a block or start a prompt. Tells where they are; fewer than asked for
    /// when there is no room for more runs.
    pub(super) fn hold(
        &mut self,
        parent: Option<Spot>,
        keys: &[BlockKey],
        place: Place,
        uses: &UseCounter,
        segments: &mut Vec<Segment>,
    ) {
        let mut keys = keys;
        // The next block is that at this position of this run, or comes after it.
        let mut here = match parent.map(|parent| self.find(parent)) {
            None => None,
            Some(Some(spot)) => Some(Spot { at: spot.at + 1, ..spot }),
            Some(None) => return,
        };
        while let Some(key) = keys.first() {
            let len = here.map_or(0, |here| self.run(here.run).len());
            if let Some(spot) = here.filter(|here| here.at < len) {
                let agree = self.run(spot.run).agrees(spot.at, keys);
                if agree > 0 {
                    let Some(segment) = self.hold_piece(spot, agree, place, uses) else { return };
                    keys = &keys[segment.len as usize..];
                    here = Some(Spot { run: segment.spot.run, at: segment.spot.at + segment.len });
                    segments.push(segment);
                    continue;
                }
                // Parts within the run.
                if self.split(spot).is_none() {
                    return;
                }
            } else if let Some(next) = self.next(here.map(|here| here.run), *key) {
                here = Some(Spot { run: next, at: 0 });
                continue;
            }
            let Some(segment) = self.add(here, keys, place, uses) else { return };
            keys = &keys[segment.len as usize..];
            here = Some(Spot { run: segment.spot.run, at: segment.spot.at + segment.len });
            segments.push(segment);
        }
    }

    /// A worker holds this block now. Where it is, its key, and whether it did not before.
    pub(super) fn hold_at(&mut self, spot: Spot, place: Place, uses: &UseCounter) -> Option<(Spot, BlockKey, bool)> {
        let spot = self.find(spot)?;
        let key = self.run(spot.run).keys()[spot.at as usize];
        let segment = self.hold_piece(spot, 1, place, uses)?;
        Some((segment.spot, key, segment.before.0 >= segment.before.1))
    }

    /// Blocks of a run, one at least.
    fn hold_piece(&mut self, spot: Spot, len: u32, place: Place, uses: &UseCounter) -> Option<Segment> {
        let run = self.run(spot.run);
        uses.note(&run.used);
        let (from, to) = (spot.at, spot.at + len);
        match run.holders.get(place, run.len()) {
            // Two pieces: what comes later goes to the tail.
            Some((_, old_to)) if old_to < from => {
                self.split(spot)?;
                let spot = Spot { run: self.run(spot.run).tail()?, at: 0 };
                self.set(spot.run, place, 0, len);
                Some(Segment { spot, len, before: (0, 0) })
            }
            Some((old_from, _)) if old_from > to => {
                self.split(Spot { at: old_from, ..spot })?;
                self.set(spot.run, place, from, to);
                Some(Segment { spot, len, before: (0, 0) })
            }
            Some((old_from, old_to)) => {
                self.set(spot.run, place, from.min(old_from), to.max(old_to));
                let before = (old_from.clamp(from, to) - from, old_to.clamp(from, to) - from);
                Some(Segment { spot, len, before })
            }
            None => {
                self.set(spot.run, place, from, to);
                Some(Segment { spot, len, before: (0, 0) })
            }
        }
    }

    /// New blocks after a run's last, or at the start: as many as fit into one run.
    fn add(&mut self, after: Option<Spot>, keys: &[BlockKey], place: Place, uses: &UseCounter) -> Option<Segment> {
        if let Some(spot) = after {
            let run = self.run_mut(spot.run);
            let len = run.len();
            let keys = &keys[..keys.len().min(MOST_BLOCKS - len as usize)];
            if !keys.is_empty() && run.tail().is_none() && run.children == 0 && run.holders.ends_with_only(place, len) {
                let before = run.bytes();
                run.extend(keys);
                let (from, to) = (run.holders.get(place, len).map_or(0, |(from, _)| from), run.len());
                run.holders = Holders::default();
                run.holders.set(place, from, to, to);
                uses.note(&run.used);
                self.heap += self.run(spot.run).bytes() - before;
                self.blocks += keys.len();
                return Some(Segment { spot, len: keys.len() as u32, before: (0, 0) });
            }
        }
        let keys = &keys[..keys.len().min(MOST_BLOCKS)];
        let parent = after.map(|spot| Spot { at: spot.at - 1, ..spot });
        let run = Run::new(keys.to_vec(), Holders::one(place, keys.len() as u32), parent);
        uses.note(&run.used);
        let id = self.new_run(run)?;
        let first = keys[0];
        self.first.entry(First::hash_of(first), |first| first.run == id, || First::new(first, id));
        if let Some(spot) = after {
            self.run_mut(spot.run).children += 1;
        }
        self.blocks += keys.len();
        Some(Segment { spot: Spot { run: id, at: 0 }, len: keys.len() as u32, before: (0, 0) })
    }

    /// A worker holds so many blocks from this one on no more. They are named by the same run, whatever it has become.
    pub(super) fn release(&mut self, spot: Spot, blocks: u32, place: Place) {
        let mut left = blocks;
        // From the last one on, so that tails go before what they follow.
        while let Some(last) = left.checked_sub(1) {
            let Some(last) = self.find(Spot { at: spot.at + last, ..spot }) else {
                left -= 1;
                continue;
            };
            let here = left.min(last.at + 1);
            self.release_piece(Spot { at: last.at + 1 - here, ..last }, here, place);
            left -= here;
        }
    }

    /// Releases blocks of one run.
    fn release_piece(&mut self, spot: Spot, len: u32, place: Place) {
        let run = self.run(spot.run);
        let (first, end) = (spot.at, spot.at + len);
        let Some((from, to)) = run.holders.get(place, run.len()).filter(|(from, to)| *from < end && first < *to) else {
            return;
        };
        if first <= from && end < to {
            self.set(spot.run, place, end, to);
        } else {
            // Without room for a tail, what comes after the blocks is forgotten with them.
            if end < to {
                self.split(Spot { at: end, ..spot });
            }
            self.set(spot.run, place, from, first.max(from));
        }
        self.settle(spot.run);
    }

    /// A worker holds nothing any more of the run that a block is in.
    pub(super) fn leave(&mut self, spot: Spot, place: Place) {
        let Some(Spot { run, .. }) = self.find(spot) else { return };
        if self.run(run).holders.get(place, self.run(run).len()).is_some() {
            self.set(run, place, 0, 0);
            self.settle(run);
        }
    }

    /// Whether there is no room for more runs.
    fn is_full(&self) -> bool {
        // Two less: a split and an addition.
        self.free.is_empty() && self.runs.len() >= (1 << RUN_BITS) - 2
    }

    fn new_run(&mut self, run: Run) -> Option<RunId> {
        if self.is_full() {
            return None;
        }
        self.heap += run.bytes();
        let number = match self.free.pop() {
            Some(number) => {
                self.runs[number as usize] = run;
                number
            }
            None => {
                if self.runs.len() == self.runs.capacity() {
                    self.runs.reserve_exact(16.max(self.runs.len() / 8));
                }
                self.runs.push(run);
                self.runs.len() as u32 - 1
            }
        };
        Some(self.tag | number)
    }

    /// What a worker holds of a run.
    fn set(&mut self, run: RunId, place: Place, from: u32, to: u32) {
        let run = &mut self.runs[(run - self.tag) as usize];
        let len = run.len();
        let (bytes, covered) = (run.bytes(), run.holders.covered(len));
        run.holders.set(place, from, to, len);
        self.heap = self.heap + run.bytes() - bytes;
        self.blocks = self.blocks + run.holders.covered(len) as usize - covered as usize;
    }

    /// What comes from here on, within a run, becomes its tail; `None` if there is no room.
    fn split(&mut self, spot: Spot) -> Option<()> {
        if self.is_full() {
            return None;
        }
        let run = self.run_mut(spot.run);
        let (bytes, len) = (run.bytes(), run.len());
        let (keys, holders) = (run.split_off(spot.at), run.holders.split(spot.at, len));
        let mut rest = Run::new(keys, holders, Some(Spot { run: spot.run, at: spot.at - 1 }));
        rest.set_tail(run.take_tail());
        rest.children = std::mem::take(&mut run.children);
        rest.used = AtomicU32::new(*run.used.get_mut());
        let after = run.bytes();
        self.heap = self.heap + after - bytes;
        let first = rest.keys()[0];
        let tail = self.new_run(rest)?;
        self.run_mut(spot.run).set_tail(Some(First::new(first, tail)));
        Some(())
    }

    /// Gives back what nobody holds and nothing comes after.
    fn settle(&mut self, run: RunId) {
        let mut next = Some(run);
        while let Some(id) = next.take() {
            let run = self.run_mut(id);
            if run.tail().is_some() || run.children > 0 || run.len() == 0 {
                return;
            }
            let (len, bytes) = (run.len(), run.bytes());
            let end = run.holders.end(len);
            if end == len {
                return;
            }
            if end > 0 {
                run.truncate(end);
                let after = run.bytes();
                self.heap = self.heap + after - bytes;
                return;
            }
            let (first, parent) = (run.keys()[0], run.parent());
            *run = Run::default();
            self.heap -= bytes;
            self.free.push(id - self.tag);
            let parent = parent.and_then(|parent| self.find_end(parent));
            if parent.is_some_and(|parent| self.run(parent).tail() == Some(id)) {
                parent.into_iter().for_each(|parent| self.run_mut(parent).set_tail(None));
            } else {
                self.first.remove(First::hash_of(first), |first| first.run == id);
                if let Some(parent) = parent {
                    self.run_mut(parent).children -= 1;
                }
            }
            next = parent;
        }
        // Nothing left at all: no slots either.
        if self.free.len() == self.runs.len() {
            (self.runs, self.free) = (Vec::new(), Vec::new());
        }
    }

    fn find_end(&self, spot: Spot) -> Option<RunId> {
        self.find(spot).map(|spot| spot.run)
    }
}
