//! The cargo that runs this program.

use std::env;
use std::process::Command;

use crate::workspace::Workspace;

/// Returns a command of the cargo that runs this program, without the variables about this
/// program's own package: build scripts that watch them would run again, here and in the next plain
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
