//! The errors of allocating slots, opening arenas and resolving handles.

use std::io;

/// The reason why a slot can't be allocated or lent. The tensor then has to be sent in another way.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The arena has no room: the engine has not returned enough slots.
    #[error("the arena is full")]
    Full,
    /// The tensor is larger than the arena.
    #[error("{bytes} bytes do not fit into the arena of {capacity} bytes")]
    TooLarge {
        /// The requested bytes.
        bytes: usize,
        /// The total bytes of all slots.
        capacity: u64,
    },
    /// Every entry in the table of leases is in use.
    #[error("all leases of the arena are in use")]
    NoLease,
    /// `/dev/shm`, or the memory behind it, is exhausted.
    #[error("no memory for the arena: {0}")]
    NoMemory(#[source] io::Error),
}

impl SlotError {
    /// Returns the cause as a label for counters.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Full => "arena_full",
            Self::TooLarge { .. } => "larger_than_arena",
            Self::NoLease => "no_lease",
            Self::NoMemory(_) => "no_memory",
        }
    }
}

/// The reason why an arena can't be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The name is not the name of an arena.
    #[error("'{0}' is not the name of an arena")]
    Name(String),
    /// The file does not exist or can't be accessed.
    #[error("arena {name}: {source}")]
    Io {
        /// The arena's name.
        name: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The file is not a valid arena.
    #[error("arena {name}: {problem}")]
    Unsuitable {
        /// The arena's name.
        name: String,
        /// The problem with the file.
        #[source]
        problem: ArenaProblem,
    },
}

/// A problem with an arena's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaProblem {
    /// The file is a directory, a device or similar.
    #[error("not a regular file")]
    NotAFile,
    /// Another user owns or may access the file.
    #[error("not private to this user")]
    NotPrivate,
    /// The file does not begin with an arena's magic bytes.
    #[error("not an arena")]
    NotAnArena,
    /// The layout has a version that this crate does not support.
    #[error("unsupported layout version")]
    Version,
    /// The header does not fit the size of the file.
    #[error("the header does not match the file's size")]
    Size,
    /// The header's number differs from the number in the name.
    #[error("the number in the header differs from that in the name")]
    Number,
}

/// The reason why a handle can't be resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The handle belongs to another arena.
    #[error("the handle belongs to another arena")]
    Arena,
    /// The lease is not in the table.
    #[error("the handle's lease is not in the table")]
    Lease,
    /// The lease has ended; its entry is free or has a newer generation.
    #[error("the handle's lease has ended")]
    Ended,
    /// The handle was already resolved. When the first of two views is dropped, the frontend may
    /// overwrite the bytes of the second one.
    #[error("the handle was already resolved: lend the slot again for each message")]
    Used,
    /// The byte range is not that of the lease, or not within the arena.
    #[error("the handle's byte range is not that of its lease")]
    Range,
}
