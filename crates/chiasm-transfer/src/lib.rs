//! Shared memory between the frontend and the engines on its machine.
//!
//! A tensor is written once, into a [`SlotWriter`] of the engine's [`Arena`], and read in place by
//! the engine. How the two processes agree on who may touch what is in `docs/shared-memory.md`; in
//! short: a slot is lent to the engine by an entry in a table, and is free again when the engine
//! has stored that entry's generation back.
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
//! // The engine, which was told the arena's name once and gets the handle with a request:
//! let reader = ArenaReader::open(arena.name())?;
//! arena.unlink();
//! let view = reader.resolve(&lease.handle)?;
//! assert_eq!(view[..], [1, 2, 3]);
//! # Ok(())
//! # }
//! ```
//!
//! | part | is |
//! |---|---|
//! | [`Arena`], [`SlotWriter`], [`Slot`], [`WeakSlot`], [`Lease`] | the frontend's side |
//! | [`ArenaReader`], [`SlotView`] | the engine's side, as the simulated engine has it; vLLM's is `python/chiasm_vllm` |
//! | [`Handle`] | what a request carries in place of a tensor's bytes |
//! | [`ParcelRoom`], [`Parcel`] | bytes that a process which knows none of this copies out by a name |
//! | [`sweep`], [`free_shm_bytes`] | the state of `/dev/shm` at a start |
//!
//! `unsafe` is what maps memory and makes slices of it, in `mapping`, `slot` and `reader`; the
//! reasons stand beside it.

mod arena;
mod error;
mod layout;
mod leases;
mod mapping;
mod owner;
mod parcel;
mod ranges;
mod reader;
mod segment;
mod shared;
mod shm;
mod slot;
mod sweep;

pub use arena::Arena;
pub use error::{ArenaProblem, BadHandle, NoSlot, OpenError};
pub use layout::{Handle, LAYOUT_VERSION};
pub use leases::LeaseId;
pub use parcel::{NoParcel, Parcel, ParcelRoom};
pub use reader::{ArenaReader, SlotView};
pub use shared::ArenaUsage;
pub use shm::{SHM_DIR, free_shm_bytes};
pub use slot::{Lease, Slot, SlotWriter, WeakSlot};
pub use sweep::sweep;
