//! The errors of picking a worker.

/// An error of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// There is no worker, or the request excludes all of them. Retryable once an engine is ready.
    #[error("no worker is available; wait for an engine to become ready")]
    NoWorker,
    /// Every worker that could take the request is suspect. Each may answer again at any time.
    #[error("all {0} workers that could take the request are unresponsive")]
    Suspect(usize),
    /// Every worker that could take the request is busier than
    /// [`BusyThresholds`](crate::BusyThresholds) allow. Retryable once requests have ended.
    #[error("all {0} workers are busy; try again later")]
    Busy(usize),
    /// Every worker that could take the request drains.
    #[error("no engine accepts new requests: all agents are drained")]
    Drained,
}
