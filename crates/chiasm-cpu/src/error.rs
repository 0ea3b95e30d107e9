//! Errors of the CPU pool.

use std::time::Duration;

/// The reason why CPU-heavy work was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuError {
    /// The request exceeds its limit on CPU time.
    #[error(
        "the request needs {:.1} s of this server's CPU time by estimate, at most {} s are allowed \
         (--max-request-cost)",
        cost.as_secs_f64(),
        limit.as_secs_f64()
    )]
    TooCostly {
        /// The estimated cost of all the request's work, with the refused piece.
        cost: Duration,
        /// The limit on a request's cost.
        limit: Duration,
    },
    /// The work panicked, or no thread could be started for it.
    #[error("a request's work failed")]
    Failed,
}
