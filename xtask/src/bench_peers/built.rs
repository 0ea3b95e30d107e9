//! Builds programs of this workspace for a benchmark.

use std::path::{Path, PathBuf};

use crate::bench_peers::MANIFEST;
use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;

/// Builds `chiasm` and returns its path.
pub(crate) fn chiasm(setup: &Setup) -> Result<PathBuf, Error> {
    release(setup, "chiasm", &["--workspace", "--bin", "chiasm"], "chiasm")
}

/// Builds an example and returns its path.
pub(crate) fn example(setup: &Setup, package: &str, name: &str) -> Result<PathBuf, Error> {
    let what = format!("the example `{name}` of {package}");
    release(setup, &what, &["--package", package, "--example", name], &format!("examples/{name}"))
}

/// Runs a release build and returns the path of `program`.
fn release(setup: &Setup, what: &str, arguments: &[&str], program: &str) -> Result<PathBuf, Error> {
    let manifest = setup.workspace.file(MANIFEST)?;
    setup.output.print_line(&format!("building {what}"))?;
    let mut build = cargo(&setup.workspace);
    build.args(["build", "--release", "--locked"]).args(arguments);
    child::run(&mut build, &format!("cargo build of {what}"), &setup.output, &setup.cancel)?;
    Ok(target_directory(setup, &manifest)?.join("release").join(program))
}

/// Returns the target directory of the workspace of `manifest`.
pub(crate) fn target_directory(setup: &Setup, manifest: &Path) -> Result<PathBuf, Error> {
    let mut locate = cargo(&setup.workspace);
    locate.args(["metadata", "--no-deps", "--format-version=1", "--manifest-path"]).arg(manifest);
    let what = "cargo metadata";
    let printed = child::read(&mut locate, what)?;
    let metadata: serde_json::Value = serde_json::from_str(&printed)
        .map_err(|source| Error::Json { what: what.to_owned(), source })?;
    let target = metadata.get("target_directory").and_then(serde_json::Value::as_str);
    let target = target
        .ok_or_else(|| Error::Unreadable { what: what.to_owned(), printed: String::new() })?;
    Ok(target.into())
}
