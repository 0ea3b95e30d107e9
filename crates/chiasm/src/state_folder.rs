//! Where what is known of engines outlives their frontend.

use std::env;
use std::path::{Path, PathBuf};

use chiasm_engine::state::StateDir;

use crate::error::CliError;

/// The state folder: the one that was asked for, else the user's. `None`, with a warning, where the
/// user's can't be had.
///
/// # Errors
/// The folder that was asked for can't be used.
pub(crate) fn open(asked: Option<&Path>) -> Result<Option<StateDir>, CliError> {
    match required(asked) {
        Err(error) if asked.is_none() => {
            tracing::warn!(%error, "a later frontend can't take over the engines of this one");
            Ok(None)
        }
        opened => opened.map(Some),
    }
}

/// The state folder: the one that was asked for, else the user's.
///
/// # Errors
/// It can't be used, or the user has none.
pub(crate) fn required(asked: Option<&Path>) -> Result<StateDir, CliError> {
    StateDir::open(path(asked)?).map_err(|error| CliError::Usage(error.to_string()))
}

/// Where the state folder is, or is to be: the one that was asked for, else the user's.
///
/// # Errors
/// The user has none.
pub(crate) fn path(asked: Option<&Path>) -> Result<PathBuf, CliError> {
    let path = asked.map(Path::to_owned).or_else(of_user);
    path.ok_or_else(|| {
        CliError::Usage("there is no state folder; give one with --state-dir".to_owned())
    })
}

/// The place that the XDG base directory specification has for it.
fn of_user() -> Option<PathBuf> {
    let folder = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let states = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(states.join("chiasm"))
}
