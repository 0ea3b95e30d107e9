//! Tests of the manifests in `deploy/kubernetes` against Kubernetes' schemas from a Python package.
//!
//! The Python environment is made once per list of pinned packages and kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;

const TESTS: &str = "python/manifests";
const REQUIREMENTS: &str = "python/manifests/requirements.txt";
/// The version of the build steps below; incremented when they change the result for the same list.
const RECIPE: &[u8] = b"1";

/// Returns the command that runs the tests. Makes their Python environment unless it exists.
pub(crate) fn tests(setup: &Setup) -> Result<Command, Error> {
    let mut python = venv::python(&ensure(setup)?);
    python.args(["-B", "-m", "unittest", "discover", "-s"]).arg(setup.workspace.root.join(TESTS));
    Ok(python)
}

fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    let list = setup.workspace.file(REQUIREMENTS)?;
    let list = fs::read(&list).map_err(Error::io("read", list))?;
    let dir = KeyedDir::new(&setup.workspace.cache, "manifests", &[RECIPE, &list]);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| {
            venv::python(path)
                .args(["-c", "import kubernetes_validate"])
                .status()
                .is_ok_and(|status| status.success())
        },
        |path, lock| build(setup, path, lock),
    )?;
    Ok(dir.path().to_owned())
}

fn build(setup: &Setup, path: &Path, lock: &DirLock) -> Result<(), Error> {
    venv::make(setup, path, lock, None)?;
    venv::install(setup, REQUIREMENTS, || {
        let mut pip = venv::pip(venv::python(path), "install");
        pip.args(["--no-compile", "--quiet"]).stdin(lock.as_stdin()?);
        Ok(pip)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_pinned_without_urls() {
        let list =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(REQUIREMENTS))
                .unwrap();
        for line in list.lines().filter(|line| !line.starts_with('#')) {
            let (_, version) = line.split_once("==").expect(line);
            assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{line}");
            assert!(!line.contains("://") && !line.contains('@'), "{line}");
        }
        assert!(list.contains("kubernetes-validate=="));
    }
}
