//! What lookups have to know of all workers at a time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use chiasm_types::WorkerId;

use super::cache::Cache;
use super::holders::{HolderId, bit, word};
use super::hybrid::Hybrid;
use super::source::Source;

/// Which worker each holder stands for, and how its overlap is found. It is never changed once
/// somebody may read it: see [`Workers::list`](super::workers::Workers::list).
#[derive(Clone, Default)]
pub(super) struct List {
    /// Tells it from all other lists of this process; 0 for one of nobody.
    revision: u64,
    /// The workers by their ids, and the first holder of each.
    in_order: Vec<(WorkerId, HolderId)>,
    /// The worker that each holder stands for; none for further caches of a worker.
    ids: Vec<Option<WorkerId>>,
    /// Workers of which more is to be asked than how many leading blocks one cache has.
    hybrid: BTreeMap<WorkerId, Hybrid>,
    /// Bits of holders that don't stand for groups that need all leading blocks.
    aside: Vec<u64>,
}

impl List {
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// One more than the highest id of a holder.
    pub(super) fn holders(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn in_order(&self) -> &[(WorkerId, HolderId)] {
        &self.in_order
    }

    /// The worker that each holder stands for; none for further caches of a worker.
    pub(super) fn ids(&self) -> &[Option<WorkerId>] {
        &self.ids
    }

    pub(super) fn hybrid(&self) -> impl ExactSizeIterator<Item = &Hybrid> {
        self.hybrid.values()
    }

    pub(super) fn aside(&self) -> &[u64] {
        &self.aside
    }

    /// Makes it another list than all before; its revision.
    pub(super) fn revise(&mut self) -> u64 {
        static REVISIONS: AtomicU64 = AtomicU64::new(1);
        self.revision = REVISIONS.fetch_add(1, Ordering::Relaxed);
        self.revision
    }

    /// Makes room for a holder of this id, or of a new one. Blocks may be held before the worker is
    /// listed.
    pub(super) fn add_holder(&mut self, free: Option<HolderId>) -> HolderId {
        free.unwrap_or_else(|| {
            self.ids.push(None);
            self.ids.len() as HolderId - 1
        })
    }

    pub(super) fn set_order(&mut self, in_order: Vec<(WorkerId, HolderId)>) {
        self.in_order = in_order;
        self.ids.fill(None);
        self.in_order.iter().for_each(|(id, holder)| self.ids[*holder as usize] = Some(*id));
    }

    pub(super) fn set_caches(&mut self, worker: WorkerId, caches: &[(Source, Cache)]) {
        for (source, cache) in caches {
            self.set_aside(cache.holder(), !source.is_chain());
        }
        match Hybrid::of(caches) {
            Some(hybrid) => drop(self.hybrid.insert(worker, hybrid)),
            None => self.forget_caches(worker),
        }
    }

    pub(super) fn forget_caches(&mut self, worker: WorkerId) {
        self.hybrid.remove(&worker);
    }

    pub(super) fn set_aside(&mut self, holder: HolderId, aside: bool) {
        if aside && self.aside.len() <= word(holder) {
            self.aside.resize(word(holder) + 1, 0);
        }
        if let Some(word) = self.aside.get_mut(word(holder)) {
            *word = *word & !bit(holder) | if aside { bit(holder) } else { 0 };
        }
    }
}
