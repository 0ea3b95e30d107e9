//! Shared memory between the frontend and the engines on its machine.
//!
//! The frontend writes a tensor once, into a [`SlotWriter`] of the engine's [`Arena`]. The engine
//! reads it in place. The protocol between the two processes is in `docs/shared-memory.md`. In
//! short: an entry in a table lends a slot to the engine. The slot is free again once the engine
//! has stored the entry's generation back.
//!
//! ```
//! use chiasm_transfer::{Arena, ArenaReader};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The frontend:
//! let arena = Arena::create(1 << 20)?;
//! let mut writer = arena.slot(3)?;
//! writer.copy_from_slice(&[1, 2, 3]);
//! let slot = writer.publish();
//! let lease = slot.lend()?;
//!
//! // The engine, which has received the arena's name once and gets the handle with a request:
//! let reader = ArenaReader::open(arena.name())?;
//! arena.unlink();
//! let view = reader.resolve(&lease.handle)?;
//! assert_eq!(view[..], [1, 2, 3]);
//! # Ok(())
//! # }
//! ```
//!
//! | item | purpose |
//! |---|---|
//! | [`Arena`], [`SlotWriter`], [`Slot`], [`WeakSlot`], [`Lease`] | the frontend's side |
//! | [`ArenaReader`], [`SlotView`] | the engine's side, for the simulated engine; vLLM's is `python/chiasm_vllm` |
//! | [`Handle`] | a reference to a lent slot, which a request carries instead of a tensor's bytes |
//! | [`ShmBlobBudget`], [`ShmBlob`] | named bytes for a process that does not know this protocol and copies them |
//! | [`sweep`], [`free_shm_bytes`] | cleaning and measuring `/dev/shm` at startup |
//!
//! `unsafe` maps memory and makes slices of it, only in `mapping`, `slot` and `reader`. Each block
//! states why it is sound.

mod arena;
mod error;
mod layout;
mod leases;
mod mapping;
mod owner;
mod ranges;
mod reader;
mod segment;
mod shared;
mod shm;
mod shm_blob;
mod slot;
mod sweep;

pub use arena::Arena;
pub use error::{ArenaProblem, HandleError, OpenError, SlotError};
pub use layout::{Handle, LAYOUT_VERSION};
pub use leases::LeaseId;
pub use reader::{ArenaReader, SlotView};
pub use shared::ArenaUsage;
pub use shm::{SHM_DIR, free_shm_bytes};
pub use shm_blob::{ShmBlob, ShmBlobBudget, ShmBlobError};
pub use slot::{Lease, Slot, SlotWriter, WeakSlot};
pub use sweep::sweep;
