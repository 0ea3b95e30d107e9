//! The workers, their places in sets, and the lock around each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use chiasm_types::{BlockSize, WorkerId};

use super::holders::{Place, bit, word};
use super::mixed::Mixed;
use super::part::Part;
use super::source::Source;
use super::worker::Worker;

/// All workers by their ids. A worker's lock is taken before any tree's and before that of the list, never after it.
#[derive(Default)]
pub(super) struct Workers {
    /// One list behind several locks: a thread that reads takes its own, who changes it takes all. So threads that look up
    /// don't write to the same memory all the time.
    list: [Line; LINES],
    bytes: AtomicUsize,
}

const LINES: usize = 8;

/// A lock on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Line(RwLock<Arc<List>>);

thread_local! {
    static LINE: usize = NEXT_LINE.fetch_add(1, Ordering::Relaxed) % LINES;
}

static NEXT_LINE: AtomicUsize = AtomicUsize::new(0);

/// What lookups and events have to know of all workers at a time. It is never changed, but replaced.
#[derive(Clone, Default)]
pub(super) struct List {
    /// Each worker is shared with who works on it while the list changes.
    by_id: BTreeMap<WorkerId, (Place, Arc<Mutex<Worker>>)>,
    /// The ids and places of `by_id`, for a quick pass.
    in_order: Vec<(WorkerId, Place)>,
    /// The worker that each place stands for; none for further places of a worker.
    ids: Vec<Option<WorkerId>>,
    /// Workers of which more is to be asked than how many leading blocks one place has.
    mixed: BTreeMap<WorkerId, Mixed>,
    /// Bits of places that don't stand for groups that need all leading blocks.
    aside: Vec<u64>,
    /// Places of removed workers that no block's holders name any more.
    free: Vec<Place>,
    places: usize,
}

impl List {
    /// One more than the highest place.
    pub(super) fn places(&self) -> usize {
        self.places
    }

    pub(super) fn in_order(&self) -> &[(WorkerId, Place)] {
        &self.in_order
    }

    /// The worker that each place stands for; none for further places of a worker.
    pub(super) fn ids(&self) -> &[Option<WorkerId>] {
        &self.ids
    }

    pub(super) fn mixed(&self) -> impl ExactSizeIterator<Item = &Mixed> {
        self.mixed.values()
    }

    pub(super) fn aside(&self) -> &[u64] {
        &self.aside
    }

    fn new_place(&mut self) -> Place {
        let place = self.free.pop().unwrap_or(self.places as Place);
        self.places = self.places.max(place as usize + 1);
        place
    }

    fn set_aside(&mut self, place: Place, aside: bool) {
        if aside && self.aside.len() <= word(place) {
            self.aside.resize(word(place) + 1, 0);
        }
        if let Some(word) = self.aside.get_mut(word(place)) {
            *word = *word & !bit(place) | if aside { bit(place) } else { 0 };
        }
    }

    fn take(&mut self, worker: WorkerId) -> Option<Arc<Mutex<Worker>>> {
        self.mixed.remove(&worker);
        self.by_id.remove(&worker).map(|(_, worker)| worker)
    }

    /// Whether these are the parts of the worker that has this id now, not of one before it that still takes in a batch.
    fn is_listed(&self, worker: WorkerId, parts: &[(Source, Part)]) -> bool {
        let known = self.by_id.get(&worker).map(|(place, _)| *place);
        known.is_some() && known == parts.first().map(|(_, part)| part.place())
    }

    fn list_parts(&mut self, worker: WorkerId, parts: &[(Source, Part)]) {
        for (source, part) in parts {
            self.set_aside(part.place(), !source.is_chain());
        }
        match Mixed::of(parts) {
            Some(mixed) => drop(self.mixed.insert(worker, mixed)),
            None => drop(self.mixed.remove(&worker)),
        }
    }

    fn update_order(&mut self) {
        self.in_order = self.by_id.iter().map(|(id, (place, _))| (*id, *place)).collect();
        self.ids = vec![None; self.places];
        self.in_order.iter().for_each(|(id, place)| self.ids[*place as usize] = Some(*id));
    }
}

impl Workers {
    /// Returns the worker that had this id, which is in no list any more.
    pub(super) fn add(&self, worker: WorkerId, block_size: BlockSize) -> Option<Arc<Mutex<Worker>>> {
        self.rewrite(|list| {
            let replaced = list.take(worker);
            let place = list.new_place();
            let new = Worker::new(worker, Part::new(place), block_size);
            list.by_id.insert(worker, (place, Arc::new(Mutex::new(new))));
            list.update_order();
            replaced
        })
    }

