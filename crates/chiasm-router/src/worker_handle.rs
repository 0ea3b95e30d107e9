//! Handles of workers that go stale when the worker is removed.

/// An index into the worker table and its generation, so that a stale handle never matches a
/// reused index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WorkerHandle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}
