//! Programs that cargo builds in the release profile, and the lines that they print.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;

/// Builds `chiasm` and returns its path.
pub(crate) fn chiasm(setup: &Setup) -> Result<PathBuf, Error> {
    let arguments = ["--locked", "--workspace", "--bin", "chiasm"];
    build(setup, "chiasm", "Cargo.toml", &arguments, "chiasm")
}

/// Builds an example and returns its path.
pub(crate) fn example(setup: &Setup, package: &str, name: &str) -> Result<PathBuf, Error> {
    let what = format!("the example `{name}` of {package}");
    let arguments = ["--locked", "--package", package, "--example", name];
    build(setup, &what, "Cargo.toml", &arguments, &format!("examples/{name}"))
}

/// Builds a program of `bench/peers`, with the feature of the same name only, and returns its path.
pub(crate) fn measuring(setup: &Setup, name: &str) -> Result<PathBuf, Error> {
    // Without --locked: the dependencies of Chiasm's crates change with the main lock file, and
    // this workspace's lock file has to follow.
    let arguments = ["--bin", name, "--features", name];
    let what = format!("the program `{name}` of bench/peers");
    build(setup, &what, "bench/peers/Cargo.toml", &arguments, name)
}

/// Builds in the release profile and returns the path of `program`.
fn build(
    setup: &Setup,
    what: &str,
    manifest: &str,
    arguments: &[&str],
    program: &str,
) -> Result<PathBuf, Error> {
    let manifest = setup.workspace.file(manifest)?;
    setup.output.print_line(&format!("building {what}"))?;
    let mut build = cargo(&setup.workspace);
    build.args(["build", "--release", "--manifest-path"]).arg(&manifest).args(arguments);
    child::run(&mut build, &format!("cargo build of {what}"), &setup.output, &setup.cancel)?;
    let mut locate = cargo(&setup.workspace);
    locate.args(["metadata", "--no-deps", "--format-version=1", "--manifest-path"]).arg(&manifest);
    let what = "cargo metadata";
    let printed = child::read(&mut locate, what)?;
    let metadata: serde_json::Value = serde_json::from_str(&printed)
        .map_err(|source| Error::Json { what: what.to_owned(), source })?;
    let target = metadata.get("target_directory").and_then(serde_json::Value::as_str);
    let unreadable = || Error::Unreadable { what: what.to_owned(), printed: String::new() };
    Ok(PathBuf::from(target.ok_or_else(unreadable)?).join("release").join(program))
}

/// Runs `command` to its end and returns the lines of its standard output. Its standard error goes
/// to the terminal.
pub(crate) fn lines(command: &mut Command, what: &str) -> Result<Vec<String>, Error> {
    let spawn = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = spawn.map_err(|source| Error::Spawn {
        program: command.get_program().display().to_string(),
        source,
    })?;
    let output = child.stdout.take().map(BufReader::new);
    let lines: Result<Vec<String>, _> = output.into_iter().flat_map(BufReader::lines).collect();
    let status = child.wait().map_err(Error::io("wait for", what))?;
    if !status.success() {
        return Err(Error::Failed { what: what.to_owned(), status, log: String::new() });
    }
    lines.map_err(Error::io("read the output of", what))
}
