//! The delivery of media items to the engine. Items in its receiver cache are not sent. Tensors in
//! a slot of its arena go through shared memory, all others in the message.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use chiasm_transfer::{Arena, Handle, LAYOUT_VERSION, LeaseId, SlotError};
use rmpv::Value;

use super::EngineClient;
use crate::error::EngineError;
use crate::mirror::ReceiverMirror;
use crate::wire::{MmData, MmFeature, TensorData};

/// The plugin's method that opens an arena.
const ATTACH_METHOD: &str = "chiasm_attach";
/// The version of the map that [`to_wire`] makes of a handle.
const HANDLE_VERSION: u64 = 1;

/// The number of a request's media items by their way to the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ItemDelivery {
    /// Items that the engine's receiver cache held.
    pub cached: usize,
    /// Items with a tensor in shared memory.
    pub shm: usize,
    /// Items whose tensors were all in the message.
    pub inline: usize,
    /// Tensors in a slot that were sent in the message because the arena had no free lease.
    pub no_lease: usize,
}

/// The answer of an engine's plugin that has opened an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plugin {
    /// The plugin's version.
    pub version: String,
    /// The capacity of the engine's encoder cache in tokens; `None` if the plugin does not report
    /// it.
    pub encoder_cache_tokens: Option<u64>,
}

/// An error of attaching an arena to an engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The arena could not be created.
    #[error("no shared memory: {0}")]
    Create(#[source] io::Error),
    /// The engine did not open the arena.
    #[error("{0}")]
    Engine(#[from] EngineError),
    /// The engine has no plugin that opens arenas.
    #[error("the engine has no plugin for it; install python/chiasm_vllm where the engine runs")]
    NoPlugin,
    /// The plugin supports another layout.
    #[error(
        "its plugin answers {answer}, layout {LAYOUT_VERSION} is needed; \
         install the plugin that belongs to this Chiasm"
    )]
    Layout {
        /// The plugin's whole answer, which may have its layout.
        answer: String,
    },
}

/// The state of all deliveries to one engine.
#[derive(Debug)]
pub(super) struct Delivery {
    state: Mutex<State>,
    arena: OnceLock<Arena>,
}

#[derive(Debug)]
struct State {
    mirror: Option<ReceiverMirror>,
    /// The leases of the items in the mirror.
    leases: HashMap<String, Vec<LeaseId>>,
}

/// A locked [`Delivery`]. Holding it fixes the order in which the engine receives requests.
pub(super) struct LockedDelivery<'a> {
    state: MutexGuard<'a, State>,
    arena: Option<&'a Arena>,
}

impl Delivery {
    pub(super) fn new(receiver_cache_bytes: Option<u64>) -> Self {
        let mirror = receiver_cache_bytes.map(ReceiverMirror::new);
        Self { state: Mutex::new(State { mirror, leases: HashMap::new() }), arena: OnceLock::new() }
    }

    /// Locks the state. No panic leaves it half-changed, so a poisoned lock is usable.
    pub(super) fn lock(&self) -> LockedDelivery<'_> {
        LockedDelivery {
            state: self.state.lock().unwrap_or_else(PoisonError::into_inner),
            arena: self.arena(),
        }
    }

    pub(super) fn arena(&self) -> Option<&Arena> {
        self.arena.get()
    }
}

impl LockedDelivery<'_> {
    /// Returns `true` if the engine's receiver cache holds the item.
    pub(super) fn holds(&self, key: &str) -> bool {
        self.state.mirror.as_ref().is_some_and(|mirror| mirror.holds(key))
    }

    /// Returns the keys of the items that need data and have none.
    pub(super) fn missing(&self, features: &[MmFeature]) -> Vec<String> {
        self.state.mirror.as_ref().map_or_else(Vec::new, |mirror| mirror.missing(features))
    }

    /// Removes an item that the engine reported as missing.
    pub(super) fn forget(&mut self, key: &str) {
        if let Some(mirror) = &mut self.state.mirror {
            mirror.forget(key);
        }
        self.expect_return(key);
    }

    /// Prepares features for sending: removes data that the engine has, and replaces slots by
    /// handles.
    pub(super) fn prepare(&mut self, features: &mut [MmFeature]) -> ItemDelivery {
        let evicted =
            self.state.mirror.as_mut().map_or_else(Vec::new, |mirror| mirror.apply(features));
        let mut delivered = ItemDelivery::default();
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
        // The engine returns the leases of items that it evicts, and after the request those of
        // items that it does not cache.
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

    /// Replaces slots by handles. Returns the number of slots that could not be lent.
    fn lend(&self, data: &mut MmData, leases: &mut Vec<LeaseId>) -> usize {
        match data {
            MmData::Tensor(tensor) => {
                let TensorData::Slot(slot) = &tensor.data else { return 0 };
                // A slot of another arena can't be lent to this engine.
                let Some(arena) = self.arena else { return 1 };
                let lent = if arena.owns(slot) { slot.lend() } else { Err(SlotError::NoLease) };
                let Ok(lease) = lent else { return 1 };
                leases.push(lease.id);
                tensor.data = TensorData::OutOfBand(to_wire(&lease.handle));
                0
            }
            MmData::List(list) => list.iter_mut().map(|data| self.lend(data, leases)).sum(),
            MmData::Int(_) | MmData::Float(_) => 0,
        }
    }

    /// Informs the arena that the engine will soon return the leases of an item.
    fn expect_return(&mut self, key: &str) {
        if let (Some(leases), Some(arena)) = (self.state.leases.remove(key), self.arena) {
            arena.expect_return(leases);
        }
    }
}

/// Encodes a handle as the map that replaces a tensor's bytes.
fn to_wire(handle: &Handle) -> Value {
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

/// Creates an arena and has the engine open it.
pub(super) async fn attach(
    client: &EngineClient,
    bytes: u64,
    timeout: Duration,
) -> Result<Plugin, AttachError> {
    let arena = Arena::create(bytes).map_err(AttachError::Create)?;
    let args = vec![Value::from(arena.name())];
    let answer =
        client.utility(ATTACH_METHOD, args, timeout).await.map_err(|error| match error {
            // Python's message for a missing method.
            EngineError::Utility { message, .. } if message.contains("has no attribute") => {
                AttachError::NoPlugin
            }
            error => error.into(),
        })?;
    if answer["layout"].as_u64() != Some(u64::from(LAYOUT_VERSION)) {
        return Err(AttachError::Layout { answer: answer.to_string() });
    }
    // The engine has opened the arena. Without its name, no crash leaves it in the file system.
    arena.unlink();
    tracing::debug!(%answer, "the engine has opened its arena");
    // A client has one arena: a second one is dropped.
    let _ = client.handle.delivery.arena.set(arena);
    Ok(Plugin {
        version: answer["plugin"].as_str().unwrap_or("of unknown version").to_owned(),
        encoder_cache_tokens: answer["encoder_cache_tokens"].as_u64(),
    })
}
