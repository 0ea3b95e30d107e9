//! Workers whose overlap is more than the leading blocks of one group: several groups, windows,
//! lower tiers.

use super::cache::Cache;
use super::holders::HolderId;
use super::radix_tree::{NodeId, Position, RadixTree};
use super::source::{Need, Source, Tier};

/// The holders that one worker's caches are.
#[derive(Clone)]
pub(super) struct Hybrid {
    /// The one that stands for the worker in the list of workers.
    holder: HolderId,
    /// Holders of groups that must hold all leading blocks.
    leading: Vec<HolderId>,
    /// Holders of groups that must hold the last blocks, and how many of them.
    windows: Vec<(HolderId, usize)>,
    /// Holders of tiers that blocks are loaded from.
    lower: Vec<HolderId>,
}

impl Hybrid {
    /// `None` if the first cache says it all.
    pub(super) fn of(caches: &[(Source, Cache)]) -> Option<Self> {
        let ((first, cache), rest) = caches.split_first()?;
        if rest.is_empty() && first.is_chain() {
            return None;
        }
        let mut hybrid = Self {
            holder: cache.holder(),
            leading: Vec::new(),
            windows: Vec::new(),
            lower: Vec::new(),
        };
        for (source, cache) in caches {
            match (source.tier, source.role) {
                (Tier::Device, Need::Leading) => hybrid.leading.push(cache.holder()),
                (Tier::Device, Need::Last(blocks)) => hybrid.windows.push((cache.holder(), blocks)),
                (Tier::Cpu | Tier::Storage, _) => hybrid.lower.push(cache.holder()),
            }
        }
        // What several groups or a window need of lower tiers we don't claim to know.
        if first.role != Need::Leading || rest.iter().any(|(source, _)| source.group != first.group)
        {
            hybrid.lower.clear();
        }
        Some(hybrid)
    }

    pub(super) fn holder(&self) -> HolderId {
        self.holder
    }

    pub(super) fn has_lower(&self) -> bool {
        !self.lower.is_empty()
    }

    /// How many leading blocks the engine can go on after: the most that suit every group, as its
    /// coordinator finds them.
    pub(super) fn overlap(&self, depths: &[u32], path: &Path<'_>) -> usize {
        let mut overlap = self
            .leading
            .iter()
            .map(|holder| depths[*holder as usize] as usize)
            .min()
            .unwrap_or(path.len);
        loop {
            let before = overlap;
            for (holder, blocks) in &self.windows {
                let mut from = overlap;
                while from > 0 && overlap - from < *blocks {
                    from -= 1;
                    if !path.holds(from, *holder) {
                        overlap = from;
                    }
                }
            }
            if overlap == before {
                return overlap;
            }
        }
    }

    /// Adds the blocks after the overlap that lower tiers hold, without a break.
    pub(super) fn with_lower_tiers(&self, overlap: usize, path: &Path<'_>) -> usize {
        let after = (overlap..path.len)
            .take_while(|at| self.lower.iter().any(|holder| path.holds(*at, *holder)));
        overlap + after.count()
    }
}

/// The blocks of a prompt that are in the tree.
pub(super) struct Path<'a> {
    pub(super) tree: &'a RadixTree,
    /// The nodes of the prompt, with the number of blocks before each.
    pub(super) nodes: &'a [(NodeId, usize)],
    /// Blocks that somebody may hold.
    pub(super) len: usize,
}

impl Path<'_> {
    fn holds(&self, index: usize, holder: HolderId) -> bool {
        let node = self.nodes.partition_point(|(_, before)| *before <= index);
        node.checked_sub(1).is_some_and(|node| {
            let (node, before) = self.nodes[node];
            self.tree.holds(Position { node, at: (index - before) as u32 }, holder)
        })
    }
}
