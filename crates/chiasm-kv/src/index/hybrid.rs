//! The overlap of workers with several KV-cache groups, attention windows or lower tiers.

use super::cache::Cache;
use super::holders::HolderId;
use super::radix_tree::{NodeId, Position, RadixTree};
use super::source::{Need, Source, Tier};

/// The holders of one worker's caches, by their role in its overlap.
#[derive(Clone)]
pub(super) struct Hybrid {
    /// The holder that represents the worker in the list of workers.
    holder: HolderId,
    /// The holders of groups that must hold all leading blocks.
    leading: Vec<HolderId>,
    /// The holders of groups that must hold the last blocks, each with the number of these blocks.
    windows: Vec<(HolderId, usize)>,
    /// The holders of tiers from which blocks can be loaded.
    lower: Vec<HolderId>,
}

impl Hybrid {
    /// Returns the roles of a worker's caches, or `None` if the leading blocks of the first cache
    /// are the overlap.
    pub(super) fn from_caches(caches: &[(Source, Cache)]) -> Option<Self> {
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
            match (source.tier, source.need) {
                (Tier::Device, Need::Leading) => hybrid.leading.push(cache.holder()),
                (Tier::Device, Need::Last(blocks)) => hybrid.windows.push((cache.holder(), blocks)),
                (Tier::Cpu | Tier::Storage, _) => hybrid.lower.push(cache.holder()),
            }
        }
        // It is unknown which blocks of lower tiers several groups or a window need.
        if first.need != Need::Leading || rest.iter().any(|(source, _)| source.group != first.group)
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

    /// Returns the number of leading blocks after which the engine can continue: the largest number
    /// that satisfies every group, as the engine's coordinator computes it.
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

    /// Returns the overlap plus the blocks after it that lower tiers hold without a gap.
    pub(super) fn with_lower_tiers(&self, overlap: usize, path: &Path<'_>) -> usize {
        let after = (overlap..path.len)
            .take_while(|at| self.lower.iter().any(|holder| path.holds(*at, *holder)));
        overlap + after.count()
    }
}

/// The path of a prompt through the tree.
pub(super) struct Path<'a> {
    pub(super) tree: &'a RadixTree,
    /// The nodes of the prompt, each with the number of blocks before it.
    pub(super) nodes: &'a [(NodeId, usize)],
    /// The number of blocks of the prompt that are in the tree.
    pub(super) len: usize,
}

impl Path<'_> {
    /// Returns `true` if a holder holds the block of the prompt at `index`.
    fn holds(&self, index: usize, holder: HolderId) -> bool {
        let node = self.nodes.partition_point(|(_, before)| *before <= index);
        node.checked_sub(1).is_some_and(|node| {
            let (node, before) = self.nodes[node];
            self.tree.holds(Position { node, at: (index - before) as u32 }, holder)
        })
    }
}
