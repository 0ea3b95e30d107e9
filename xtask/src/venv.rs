//! Python virtual environments. The user's pip configuration (index, proxy, certificates, cache)
//! applies unchanged.

use std::path::Path;
use std::process::Command;

use crate::child::{self, Output};
use crate::error::Error;
use crate::keyed_dir::DirLock;
use crate::python;
use crate::setup::Setup;

/// The number of attempts at an install. pip repeats single requests itself, but not a download
/// that breaks off half-way.
const MAX_ATTEMPTS: usize = 3;

/// Makes an environment without packages, with the first supported Python. `size` is the size of
/// the downloads to come, which is printed.
pub(crate) fn make(
    setup: &Setup,
    path: &Path,
    lock: &DirLock,
    size: Option<&str>,
) -> Result<(), Error> {
    let program = python::find()?;
    let size = size.map(|size| format!(": {size}")).unwrap_or_default();
    setup.output.print_line(&format!("making {} with {program}{size}", path.display()))?;
    let mut venv = Command::new(program);
    venv.args(["-m", "venv"]).arg(path).stdin(lock.as_stdin()?);
    isolate(&mut venv);
    child::run(&mut venv, "python -m venv", &setup.output, &setup.cancel)
}

/// Returns a Python command that sees only the packages of the environment at `path`.
pub(crate) fn python(path: &Path) -> Command {
    let mut command = Command::new(path.join("bin/python"));
    isolate(&mut command);
    command
}

/// Returns a pip command (`install`, `download`) that ignores dependencies: our lists are complete.
pub(crate) fn pip(mut python: Command, command: &str) -> Command {
    python.args([
        "-m",
        "pip",
        command,
        "--no-deps",
        "--no-input",
        "--disable-pip-version-check",
        "--retries",
        "10",
    ]);
    python
}

/// Installs a list of requirements, with up to [`MAX_ATTEMPTS`] attempts.
pub(crate) fn install(
    setup: &Setup,
    list: &str,
    pip: impl Fn() -> Result<Command, Error>,
) -> Result<(), Error> {
    let path = setup.workspace.file(list)?;
    let what = format!("pip install -r {list}");
    let mut attempt = 1;
    loop {
        let mut pip = pip()?;
        pip.arg("-r").arg(&path);
        if matches!(setup.output, Output::Log(_)) {
            pip.args(["--progress-bar", "off"]);
        }
        match child::run(&mut pip, &what, &setup.output, &setup.cancel) {
            Err(Error::Failed { status, .. }) if attempt < MAX_ATTEMPTS => {
                attempt += 1;
                let again = format!("{what}: {status}, attempt {attempt} of {MAX_ATTEMPTS}");
                setup.output.print_line(&again)?;
            }
            result => return result,
        }
    }
}

/// Removes environment variables that would import packages from elsewhere or install them there.
pub(crate) fn isolate(command: &mut Command) {
    for name in ["PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"]
    {
        command.env_remove(name);
    }
}
