//! The errors of a simulation.

use std::path::PathBuf;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// A parameter is invalid.
    #[error("{0}")]
    Config(&'static str),
    /// No workload has that name.
    #[error("unknown workload '{name}'; use {known}")]
    UnknownWorkload {
        /// The name.
        name: String,
        /// The known names.
        known: String,
    },
    /// A trace can't be opened or read.
    #[error("cannot read the trace {path}: {source}")]
    TraceRead {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A line of a trace is invalid.
    #[error("line {line} of the trace: {problem}")]
    TraceLine {
        /// The number of the line, from 1.
        line: u64,
        /// The fault, and what is expected.
        problem: String,
    },
    /// No request fits the engines.
    #[error("no request fits the engines; give them more blocks or shorten the prompts")]
    NothingFits,
    /// The router picked no worker.
    #[error("the router picked no worker: {0}")]
    Route(#[from] chiasm_router::RouteError),
}
