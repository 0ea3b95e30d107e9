//! The state folder: knowledge of engines that outlives their frontend.

use std::env;
use std::path::{Path, PathBuf};

use chiasm_engine::state::StateDir;

use crate::error::CliError;

/// Opens the `given` state folder, or the user's. Returns `None`, with a warning, if the user's
/// folder can't be used.
///
/// # Errors
/// The given folder can't be used.
pub(crate) fn open(given: Option<&Path>) -> Result<Option<StateDir>, CliError> {
    match open_required(given) {
        Err(error) if given.is_none() => {
            tracing::warn!(%error, "a later frontend can't take over the engines of this one");
            Ok(None)
        }
        opened => opened.map(Some),
    }
}

/// Opens the `given` state folder, or the user's.
///
/// # Errors
/// The folder can't be used, or the user has none.
pub(crate) fn open_required(given: Option<&Path>) -> Result<StateDir, CliError> {
    StateDir::open(path(given)?).map_err(|error| CliError::Usage(error.to_string()))
}

/// Returns the path of the `given` state folder, or of the user's. The folder need not exist.
///
/// # Errors
/// The user has no home folder.
pub(crate) fn path(given: Option<&Path>) -> Result<PathBuf, CliError> {
    let path = given.map(Path::to_owned).or_else(user_path);
    path.ok_or_else(|| {
        CliError::Usage("there is no state folder; give one with --state-dir".to_owned())
    })
}

/// Returns the user's state folder by the XDG base directory specification.
fn user_path() -> Option<PathBuf> {
    let folder = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(base.join("chiasm"))
}
