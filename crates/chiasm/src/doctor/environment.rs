//! The contents of the Python environment of a `vllm`: its version, the plugin, and the modules
//! that the processor needs.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use chiasm_processor::{ProcessorError, find_python, python_command};
use serde::Deserialize;

use super::deadline::{CommandError, FILE_SYSTEM_TIMEOUT, run_command, with_deadline};

/// The deadline for the script. Finding all packages on a cold disk takes seconds.
const SCRIPT_TIMEOUT: Duration = Duration::from_secs(30);

/// The output of `environment.py`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Environment {
    /// The path of the Python.
    #[serde(skip)]
    pub(super) path: PathBuf,
    /// Python's version.
    pub(super) python: String,
    /// The version of the vLLM package.
    pub(super) vllm: Option<String>,
    /// The version of the plugin that vLLM finds, or the error of importing it. `None` if it is not
    /// installed.
    pub(super) plugin: Option<String>,
    /// The missing modules among those that vLLM's processor imports.
    pub(super) missing: Vec<String>,
    /// `true` if Landlock and seccomp are available.
    pub(super) sandbox: bool,
}

/// The reason why the environment of a command is unknown.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnknownEnvironment {
    #[error("its file system does not answer")]
    FileSystem,
    /// The command has no Python.
    #[error(transparent)]
    NoPython(#[from] ProcessorError),
    /// Running the script in the Python failed.
    #[error("{}: {problem}", python.display())]
    Python { python: PathBuf, problem: PythonProblem },
}

/// The failure of the script.
#[derive(Debug, thiserror::Error)]
pub(super) enum PythonProblem {
    /// The script's files can't be written.
    #[error(transparent)]
    Script(#[from] io::Error),
    #[error("there is no such program")]
    Missing,
    /// The script failed; the reason as text.
    #[error("{0}")]
    Failed(String),
    /// The script's output is not the expected JSON.
    #[error(transparent)]
    Output(#[from] serde_json::Error),
}

/// Inspects the Python environment of the command `vllm`.
///
/// # Errors
/// The command has no Python, or the Python can't run the script.
pub(super) async fn inspect(vllm: &Path) -> Result<Environment, UnknownEnvironment> {
    let command = vllm.to_owned();
    let path = with_deadline(FILE_SYSTEM_TIMEOUT, move || find_python(&command))
        .ok_or(UnknownEnvironment::FileSystem)??;
    match run_script(&path).await {
        Ok(environment) => Ok(Environment { path, ..environment }),
        Err(problem) => Err(UnknownEnvironment::Python { python: path, problem }),
    }
}

async fn run_script(python: &Path) -> Result<Environment, PythonProblem> {
    let (command, _sources) = python_command(python, include_str!("environment.py"))?;
    let output = run_command(command.into(), SCRIPT_TIMEOUT).await;
    let output = output.map_err(|error| match error {
        CommandError::NotFound => PythonProblem::Missing,
        CommandError::Failed(reason) => PythonProblem::Failed(reason),
    })?;
    Ok(serde_json::from_str(&output)?)
}
