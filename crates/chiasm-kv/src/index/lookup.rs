//! The overlap of every worker with a prompt.
//!
//! Along the nodes of the prompt: the workers that hold a node whole go on, the others end in it.
//! So the work grows with the number of nodes and of workers that hold the first, not with the
//! depth. All nodes are found before the first one's holders are gone through, so that the memory
//! works on those of all nodes meanwhile.

use super::holders::{HolderId, Holders, bit, holder_ids, word};
use super::radix_tree::{NodeId, RadixTree};
use super::use_counter::UseCounter;
use crate::BlockKey;

pub(super) struct Lookup<'a> {
    pub(super) tree: &'a RadixTree,
    pub(super) uses: &'a UseCounter,
    pub(super) keys: &'a [BlockKey],
    /// Places that are not asked about, as bits: none of those beyond.
    pub(super) aside: &'a [u64],
}

/// Buffers, used again.
#[derive(Default)]
pub(super) struct Found {
    /// Workers that hold the first block, and how many, in no order; each once.
    pub(super) ended: Vec<Ended>,
    /// The nodes of the prompt, with the number of blocks before each.
    pub(super) path: Vec<(NodeId, usize)>,
    active: Vec<u64>,
    next: Vec<u64>,
}

/// A set of up to 64 workers that hold equally many of the leading blocks.
pub(super) struct Ended {
    word: u32,
    /// How many.
    depth: u32,
    /// The workers, as bits of that word.
    bits: u64,
}

impl Ended {
    fn one(holder: HolderId, depth: u32) -> Self {
        Self { word: word(holder) as u32, depth, bits: bit(holder) }
    }

    fn all(words: &[u64], depth: u32) -> impl Iterator<Item = Self> {
        let some = words.iter().zip(0..).filter(|(bits, _)| **bits != 0);
        some.map(move |(bits, word)| Self { word, depth, bits: *bits })
    }

    pub(super) fn workers(&self) -> usize {
        self.bits.count_ones() as usize
    }

    pub(super) fn each(&self) -> impl Iterator<Item = (HolderId, u32)> {
        let first = self.word * 64;
        holder_ids(std::slice::from_ref(&self.bits)).map(move |holder| (first + holder, self.depth))
    }

    /// Writes it down for each holder, 64 to a word.
    pub(super) fn write(&self, depths: &mut [[u32; 64]]) {
        let Some(depths) = depths.get_mut(self.word as usize) else { return };
        // Most of them at once, and those few again that have other depths.
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
    /// Finds the overlap of every worker. Goes to the end of what anybody has of the prompt if
    /// `all`, else as far as those go that are asked about.
    pub(super) fn find(&self, found: &mut Found, all: bool) {
        let Found { ended, path, active, next } = found;
        // Another core has often made the keys, and most prompts part where the one before did:
        // what is needed of them comes near together.
        let parts =
            path.iter().filter_map(|(_, before)| self.keys.get(*before)).chain(self.keys.last());
        let mut near = parts.fold(0, |near, key| near ^ key.get() as u64);
        ended.clear();
        path.clear();
        active.clear();
        let (mut end, mut last) = (0, None);
        while let Some((id, agree)) = self.tree.follow(last, &self.keys[end..]) {
            let node = self.tree.node(id);
            // Comes near while the next nodes are looked for.
            near ^= node.holders.touch();
            path.push((id, end));
            end += agree as usize;
            last = Some(id);
            if agree < node.len() {
                break;
            }
        }
        std::hint::black_box(near);
        let ends = path.iter().skip(1).map(|(_, before)| *before).chain([end]);
        let mut depth = 0;
        for ((id, before), end) in path.iter().zip(ends) {
            let node = self.tree.node(*id);
            self.uses.note(&node.used);
            self.go_on(&node.holders, (end - before) as u32, *before, active, next, ended);
            std::mem::swap(active, next);
            depth = end;
            if !(all || active.iter().any(|word| *word != 0)) {
                break;
            }
        }
        ended.extend(Ended::all(active, depth as u32));
    }

    /// Puts those of the active into `next` that hold the first `agree` blocks of a node, and tells
    /// where the others end.
    fn go_on(
        &self,
        holders: &Holders,
        agree: u32,
        depth: usize,
        active: &mut [u64],
        next: &mut Vec<u64>,
        ended: &mut Vec<Ended>,
    ) {
        next.clear();
        let first = depth == 0;
        let is_active = |holder: HolderId, active: &[u64]| {
            if first {
                self.aside.get(word(holder)).is_none_or(|word| word & bit(holder) == 0)
            } else {
                active.get(word(holder)).is_some_and(|word| word & bit(holder) != 0)
            }
        };
        let list = match holders {
            Holders::One(held) => std::slice::from_ref(held),
            Holders::Several(several) => {
                if first {
                    let aside = self.aside.iter().copied().chain(std::iter::repeat(0));
                    next.extend(several.whole.iter().zip(aside).map(|(word, aside)| word & !aside));
                } else {
                    next.extend(
                        several.whole.iter().zip(active.iter()).map(|(word, active)| word & active),
                    );
                    active.iter_mut().zip(next.iter()).for_each(|(active, next)| *active &= !next);
                }
                &several.list
            }
        };
        for held in list {
            if held.from > 0 || held.to == 0 || !is_active(held.holder, active) {
                continue;
            }
            if held.to >= agree {
                if next.len() <= word(held.holder) {
                    next.resize(word(held.holder) + 1, 0);
                }
                next[word(held.holder)] |= bit(held.holder);
            } else {
                ended.push(Ended::one(held.holder, depth as u32 + held.to));
            }
            if !first {
                active[word(held.holder)] &= !bit(held.holder);
            }
        }
        if !first {
            ended.extend(Ended::all(active, depth as u32));
        }
    }
}
