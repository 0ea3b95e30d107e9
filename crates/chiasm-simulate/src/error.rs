//! What can go wrong with a simulation.

use std::path::PathBuf;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// A parameter makes no sense.
    #[error("{0}")]
    Config(&'static str),
    /// No workload has that name.
    #[error("unknown workload '{name}'; use {known}")]
    UnknownWorkload {
        /// The name.
        name: String,
        /// The names that there are.
        known: String,
    },
    /// A trace can't be opened or read.
    #[error("cannot read the trace {path}: {source}")]
    TraceRead {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line of a trace is wrong.
    #[error("line {line} of the trace: {problem}")]
    TraceLine {
        /// Counted from 1.
        line: u64,
        /// The fault, and what would be right.
        problem: String,
    },
    /// Not a single request can be served.
    #[error("no request fits the engines; give them more blocks or shorten the prompts")]
    NothingFits,
    /// The router picked no worker.
    #[error("the router picked no worker: {0}")]
    Route(#[from] chiasm_router::RouteError),
}
