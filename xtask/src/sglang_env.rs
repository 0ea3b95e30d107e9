//! Real SGLang for CPU: the packages that it needs beside vLLM's environment, in a folder that
//! Python looks into first.
//!
//! No build of its kernels for CPUs is published. What is put in their place raises when it is
//! called (`python/sglang_env/sitecustomize.py`), and with `torch_native` attention nothing does
//! for some of the image families.

use std::fs;
use std::path::{Path, PathBuf};

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{Held, KeyedDir};
use crate::setup::Setup;
use crate::venv;
use crate::vllm_env::{self, VllmEnv};
use crate::vllm_overlay::add_program;

/// The versions that the tests were run with, whose hashes `chiasm-upstream` knows.
pub(crate) const VERSIONS: [&str; 2] = ["0.5.22", NEWEST];
pub(crate) const NEWEST: &str = "0.5.23";
const REQUIREMENTS: &str = "python/sglang_env/requirements.txt";
/// Python imports a module of this name by itself.
const STAND_INS: &str = "python/sglang_env/sitecustomize.py";
/// Counted up when the steps below change what comes out of the same files.
const RECIPE: &[u8] = b"2";

/// A complete environment.
#[derive(Clone, Debug)]
pub(crate) struct SglangEnv {
    path: PathBuf,
    version: &'static str,
}

impl SglangEnv {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A Python that finds SGLang.
    pub(crate) fn python(&self) -> PathBuf {
        self.path.join("bin/python")
    }
}

/// Makes the environment with a version over that of vLLM, or finds it made.
pub(crate) fn ensure(
    setup: &Setup,
    base: &VllmEnv,
    version: &'static str,
) -> Result<SglangEnv, Error> {
    let mut inputs = vllm_env::inputs(&setup.workspace)?;
    inputs.push(RECIPE.to_vec());
    for file in [REQUIREMENTS, STAND_INS] {
        let path = setup.workspace.file(file)?;
        inputs.push(fs::read(&path).map_err(Error::io("read", path))?);
    }
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, &format!("sglang-{version}"), &inputs);
    let env = SglangEnv { path: dir.path().to_owned(), version };
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| base.python().is_file() && env.python().is_file(),
        |path, held| build(setup, base, &env, path, held),
    )?;
    Ok(env)
}

fn build(
    setup: &Setup,
    base: &VllmEnv,
    env: &SglangEnv,
    path: &Path,
    held: &Held,
) -> Result<(), Error> {
    setup.output.say(&format!("making {}", path.display()))?;
    let site = path.join("site");
    // /tmp is often small, or memory.
    let downloads = path.join("downloads");
    fs::create_dir(&downloads).map_err(Error::io("create", &downloads))?;
    venv::install(setup, REQUIREMENTS, || {
        let mut pip = venv::pip(base.python_command(), "install");
        pip.arg("--target")
            .arg(&site)
            .arg(format!("sglang=={}", env.version))
            .env("TMPDIR", &downloads)
            .stdin(held.as_input()?);
        Ok(pip)
    })?;
    fs::remove_dir_all(&downloads).map_err(Error::io("remove", &downloads))?;
    let (from, to) = (setup.workspace.file(STAND_INS)?, site.join("sitecustomize.py"));
    fs::copy(&from, &to).map_err(Error::io("copy", from))?;
    add_program(&base.python(), path, "python", "")?;
    setup.output.say("checking that SGLang is found")?;
    check_version(env)
}

fn check_version(env: &SglangEnv) -> Result<(), Error> {
    let mut python = venv::python(&env.path);
    python.args(["-c", "import sgl_kernel, importlib.metadata as m; print(m.version('sglang'))"]);
    let found = child::read(&mut python, "asking for SGLang's version")?;
    match found == env.version {
        true => Ok(()),
        false => Err(Error::WrongSglang { found, wanted: env.version, path: env.path.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_is_pinned_and_comes_from_the_users_index() {
        let list =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(REQUIREMENTS))
                .unwrap();
        for line in list.lines().filter(|line| !line.starts_with('#')) {
            let (_, version) = line.split_once("==").expect(line);
            assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{line}");
            assert!(!line.contains("://") && !line.contains('@'), "{line}");
        }
    }
}
