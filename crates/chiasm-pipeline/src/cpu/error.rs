//! Why the pool does not do a piece of work.

use std::time::Duration;

/// The reason for which CPU-heavy work was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuError {
    /// The request asks for more work of this process than one may.
    #[error(
        "the request needs {:.1} s of this server's CPU time by estimate, at most {} s are allowed \
         (--max-request-cost)",
        cost.as_secs_f64(),
        limit.as_secs_f64()
    )]
    TooCostly {
        /// The cost of all that the request would have asked for.
        cost: Duration,
        /// The cost that it may ask for.
        limit: Duration,
    },
    /// The work panicked, or no thread could be started for it.
    #[error("a request's work failed")]
    Failed,
}