    /// Returns the worker, which is in no list any more.
    pub(super) fn remove(&self, worker: WorkerId) -> Option<Arc<Mutex<Worker>>> {
        self.rewrite(|list| {
            let removed = list.take(worker);
            list.update_order();
            removed
        })
    }

    /// The parts of a worker that is in no list any more; see [`Worker::end`].
    pub(super) fn end(&self, worker: &Mutex<Worker>) -> Vec<Part> {
        self.with(worker, Worker::end).unwrap_or_default()
    }

    /// Gives a worker empty parts in new places, which lookups take for it from now on. Returns those that it had.
    pub(super) fn renew_parts(&self, worker: WorkerId, parts: &mut [(Source, Part)]) -> Vec<Part> {
        self.rewrite(|list| {
            let is_listed = list.is_listed(worker, parts);
            let old = parts.iter_mut().map(|(_, part)| part.renew(list.new_place())).collect();
            if is_listed {
                list.by_id.entry(worker).and_modify(|(place, _)| *place = parts[0].1.place());
                list.update_order();
                list.list_parts(worker, parts);
            }
            old
        })
    }

    /// A place for one more part of a worker.
    pub(super) fn new_place(&self) -> Place {
        self.rewrite(List::new_place)
    }

    /// Gives back a place that no block's holders name any more.
    pub(super) fn free(&self, place: Place) {
        self.rewrite(|list| {
            list.set_aside(place, false);
            list.free.push(place);
        });
    }

    /// Makes lookups take these for the parts of a worker from now on.
    pub(super) fn list_parts(&self, worker: WorkerId, parts: &[(Source, Part)]) {
        self.rewrite(|list| {
            if list.is_listed(worker, parts) {
                list.list_parts(worker, parts);
            }
        });
    }

    /// Changes a worker. `None` when it is unknown.
    pub(super) fn change<T>(&self, worker: WorkerId, change: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let found = self.list().by_id.get(&worker).map(|(_, blocks)| blocks.clone())?;
        self.with(&found, change)
    }

    /// Changes every worker, one after the other, from the `first`th on and around, until `change` says false.
    pub(super) fn each(&self, first: usize, mut change: impl FnMut(&mut Worker) -> bool) {
        let mut all: Vec<_> = self.list().by_id.values().map(|(_, blocks)| blocks.clone()).collect();
        if !all.is_empty() {
            let first = first % all.len();
            all.rotate_left(first);
        }
        for blocks in all {
            if self.with(&blocks, &mut change) == Some(false) {
                return;
            }
        }
    }

    /// Shows the list. No worker's place changes its meaning meanwhile.
    pub(super) fn read<T>(&self, read: impl FnOnce(&List) -> T) -> T {
        read(&self.list())
    }

    /// Bytes on the heap of the parts of listed workers.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Changes a worker, listed or not, and counts what its memory grows by. `None` when it has ended.
    pub(super) fn with<T>(&self, worker: &Mutex<Worker>, change: impl FnOnce(&mut Worker) -> T) -> Option<T> {
        let mut worker: MutexGuard<'_, Worker> = worker.lock().unwrap_or_else(PoisonError::into_inner);
        if worker.gone() {
            return None;
        }
        let before = worker.bytes();
        let result = change(&mut worker);
        let grown = worker.bytes().wrapping_sub(before);
        // Not for nothing: all threads that apply events write here.
        if grown != 0 {
            // Wraps around for a decrease, as the sum does.
            self.bytes.fetch_add(grown, Ordering::Relaxed);
        }
        Some(result)
    }

    fn list(&self) -> RwLockReadGuard<'_, Arc<List>> {
        // A thread that ends may have lost its number.
        let line = LINE.try_with(|line| *line).unwrap_or(0);
        self.list[line].0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn rewrite<T>(&self, change: impl FnOnce(&mut List) -> T) -> T {
        // Always in this order, and all before anything changes: nobody reads the old list beside the new one.
        let mut lines = self.list.each_ref().map(|line| line.0.write().unwrap_or_else(PoisonError::into_inner));
        let mut list = List::clone(&lines[0]);
        let result = change(&mut list);
        let list = Arc::new(list);
        lines.iter_mut().for_each(|line| **line = list.clone());
        result
    }
}
