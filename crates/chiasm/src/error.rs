//! The errors of commands.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chiasm_engine::ShmTooSmall;
use chiasm_fleet::NoEngines;
use chiasm_hub::HubError;
use chiasm_media::MediaError;
use chiasm_pipeline::model::ModelError;
use chiasm_sim_engine::SimError;
use chiasm_vision::VisionError;

/// An error that ends a command with exit code 1.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    #[error("{0}")]
    Usage(String),
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("can't listen on {address}: {source}{}", listen_advice(source))]
    Listen { address: std::net::SocketAddr, source: io::Error },
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error(
        "{source}; {model} is not a local directory, so it is read as the id of a model on the hub"
    )]
    HubModel { model: PathBuf, source: HubError },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Vision(#[from] VisionError),
    #[error(transparent)]
    Media(#[from] MediaError),
    #[error(transparent)]
    Fleet(#[from] NoEngines),
    #[error(transparent)]
    SharedMemory(#[from] ShmTooSmall),
    #[error("the simulated engine failed: {0}")]
    Sim(Arc<SimError>),
    #[error("the server failed: {0}")]
    Server(#[source] io::Error),
    #[error("problems found: {problems}, see above")]
    Unhealthy { problems: usize },
    #[error("a demo request failed: {0}")]
    Demo(String),
}

impl CliError {
    /// Creates an error about a file.
    pub(crate) fn file(path: &Path, source: io::Error) -> Self {
        Self::File { path: path.to_owned(), source }
    }
}

/// Returns the advice for a failed bind, or an empty string.
fn listen_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; another server may use the port: --port 0 picks a free one",
        io::ErrorKind::PermissionDenied => {
            "; ports below 1024 require root or CAP_NET_BIND_SERVICE: give another --port"
        }
        io::ErrorKind::AddrNotAvailable => {
            "; give an address of this machine as --host, or 0.0.0.0 for all of them"
        }
        _ => "",
    }
}
