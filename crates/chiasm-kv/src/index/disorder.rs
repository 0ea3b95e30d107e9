//! Where what a worker holds is not closed under parents.
//!
//! An engine evicts children before parents, so nearly always a worker that holds a block holds all blocks before it, and
//! a search may halve the chain. Where that is not so it is written down here *before* it happens, and lookups step
//! around it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

use super::holders::Place;
use crate::{BlockKey, BuildBlockKeyHasher};

#[derive(Default)]
pub(super) struct Disorder {
    /// Goes up with everything that is written down: lookups that see it move start over.
    epoch: AtomicU64,
    any: AtomicBool,
    gaps: AtomicUsize,
    written: RwLock<Written>,
}

#[derive(Default)]
struct Written {
    /// Blocks that a worker may lack while it holds children of theirs; a worker is there once per hash of its.
    gaps: HashMap<BlockKey, Vec<Place>, BuildBlockKeyHasher>,
    /// Workers that are being cleared: they hold nothing.
    hidden: Vec<Place>,
    /// Workers whose engine gave one hash to two blocks: links to parents can't be trusted.
    tangled: Vec<Place>,
}

/// What a lookup has to know, with its workers ascending.
#[derive(Default)]
pub(super) struct Exceptions {
    pub(super) hidden: Vec<Place>,
    pub(super) tangled: Vec<Place>,
    /// Worker and index of the key where it may have a gap, ascending.
    pub(super) gaps: Vec<(Place, usize)>,
}

impl Disorder {
    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Of a prompt; `None` when all is in order.
    pub(super) fn exceptions(&self, keys: &[BlockKey]) -> Option<Exceptions> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let written = self.written.read().unwrap_or_else(PoisonError::into_inner);
        let mut gaps = Vec::new();
        if !written.gaps.is_empty() {
            for (index, key) in keys.iter().enumerate() {
                gaps.extend(written.gaps.get(key).into_iter().flatten().map(|place| (*place, index)));
            }
            gaps.sort_unstable();
            gaps.dedup();
        }
        Some(Exceptions { hidden: written.hidden.clone(), tangled: written.tangled.clone(), gaps })
    }

    pub(super) fn open_gap(&self, key: BlockKey, place: Place) {
        self.gaps.fetch_add(1, Ordering::Relaxed);
        self.change(|written| written.gaps.entry(key).or_default().push(place));
    }

    pub(super) fn close_gap(&self, key: BlockKey, place: Place) {
        self.gaps.fetch_sub(1, Ordering::Relaxed);
        self.change(|written| {
            if let Some(places) = written.gaps.get_mut(&key) {
                take_one(places, place);
                if places.is_empty() {
                    written.gaps.remove(&key);
                    if written.gaps.capacity() > 64 && written.gaps.len() < written.gaps.capacity() / 4 {
                        written.gaps.shrink_to_fit();
                    }
                }
            }
        });
    }

    pub(super) fn hide(&self, place: Place) {
        self.change(|written| written.hidden.push(place));
    }

    /// Of a worker that holds nothing any more.
    pub(super) fn unhide(&self, place: Place) {
        self.change(|written| {
            take_one(&mut written.hidden, place);
            written.tangled.retain(|other| *other != place);
        });
    }

    pub(super) fn tangle(&self, place: Place) {
        self.change(|written| {
            if !written.tangled.contains(&place) {
                written.tangled.push(place);
            }
        });
    }

    /// Gaps open now.
    pub(super) fn gaps(&self) -> usize {
        self.gaps.load(Ordering::Relaxed)
    }

    fn change(&self, change: impl FnOnce(&mut Written)) {
        let mut written: RwLockWriteGuard<'_, Written> = self.written.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut written);
        let any = !(written.gaps.is_empty() && written.hidden.is_empty() && written.tangled.is_empty());
        // Whoever sees the epoch sees what came before it.
        self.any.store(any, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::AcqRel);
    }
}

fn take_one(places: &mut Vec<Place>, place: Place) {
    if let Some(at) = places.iter().position(|other| *other == place) {
        places.swap_remove(at);
    }
}
