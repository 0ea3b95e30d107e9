//! Why there is no slot, why an arena can't be opened, why a handle can't be resolved.

use std::io;

/// Why there is no slot for a tensor. It travels in another way then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoSlot {
    /// The engine still holds too much of the arena.
    #[error("the arena is full")]
    Full,
    /// It would not even fit an empty arena.
    #[error("{bytes} bytes do not fit the arena of {capacity}")]
    TooLarge {
        /// Bytes that were asked for.
        bytes: usize,
        /// Bytes that slots can have at most.
        capacity: u64,
    },
    /// Every entry of the table of leases is in use.
    #[error("all leases of the arena are in use")]
    NoLease,
    /// `/dev/shm`, or the memory behind it, is used up.
    #[error("no memory for the arena: {0}")]
    NoMemory(#[source] io::Error),
}

impl NoSlot {
    /// A name for counters.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Full => "arena_full",
            Self::TooLarge { .. } => "larger_than_arena",
            Self::NoLease => "no_lease",
            Self::NoMemory(_) => "no_memory",
        }
    }
}

/// Why an arena can't be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The name is not one that a frontend gives.
    #[error("'{0}' is not the name of an arena")]
    Name(String),
    /// It is not there, or out of reach.
    #[error("arena {name}: {source}")]
    Io {
        /// The arena's name.
        name: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// It is there and is not what it should be.
    #[error("arena {name}: {problem}")]
    Unsuitable {
        /// The arena's name.
        name: String,
        /// The fault in it.
        #[source]
        problem: ArenaProblem,
    },
}

/// A fault of a file that is to be an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaProblem {
    /// A directory, a device or the like.
    #[error("it is not a regular file")]
    NotAFile,
    /// Another user owns it or may use it.
    #[error("it is not this user's alone")]
    NotPrivate,
    /// It does not begin as arenas do.
    #[error("it is not an arena")]
    NotAnArena,
    /// A layout that this crate does not know.
    #[error("its layout has another version")]
    Version,
    /// Its header tells of another size.
    #[error("its header does not fit its size")]
    Size,
    /// Its header tells of another number.
    #[error("its number is not that of its name")]
    Number,
}

/// Why a handle can't be resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadHandle {
    /// It names another arena.
    #[error("it belongs to another arena")]
    Arena,
    /// There is no such lease.
    #[error("its lease is not in the table")]
    Lease,
    /// The lease is not lent, or was lent again since.
    #[error("its lease has ended")]
    Ended,
    /// It was resolved before. A second view would be written under when the first one is gone.
    #[error("it was used before: lend the slot again for each sending")]
    Used,
    /// Its bytes are not those of the lease, or not within the arena.
    #[error("its bytes are not those of its lease")]
    Range,
}
