//! What is in the Python environment of a `vllm`: its version, the plugin, what the processor
//! needs.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use chiasm_processor::{ProcessorError, python_of, script};
use serde::Deserialize;

use super::deadline::{DISK_TIME, NoAnswer, looked, printed};

/// A cold disk takes seconds to find all packages.
const TIME: Duration = Duration::from_secs(30);

/// The answer of `environment.py`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Environment {
    /// Where its Python is.
    #[serde(skip)]
    pub(super) path: PathBuf,
    /// Python's version.
    pub(super) python: String,
    /// vLLM's version, as its package says.
    pub(super) vllm: Option<String>,
    /// The version of the plugin that vLLM finds.
    pub(super) plugin: Option<String>,
    /// Modules that vLLM's processor imports and that are not there.
    pub(super) missing: Vec<String>,
    /// Whether Landlock and seccomp can be asked for.
    pub(super) sandbox: bool,
}

/// The environment of a command can't be told.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnknownEnvironment {
    #[error("its file system does not answer")]
    FileSystem,
    /// There is no Python.
    #[error(transparent)]
    NoPython(#[from] ProcessorError),
    /// There is a Python, and no answer of it.
    #[error("{}: {problem}", python.display())]
    Python { python: PathBuf, problem: PythonProblem },
}

/// A Python does not answer as it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum PythonProblem {
    /// What it is to run can't be written.
    #[error(transparent)]
    Script(#[from] io::Error),
    #[error("there is no such program")]
    Missing,
    /// It fails, in words.
    #[error("{0}")]
    Failed(String),
    /// It prints something else.
    #[error(transparent)]
    Answer(#[from] serde_json::Error),
}

/// Asks the Python of this command.
///
/// # Errors
/// There is no answer.
pub(super) async fn ask(vllm: &Path) -> Result<Environment, UnknownEnvironment> {
    let command = vllm.to_owned();
    let path =
        looked(DISK_TIME, move || python_of(&command)).ok_or(UnknownEnvironment::FileSystem)??;
    match ask_python(&path).await {
        Ok(environment) => Ok(Environment { path, ..environment }),
        Err(problem) => Err(UnknownEnvironment::Python { python: path, problem }),
    }
}

async fn ask_python(python: &Path) -> Result<Environment, PythonProblem> {
    let (command, _sources) = script(python, include_str!("environment.py"))?;
    let printed = printed(command.into(), TIME).await.map_err(|error| match error {
        NoAnswer::Missing => PythonProblem::Missing,
        NoAnswer::Failed(reason) => PythonProblem::Failed(reason),
    })?;
    Ok(serde_json::from_str(&printed)?)
}
