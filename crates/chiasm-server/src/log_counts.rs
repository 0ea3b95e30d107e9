//! Counts of the process's log.

/// Counts of the process's log: lines that were not written, by cause, and panics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounts {
    /// Too many were waiting.
    pub full: u64,
    /// Whoever should have read them was gone.
    pub unwritten: u64,
    /// Warnings of a kind that had just been written often enough.
    pub repeated: u64,
    /// Panics, on any thread.
    pub panics: u64,
}
