//! Counts of the process's log.

/// Counts of the process's log: dropped lines by cause, and panics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounts {
    /// Lines dropped because too many were queued.
    pub full: u64,
    /// Lines that could not be written because the reader of the log was gone.
    pub unwritten: u64,
    /// Warnings dropped because the same kind had just been written often enough.
    pub repeated: u64,
    /// Panics, on any thread.
    pub panics: u64,
}
