//! The state of a source, as followers see it.

/// Everything that a source names at one time.
pub(crate) trait Snapshot: Clone + Default + PartialEq + Send + Sync + 'static {
    /// The plural noun for the named things, for log messages.
    const KIND: &'static str;
    /// `true` if changes of the snapshot are logged.
    const LOGS_CHANGES: bool;

    /// Sets whether the source answers, and returns the previous value.
    fn set_current(&mut self, is_current: bool) -> bool;

    /// Returns the number of named things.
    fn count(&self) -> usize;

    /// Returns the number of things that are in only one of the two snapshots.
    fn differences(&self, other: &Self) -> usize;
}
