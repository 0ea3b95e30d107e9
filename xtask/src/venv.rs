//! Virtual environments of Python. pip's own configuration (index, proxy, certificates, cache) is
//! the user's and is left alone.

use std::path::Path;
use std::process::Command;

use crate::child::{self, Output};
use crate::error::Error;
use crate::keyed_dir::Held;
use crate::python;
use crate::setup::Setup;

/// pip repeats single requests itself; this many times the whole install, for a download that
/// breaks off half-way.
const ATTEMPTS: usize = 3;

/// Makes an environment without packages, with the first Python that fits. `size` is what there
/// will be to download, where that is worth a line.
pub(crate) fn make(
    setup: &Setup,
    path: &Path,
    held: &Held,
    size: Option<&str>,
) -> Result<(), Error> {
    let program = python::find()?;
    let size = size.map(|size| format!(": {size}")).unwrap_or_default();
    setup.output.say(&format!("making {} with {program}{size}", path.display()))?;
    let mut venv = Command::new(program);
    venv.args(["-m", "venv"]).arg(path).stdin(held.as_input()?);
    isolate(&mut venv);
    child::run(&mut venv, "python -m venv", &setup.output, &setup.cancel)
}

/// A Python that sees the packages of the environment at `path` and no others.
pub(crate) fn python(path: &Path) -> Command {
    let mut command = Command::new(path.join("bin/python"));
    isolate(&mut command);
    command
}

/// A command of pip (`install`, `download`) for what is named alone: our lists are complete.
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

/// Installs one list, and tries again when that fails.
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
            Err(Error::Failed { status, .. }) if attempt < ATTEMPTS => {
                attempt += 1;
                let again = format!("{what}: {status}, attempt {attempt} of {ATTEMPTS}");
                setup.output.say(&again)?;
            }
            result => return result,
        }
    }
}

/// Settings that would bring in packages from elsewhere, or put new ones there, are not meant for
/// this environment.
pub(crate) fn isolate(command: &mut Command) {
    for name in ["PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"]
    {
        command.env_remove(name);
    }
}
