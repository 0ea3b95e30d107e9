//! The cache of a worker that an event is about.

use chiasm_types::BlockSize;

use crate::event::BlockStored;

/// A KV-cache group in a tier, to which one cache of a worker belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) tier: Tier,
    pub(super) group: u32,
    pub(super) need: Need,
}

/// A tier of memory that holds blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tier {
    #[default]
    Device,
    Cpu,
    Storage,
}

/// The blocks that a group must hold so that the engine can continue after the first n blocks of a
/// prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Need {
    /// Every leading block. Assumed for unknown kinds, because no kind can need more.
    #[default]
    Leading,
    /// The given number of last blocks, at least 1; all n if n is smaller.
    Last(usize),
}

impl Source {
    /// Returns `true` if an engine that holds a block also holds all blocks before it, unless its
    /// events are out of order.
    pub(super) fn is_chain(self) -> bool {
        self.tier == Tier::Device && self.need == Need::Leading
    }

    /// Returns the cache that a stored event is about, or `None` if its medium or locality does not
    /// count.
    pub(super) fn from_stored(event: &BlockStored, block_size: BlockSize) -> Option<Self> {
        let need = match (event.kv_cache_spec_kind.as_deref(), event.kv_cache_spec_sliding_window) {
            // A token attends to itself and to the window − 1 tokens before it (vLLM's
            // `SlidingWindowManager`).
            (Some("sliding_window" | "sliding_window_mla"), Some(window)) => {
                Need::Last((window as usize).saturating_sub(1).div_ceil(block_size.get()).max(1))
            }
            // Only the state after the last block counts (`MambaManager`).
            (Some("mamba"), _) => Need::Last(1),
            _ => Need::Leading,
        };
        let source =
            Self::from_names(event.medium.as_deref(), event.group_idx, event.locality.as_deref())?;
        Some(Self { need, ..source })
    }

    /// Returns the cache with the names in an event, or `None` if its medium or locality does not
    /// count. The need is a default, because removals don't contain it.
    pub(super) fn from_names(
        medium: Option<&str>,
        group: Option<u32>,
        locality: Option<&str>,
    ) -> Option<Self> {
        let tier = match medium {
            _ if locality == Some("REMOTE") => return None,
            None | Some("GPU") => Tier::Device,
            // Some connectors write lower case.
            Some("CPU" | "cpu") => Tier::Cpu,
            Some("STORAGE" | "storage") => Tier::Storage,
            Some(_) => return None,
        };
        Some(Self { tier, group: group.unwrap_or(0), need: Need::Leading })
    }
}
