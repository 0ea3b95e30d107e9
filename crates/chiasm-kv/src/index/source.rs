//! Which cache of a worker an event is about.

use chiasm_types::BlockSize;

use crate::event::BlockStored;

/// A KV-cache group in a tier: one cache of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) tier: Tier,
    pub(super) group: u32,
    pub(super) role: Need,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tier {
    #[default]
    Device,
    Cpu,
    Storage,
}

/// The blocks of a group that a prompt needs, for the engine to go on after its first n blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Need {
    /// The group needs all n. So it is taken to be for kinds that we don't know: none can need
    /// more.
    #[default]
    Leading,
    /// The group needs the last so many of them, at least 1; all if there are fewer.
    Last(usize),
}

impl Source {
    /// Whether an engine that holds a block holds all blocks before it, but for disorder.
    pub(super) fn is_chain(self) -> bool {
        self.tier == Tier::Device && self.role == Need::Leading
    }

    /// `None` for media and localities that don't count.
    pub(super) fn of(event: &BlockStored, block_size: BlockSize) -> Option<Self> {
        let role = match (event.kv_cache_spec_kind.as_deref(), event.kv_cache_spec_sliding_window) {
            // A token attends to itself and to the window − 1 tokens before it (vLLM's
            // `SlidingWindowManager`).
            (Some("sliding_window" | "sliding_window_mla"), Some(window)) => {
                Need::Last((window as usize).saturating_sub(1).div_ceil(block_size.get()).max(1))
            }
            // The state after the last block (`MambaManager`).
            (Some("mamba"), _) => Need::Last(1),
            _ => Need::Leading,
        };
        let source =
            Self::named(event.medium.as_deref(), event.group_idx, event.locality.as_deref())?;
        Some(Self { role, ..source })
    }

    /// The cache that an event names, as one whose role is not known: removals don't tell it.
    /// `None` for media and localities that don't count.
    pub(super) fn named(
        medium: Option<&str>,
        group: Option<u32>,
        locality: Option<&str>,
    ) -> Option<Self> {
        let tier = match medium {
            _ if locality == Some("REMOTE") => return None,
            None | Some("GPU") => Tier::Device,
            // Some connectors write small letters.
            Some("CPU" | "cpu") => Tier::Cpu,
            Some("STORAGE" | "storage") => Tier::Storage,
            Some(_) => return None,
        };
        Some(Self { tier, group: group.unwrap_or(0), role: Need::Leading })
    }
}
