//! Programs that cargo builds, and the lines that they print.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::build_profile;
use crate::cargo::cargo;
use crate::child;
use crate::dist::Profile;
use crate::error::Error;
use crate::setup::Setup;

/// Builds `chiasm` and returns its path.
pub(crate) fn chiasm(setup: &Setup, profile: Profile) -> Result<PathBuf, Error> {
    let arguments = ["--locked", "--package", "chiasm", "--bin", "chiasm"];
    build(setup, "chiasm", "Cargo.toml", profile, &arguments, "chiasm")
}

/// Builds an example and returns its path.
pub(crate) fn example(
    setup: &Setup,
    profile: Profile,
    package: &str,
    name: &str,
) -> Result<PathBuf, Error> {
    let what = format!("the example `{name}` of {package}");
    let arguments = ["--locked", "--package", package, "--example", name];
    build(setup, &what, "Cargo.toml", profile, &arguments, &format!("examples/{name}"))
}

/// Builds a program of `bench/peers` in the release profile, with the feature of the same name
/// only, and returns its path.
pub(crate) fn measuring(setup: &Setup, name: &str) -> Result<PathBuf, Error> {
    // Without --locked: the dependencies of Chiasm's crates change with the main lock file, and
    // this workspace's lock file has to follow.
    let arguments = ["--bin", name, "--features", name];
    let what = format!("the program `{name}` of bench/peers");
    build(setup, &what, "bench/peers/Cargo.toml", Profile::Release, &arguments, name)
}

/// Builds `program` if it is out of date and returns its path.
fn build(
    setup: &Setup,
    what: &str,
    manifest: &str,
    profile: Profile,
    arguments: &[&str],
    program: &str,
) -> Result<PathBuf, Error> {
    let manifest = setup.workspace.file(manifest)?;
    let progress = format!("building {what} in the {} profile", profile.name());
    setup.output.print_line(&progress)?;
    let mut build = cargo(&setup.workspace);
    build.args(["build", "--profile", profile.name(), "--manifest-path"]);
    build.arg(&manifest).args(arguments);
    let mut folder = PathBuf::from(profile.name());
    if let Some(data) = profile_data(setup, profile)? {
        folder =
            Path::new(&build_profile::use_data(&setup.workspace, &mut build, &data)?).join(folder);
    }
    child::run(&mut build, &format!("cargo build of {what}"), &setup.output, &setup.cancel)?;
    let mut locate = cargo(&setup.workspace);
    locate.args(["metadata", "--no-deps", "--format-version=1", "--manifest-path"]).arg(&manifest);
    let what = "cargo metadata";
    let printed = child::read(&mut locate, what)?;
    let metadata: serde_json::Value = serde_json::from_str(&printed)
        .map_err(|source| Error::Json { what: what.to_owned(), source })?;
    let target = metadata.get("target_directory").and_then(serde_json::Value::as_str);
    let unreadable = || Error::Unreadable { what: what.to_owned(), printed: String::new() };
    Ok(PathBuf::from(target.ok_or_else(unreadable)?).join(folder).join(program))
}

/// Returns the profile data with which programs of this profile are built; `None` if there is none.
pub(crate) fn profile_data(setup: &Setup, profile: Profile) -> Result<Option<PathBuf>, Error> {
    if profile == Profile::Dist { build_profile::find(&setup.workspace) } else { Ok(None) }
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
