//! The list of workers that lookups use.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use chiasm_types::WorkerId;

use super::cache::Cache;
use super::holders::{HolderId, bit, word};
use super::hybrid::Hybrid;
use super::source::Source;

/// The worker that each holder stands for, and how to compute its overlap. A published list is
/// immutable; see [`Workers::list`](super::workers::Workers::list).
#[derive(Clone, Default)]
pub(super) struct WorkerList {
    /// A number unique among the lists of this process; 0 for the empty default.
    revision: u64,
    /// The workers in the order of their ids, each with its first holder.
    in_order: Vec<(WorkerId, HolderId)>,
    /// The worker of each holder; `None` for further caches of a worker.
    ids: Vec<Option<WorkerId>>,
    /// The workers whose overlap depends on more than the leading blocks of one cache.
    hybrid: BTreeMap<WorkerId, Hybrid>,
    /// The holders that are no chains, as bits: searches of leading blocks exclude them.
    excluded: Vec<u64>,
}

impl WorkerList {
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the highest holder id plus one.
    pub(super) fn holders(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn in_order(&self) -> &[(WorkerId, HolderId)] {
        &self.in_order
    }

    /// Returns the worker of each holder; `None` for further caches of a worker.
    pub(super) fn ids(&self) -> &[Option<WorkerId>] {
        &self.ids
    }

    pub(super) fn hybrid(&self) -> impl ExactSizeIterator<Item = &Hybrid> {
        self.hybrid.values()
    }

    pub(super) fn excluded(&self) -> &[u64] {
        &self.excluded
    }

    /// Gives the list a new revision and returns it.
    pub(super) fn renew_revision(&mut self) -> u64 {
        static REVISIONS: AtomicU64 = AtomicU64::new(1);
        self.revision = REVISIONS.fetch_add(1, Ordering::Relaxed);
        self.revision
    }

    /// Adds a holder with a free id, or with a new one. The holder may hold blocks before its
    /// worker is listed.
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
            self.set_excluded(cache.holder(), !source.is_chain());
        }
        match Hybrid::from_caches(caches) {
            Some(hybrid) => drop(self.hybrid.insert(worker, hybrid)),
            None => self.remove_caches(worker),
        }
    }

    pub(super) fn remove_caches(&mut self, worker: WorkerId) {
        self.hybrid.remove(&worker);
    }

    pub(super) fn set_excluded(&mut self, holder: HolderId, is_excluded: bool) {
        if is_excluded && self.excluded.len() <= word(holder) {
            self.excluded.resize(word(holder) + 1, 0);
        }
        if let Some(word) = self.excluded.get_mut(word(holder)) {
            *word = *word & !bit(holder) | if is_excluded { bit(holder) } else { 0 };
        }
    }
}
