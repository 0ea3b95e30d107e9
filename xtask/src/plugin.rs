//! The Python packages that ship with Chiasm: their tests, and an installation of the vLLM plugin.
//!
//! The plugin is installed with pip as users install it, but outside the vLLM environment. All
//! checkouts share the environment; each has its own plugin.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::models::add_python_sources;
use crate::setup::Setup;
use crate::venv;
use crate::vllm_env::{self, VllmEnv};
use crate::workspace::Workspace;

const PACKAGE: &str = "python/chiasm_vllm";
const PROCESSOR: &str = "python/chiasm_processor";
const PROJECT: &str = "python/chiasm_vllm/pyproject.toml";

/// Installs the plugin unless it is installed. Returns the directory for the engines' PYTHONPATH.
pub(crate) fn ensure(setup: &Setup, env: &VllmEnv) -> Result<PathBuf, Error> {
    let project = setup.workspace.file(PROJECT)?;
    let package = setup.workspace.root.join(PACKAGE);
    let mut inputs = vllm_env::inputs(&setup.workspace)?;
    inputs.push(fs::read(&project).map_err(Error::io("read", &project))?);
    add_python_sources(&package, &mut inputs)?;
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "plugin", &inputs);
    let installed = dir.path().join("site");
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| path.join("site/chiasm_vllm/__init__.py").is_file(),
        |path, lock| {
            setup.output.print_line(&format!("installing {PACKAGE} into {}", path.display()))?;
            // setuptools builds in the source folder and leaves its files there.
            let copy = path.join("source");
            copy_tree(&package, &copy)?;
            let mut pip = venv::pip(env.python_command(), "install");
            pip.args(["--no-build-isolation", "--no-index", "--target"])
                .arg(&installed)
                .arg(&copy)
                .stdin(lock.as_stdin()?);
            child::run(&mut pip, "pip install ./python/chiasm_vllm", &setup.output, &setup.cancel)
        },
    )?;
    Ok(installed)
}

/// Returns the command that runs the plugin's tests, which need vLLM and no model.
pub(crate) fn tests(workspace: &Workspace, env: &VllmEnv) -> Command {
    unit_tests(env, &workspace.root.join(PACKAGE))
}

/// Returns the command that runs the tests of the processor processes, which need vLLM and the tiny
/// models.
pub(crate) fn processor_tests(workspace: &Workspace, env: &VllmEnv) -> Command {
    let mut python = unit_tests(env, &workspace.root.join(PROCESSOR));
    // Hides the log of vLLM and its libraries, which is irrelevant here.
    python.envs([("VLLM_LOGGING_LEVEL", "ERROR"), ("PYTHONWARNINGS", "ignore")]);
    python
}

fn unit_tests(env: &VllmEnv, package: &Path) -> Command {
    let mut python = env.python_command();
    python
        .args(["-B", "-m", "unittest", "discover", "-s"])
        .arg(package.join("tests"))
        .arg("-t")
        .arg(package);
    python
}

fn copy_tree(from: &Path, to: &Path) -> Result<(), Error> {
    fs::create_dir_all(to).map_err(Error::io("create", to))?;
    for entry in fs::read_dir(from).map_err(Error::io("list", from))? {
        let path = entry.map_err(Error::io("list", from))?.path();
        let name = path.file_name().unwrap_or_default();
        if path.is_dir() {
            copy_tree(&path, &to.join(name))?;
        } else {
            fs::copy(&path, to.join(name)).map_err(Error::io("copy", &path))?;
        }
    }
    Ok(())
}
