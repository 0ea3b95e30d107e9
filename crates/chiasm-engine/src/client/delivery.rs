//! How the tensors of media items get to the engine: not at all if its receiver cache holds them,
//! in shared memory if they are in a slot of its arena, in the message otherwise.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use chiasm_transfer::{Arena, Handle, LAYOUT_VERSION, LeaseId, NoSlot};
use rmpv::Value;

use super::EngineClient;
use crate::error::EngineError;
use crate::mirror::ReceiverMirror;
use crate::wire::{MmData, MmFeature, TensorData};

/// The plugin's method that opens an arena.
const ATTACH: &str = "chiasm_attach";
/// Version of the handle below.
const HANDLE_VERSION: u64 = 1;

/// How the media items of one request travelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Items that the engine's receiver cache held.
    pub cached: usize,
    /// Items with a tensor in shared memory.
    pub shm: usize,
    /// Items that were wholly in the message.
    pub inline: usize,
    /// Tensors that were in a slot and had to be put into the message, because the arena had no
    /// lease left.
    pub no_lease: usize,
}

/// What an engine's plugin says when it has opened an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plugin {
    /// Its version.
    pub version: String,
    /// Embeddings that the engine's encoder cache holds, in tokens; `None` if it does not tell.
    pub encoder_cache_tokens: Option<u64>,
}

/// Why an engine has no arena.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The arena could not be made.
    #[error("no shared memory: {0}")]
    Create(#[source] io::Error),
    /// The engine did not open it.
    #[error("{0}")]
    Engine(#[from] EngineError),
    /// The engine does not know how.
    #[error("the engine has no plugin for it; install python/chiasm_vllm where the engine runs")]
    NoPlugin,
    /// The plugin understands another layout.
    #[error(
        "its plugin answers {answer}, layout {LAYOUT_VERSION} is needed; install the plugin that belongs to this Chiasm"
    )]
    Layout {
        /// The plugin's whole answer, which may name its layout.
        answer: String,
    },
}

/// What one engine has been handed, and what it holds of it.
#[derive(Debug)]
pub(super) struct Delivery {
    order: Mutex<State>,
    arena: OnceLock<Arena>,
}

#[derive(Debug)]
struct State {
    mirror: Option<ReceiverMirror>,
    /// Leases of items that the mirror holds.
    leases: HashMap<String, Vec<LeaseId>>,
}

/// The right to hand over: whoever has it decides what the engine sees next.
pub(super) struct Order<'a> {
    state: MutexGuard<'a, State>,
    arena: Option<&'a Arena>,
}

impl Delivery {
    pub(super) fn new(receiver_cache_bytes: Option<u64>) -> Self {
        let mirror = receiver_cache_bytes.map(ReceiverMirror::new);
        Self { order: Mutex::new(State { mirror, leases: HashMap::new() }), arena: OnceLock::new() }
    }

    /// The state is never left half-changed, so a panic elsewhere does not make it unusable.
    pub(super) fn order(&self) -> Order<'_> {
        Order {
            state: self.order.lock().unwrap_or_else(PoisonError::into_inner),
            arena: self.arena(),
        }
    }

    pub(super) fn arena(&self) -> Option<&Arena> {
        self.arena.get()
    }
}

impl Order<'_> {
    pub(super) fn holds(&self, key: &str) -> bool {
        self.state.mirror.as_ref().is_some_and(|mirror| mirror.holds(key))
    }

    pub(super) fn missing(&self, features: &[MmFeature]) -> Vec<String> {
        self.state.mirror.as_ref().map_or_else(Vec::new, |mirror| mirror.missing(features))
    }

    pub(super) fn forget(&mut self, key: &str) {
        if let Some(mirror) = &mut self.state.mirror {
            mirror.forget(key);
        }
        self.expect_return(key);
    }

    /// Makes features ready to be sent: without data where the engine has it, with handles where it
    /// is in shared memory.
    pub(super) fn hand_over(&mut self, features: &mut [MmFeature]) -> Delivered {
        let evicted =
            self.state.mirror.as_mut().map_or_else(Vec::new, |mirror| mirror.apply(features));
        let mut delivered = Delivered::default();
        for feature in features.iter_mut() {
            let Some(item) = &mut feature.data else {
                delivered.cached += 1;
                continue;
            };
            let mut leases = Vec::new();
            for data in item.0.iter_mut().filter_map(|(_, field)| field.data.as_mut()) {
                delivered.no_lease += self.lend(data, &mut leases);
            }
            if leases.is_empty() {
                delivered.inline += 1;
            } else {
                delivered.shm += 1;
                self.state.leases.entry(feature.cache_key().to_owned()).or_default().extend(leases);
            }
        }
        // The engine lets go of what it evicts, and after the request of what it does not cache.
        for key in evicted {
            self.expect_return(&key);
        }
        for feature in features.iter().filter(|feature| feature.data.is_some()) {
            if !self.holds(feature.cache_key()) {
                self.expect_return(feature.cache_key());
            }
        }
        delivered
    }

    /// Turns slots into handles; how many could not be lent.
    fn lend(&self, data: &mut MmData, leases: &mut Vec<LeaseId>) -> usize {
        match data {
            MmData::Tensor(tensor) => {
                let TensorData::Slot(slot) = &tensor.data else { return 0 };
                // A slot of another arena can't be lent to this engine.
                let Some(arena) = self.arena else { return 1 };
                let lent = if arena.owns(slot) { slot.lend() } else { Err(NoSlot::NoLease) };
                let Ok(lease) = lent else { return 1 };
                leases.push(lease.id);
                tensor.data = TensorData::OutOfBand(value(&lease.handle));
                0
            }
            MmData::List(list) => list.iter_mut().map(|data| self.lend(data, leases)).sum(),
            MmData::Int(_) | MmData::Float(_) => 0,
        }
    }

    fn expect_return(&mut self, key: &str) {
        if let (Some(leases), Some(arena)) = (self.state.leases.remove(key), self.arena) {
            arena.expect_return(leases);
        }
    }
}

/// The map that stands for a tensor's bytes.
fn value(handle: &Handle) -> Value {
    let entry = |key: &str, value: Value| (Value::from(key), value);
    Value::Map(vec![
        entry("chiasm", HANDLE_VERSION.into()),
        entry("arena", format!("{:016x}", handle.arena).into()),
        entry("lease", handle.lease.into()),
        entry("generation", handle.generation.into()),
        entry("offset", handle.offset.into()),
        entry("length", handle.length.into()),
    ])
}

pub(super) async fn attach(
    client: &EngineClient,
    bytes: u64,
    timeout: Duration,
) -> Result<Plugin, AttachError> {
    let arena = Arena::create(bytes).map_err(AttachError::Create)?;
    let answer = client.utility(ATTACH, vec![Value::from(arena.name())], timeout).await.map_err(
        |error| match error {
            // Python's words for a method that is not there.
            EngineError::Utility { message, .. } if message.contains("has no attribute") => {
                AttachError::NoPlugin
            }
            error => error.into(),
        },
    )?;
    if answer["layout"].as_u64() != Some(u64::from(LAYOUT_VERSION)) {
        return Err(AttachError::Layout { answer: answer.to_string() });
    }
    // It has been opened: from now on nothing is left in the file system, whoever dies.
    arena.unlink();
    tracing::debug!(%answer, "the engine has opened its arena");
    // A second arena would never be used.
    let _ = client.handle.delivery.arena.set(arena);
    Ok(Plugin {
        version: answer["plugin"].as_str().unwrap_or("of unknown version").to_owned(),
        encoder_cache_tokens: answer["encoder_cache_tokens"].as_u64(),
    })
}
