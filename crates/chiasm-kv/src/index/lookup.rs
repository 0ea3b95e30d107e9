//! The search for the overlap of every worker with a prompt.
//!
//! The search walks along the nodes of the prompt. Workers that hold a whole node continue to the
//! next one; the overlap of the others ends in the node. So the work grows with the number of nodes
//! and of workers that hold the first node, not with the depth.
//!
//! Every node is found before the holders of the first one are examined, so the memory loads the
//! holders of all nodes in parallel.

use super::holders::{HolderId, Holders, bit, holder_ids, word};
use super::radix_tree::{NodeId, RadixTree};
use super::use_counter::UseCounter;
use crate::BlockKey;

/// The inputs of a search.
pub(super) struct Lookup<'a> {
    pub(super) tree: &'a RadixTree,
    pub(super) uses: &'a UseCounter,
    pub(super) keys: &'a [BlockKey],
    /// The holders to exclude, as bits. Holders beyond the last word are included.
    pub(super) excluded: &'a [u64],
}

/// The result of a search, and its reusable buffers.
#[derive(Default)]
pub(super) struct SearchBuffers {
    /// The holders of the first block by their overlap, in no order. Each holder is in one group.
    pub(super) groups: Vec<OverlapGroup>,
    /// The nodes of the prompt, each with the number of blocks before it.
    pub(super) path: Vec<(NodeId, usize)>,
    active: Vec<u64>,
    next: Vec<u64>,
}

/// A set of up to 64 holders with the same overlap.
pub(super) struct OverlapGroup {
    /// The index of the group's 64-bit word in the bit set of all holders.
    word: u32,
    /// The overlap.
    depth: u32,
    /// The holders, as bits of the word.
    bits: u64,
}

impl OverlapGroup {
    fn single(holder: HolderId, depth: u32) -> Self {
        Self { word: word(holder) as u32, depth, bits: bit(holder) }
    }

    /// Returns the groups for all holders of a bit set.
    fn from_words(words: &[u64], depth: u32) -> impl Iterator<Item = Self> {
        let nonempty = words.iter().zip(0..).filter(|(bits, _)| **bits != 0);
        nonempty.map(move |(bits, word)| Self { word, depth, bits: *bits })
    }

    /// Returns the number of holders.
    pub(super) fn count(&self) -> usize {
        self.bits.count_ones() as usize
    }

    /// Returns each holder with its overlap.
    pub(super) fn members(&self) -> impl Iterator<Item = (HolderId, u32)> {
        let first = self.word * 64;
        holder_ids(std::slice::from_ref(&self.bits)).map(move |holder| (first + holder, self.depth))
    }

    /// Writes the overlap of each holder to `depths`, which has 64 holders per element.
    pub(super) fn write_depths(&self, depths: &mut [[u32; 64]]) {
        let Some(depths) = depths.get_mut(self.word as usize) else { return };
        // If most holders of the word are in the group, it is faster to write all 64 and to restore
        // the few others.
        if self.bits.count_ones() > 40 {
            let before = *depths;
            *depths = [self.depth; 64];
            holder_ids(&[!self.bits])
                .for_each(|holder| depths[holder as usize] = before[holder as usize]);
        } else {
            holder_ids(&[self.bits]).for_each(|holder| depths[holder as usize] = self.depth);
        }
    }
}

impl Lookup<'_> {
    /// Finds the overlap of every holder.
    ///
    /// With `whole_path`, visits all nodes of the prompt that are in the tree. Otherwise stops when
    /// no included holder continues.
    pub(super) fn find(&self, buffers: &mut SearchBuffers, whole_path: bool) {
        let SearchBuffers { groups, path, active, next } = buffers;
        // The keys are often in another core's cache, and most prompts diverge where the previous
        // one did. Touching the keys at these blocks loads all of them in parallel.
        let likely_keys =
            path.iter().filter_map(|(_, before)| self.keys.get(*before)).chain(self.keys.last());
        let mut touched = likely_keys.fold(0, |touched, key| touched ^ key.get() as u64);
        groups.clear();
        path.clear();
        active.clear();
        let mut end = 0;
        let mut last = None;
        while let Some((id, matching)) = self.tree.follow(last, &self.keys[end..]) {
            let node = self.tree.node(id);
            // Loaded while the next nodes are searched.
            touched ^= node.holders.touch();
            path.push((id, end));
            end += matching as usize;
            last = Some(id);
            if matching < node.len() {
                break;
            }
        }
        std::hint::black_box(touched);
        let ends = path.iter().skip(1).map(|(_, before)| *before).chain([end]);
        let mut depth = 0;
        for ((id, before), end) in path.iter().zip(ends) {
            let node = self.tree.node(*id);
            self.uses.record(&node.used);
            self.visit(&node.holders, (end - before) as u32, *before, active, next, groups);
            std::mem::swap(active, next);
            depth = end;
            if !(whole_path || active.iter().any(|word| *word != 0)) {
                break;
            }
        }
        groups.extend(OverlapGroup::from_words(active, depth as u32));
    }

    /// Visits a node after `depth` blocks, whose first `matching` blocks belong to the prompt.
    ///
    /// Writes the `active` holders that hold all matching blocks to `next`, and the overlap of the
    /// other active holders to `groups`.
    fn visit(
        &self,
        holders: &Holders,
        matching: u32,
        depth: usize,
        active: &mut [u64],
        next: &mut Vec<u64>,
        groups: &mut Vec<OverlapGroup>,
    ) {
        next.clear();
        let first = depth == 0;
        let is_active = |holder: HolderId, active: &[u64]| {
            if first {
                self.excluded.get(word(holder)).is_none_or(|word| word & bit(holder) == 0)
            } else {
                active.get(word(holder)).is_some_and(|word| word & bit(holder) != 0)
            }
        };
        let list = match holders {
            Holders::One(piece) => std::slice::from_ref(piece),
            Holders::Several(several) => {
                if first {
                    let excluded = self.excluded.iter().copied().chain(std::iter::repeat(0));
                    next.extend(
                        several.whole.iter().zip(excluded).map(|(word, excluded)| word & !excluded),
                    );
                } else {
                    next.extend(
                        several.whole.iter().zip(active.iter()).map(|(word, active)| word & active),
                    );
                    active.iter_mut().zip(next.iter()).for_each(|(active, next)| *active &= !next);
                }
                &several.list
            }
        };
        for piece in list {
            if piece.from > 0 || piece.to == 0 || !is_active(piece.holder, active) {
                continue;
            }
            if piece.to >= matching {
                if next.len() <= word(piece.holder) {
                    next.resize(word(piece.holder) + 1, 0);
                }
                next[word(piece.holder)] |= bit(piece.holder);
            } else {
                groups.push(OverlapGroup::single(piece.holder, depth as u32 + piece.to));
            }
            if !first {
                active[word(piece.holder)] &= !bit(piece.holder);
            }
        }
        if !first {
            groups.extend(OverlapGroup::from_words(active, depth as u32));
        }
    }
}
