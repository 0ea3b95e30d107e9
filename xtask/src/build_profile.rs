//! The profile of `chiasm` for builds in the profile `dist` for this system (`pgo` records it).
//!
//! It stays in the user's cache, one for each version of the compiler. A profile of an older commit
//! is useful too: the compiler ignores functions that have changed since, and warns.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::workspace::Workspace;

/// The name of the profile's file.
pub(crate) const FILE: &str = "chiasm.profdata";

/// Returns the profile for this compiler; `None` if there is none.
pub(crate) fn find(workspace: &Workspace) -> Result<Option<PathBuf>, Error> {
    let data = dir(workspace)?.join(FILE);
    Ok(data.is_file().then_some(data))
}

/// Makes a build for this system use a profile. Returns the folder of its output within the folder
/// of targets.
pub(crate) fn use_data(
    workspace: &Workspace,
    build: &mut Command,
    data: &Path,
) -> Result<String, Error> {
    let host = host(workspace)?;
    build.args(["--target", &host]);
    set_flag(build, &format!("-Cprofile-use={}", data.display()));
    Ok(host)
}

/// Adds a flag of the compiler to those of the environment. Paths in it may have spaces.
pub(crate) fn set_flag(build: &mut Command, flag: &str) {
    const ENCODED: &str = "CARGO_ENCODED_RUSTFLAGS";
    let encoded = std::env::var(ENCODED).unwrap_or_else(|_| {
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        flags.split_whitespace().collect::<Vec<_>>().join("\u{1f}")
    });
    let flags = [&*encoded, flag].into_iter().filter(|flags| !flags.is_empty());
    build.env(ENCODED, flags.collect::<Vec<_>>().join("\u{1f}"));
}

/// Returns the target triple of this system.
pub(crate) fn host(workspace: &Workspace) -> Result<String, Error> {
    let printed = version(workspace)?;
    let host = printed.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or(Error::Unreadable { what: "rustc -vV".to_owned(), printed })
}

fn version(workspace: &Workspace) -> Result<String, Error> {
    let mut rustc = Command::new("rustc");
    child::read(rustc.arg("-vV").current_dir(&workspace.root), "rustc -vV")
}

/// Returns the folder of the profile for this compiler.
pub(crate) fn dir(workspace: &Workspace) -> Result<PathBuf, Error> {
    let key = KeyedDir::new(&workspace.cache, "pgo", &[version(workspace)?.as_bytes()]);
    Ok(key.path().to_owned())
}
