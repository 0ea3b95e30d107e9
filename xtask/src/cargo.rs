//! The cargo that runs xtask.

use std::env;
use std::process::Command;

use crate::workspace::Workspace;

/// Returns a command that runs the same cargo, without the environment variables about the package
/// xtask. Build scripts that watch these variables would run again, here and in the next plain
/// build.
pub(crate) fn cargo(workspace: &Workspace) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command.current_dir(&workspace.root).stdin(std::process::Stdio::null());
    command
}
