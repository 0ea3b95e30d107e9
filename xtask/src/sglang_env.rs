//! Real SGLang for CPU, as an overlay over the vLLM environment.
//!
//! No build of SGLang's kernels for CPUs is published. Stand-ins raise an exception when called
//! (`python/sglang_env/sitecustomize.py`). With `torch_native` attention some of the image families
//! call none of them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;
use crate::vllm_env::{self, VllmEnv};
use crate::vllm_overlay::add_program;

/// The tested versions, whose hashes `chiasm-upstream` knows.
pub(crate) const VERSIONS: [&str; 2] = ["0.5.22", NEWEST];
pub(crate) const NEWEST: &str = "0.5.23";
const REQUIREMENTS: &str = "python/sglang_env/requirements.txt";
/// The stand-ins for kernels. Python imports a module of this name at startup.
const STAND_INS: &str = "python/sglang_env/sitecustomize.py";
/// The version of the build steps below; incremented when they change the result for the same
/// files.
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

    /// Returns the Python that finds SGLang.
    pub(crate) fn python(&self) -> PathBuf {
        self.path.join("bin/python")
    }
}

/// Makes the environment with this version over the vLLM environment `base` unless it exists.
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
        |path, lock| build(setup, base, &env, path, lock),
    )?;
    Ok(env)
}

fn build(
    setup: &Setup,
    base: &VllmEnv,
    env: &SglangEnv,
    path: &Path,
    lock: &DirLock,
) -> Result<(), Error> {
    setup.output.print_line(&format!("making {}", path.display()))?;
    let site = path.join("site");
    // /tmp is often small or a RAM disk.
    let downloads = path.join("downloads");
    fs::create_dir(&downloads).map_err(Error::io("create", &downloads))?;
    venv::install(setup, REQUIREMENTS, || {
        let mut pip = venv::pip(base.python_command(), "install");
        pip.arg("--target")
            .arg(&site)
            .arg(format!("sglang=={}", env.version))
            .env("TMPDIR", &downloads)
            .stdin(lock.as_stdin()?);
        Ok(pip)
    })?;
    fs::remove_dir_all(&downloads).map_err(Error::io("remove", &downloads))?;
    let stand_ins = setup.workspace.file(STAND_INS)?;
    fs::copy(&stand_ins, site.join("sitecustomize.py")).map_err(Error::io("copy", stand_ins))?;
    add_program(&base.python(), path, "python", "")?;
    setup.output.print_line("checking that SGLang is found")?;
    check_version(env)
}

fn check_version(env: &SglangEnv) -> Result<(), Error> {
    let mut python = venv::python(&env.path);
    python.args(["-c", "import sgl_kernel, importlib.metadata as m; print(m.version('sglang'))"]);
    let found = child::read(&mut python, "asking for SGLang's version")?;
    if found == env.version {
        return Ok(());
    }
    Err(Error::WrongSglang { found, wanted: env.version, path: env.path.clone() })
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
    }
}
