//! What is in the Python environment of a `vllm`: its version, the plugin, what the processor needs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use chiasm_processor::{python_of, script};
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

/// Asks the Python of this command.
///
/// # Errors
/// Words that say why there is no answer.
pub(super) async fn ask(vllm: &Path) -> Result<Environment, String> {
    let command = vllm.to_owned();
    let path = looked(DISK_TIME, move || python_of(&command))
        .ok_or_else(|| "its file system does not answer".to_owned())?
        .map_err(|error| error.to_string())?;
    let named = |reason: String| format!("{}: {reason}", path.display());
    let (command, _sources) =
        script(&path, include_str!("environment.py")).map_err(|error| named(error.to_string()))?;
    let printed = printed(command.into(), TIME).await.map_err(|error| match error {
        NoAnswer::Missing => named("there is no such program".to_owned()),
        NoAnswer::Failed(reason) => named(reason),
    })?;
    let environment: Environment = serde_json::from_str(&printed).map_err(|error| named(error.to_string()))?;
    Ok(Environment { path, ..environment })
}
