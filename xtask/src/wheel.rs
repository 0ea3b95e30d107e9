//! The wheel as its users install it: by pip, into an environment that has vLLM. That environment
//! is new each time and sees the packages of the tests' own, which stays as it is.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::dist;
use crate::error::Error;
use crate::venv;
use crate::vllm_env::{self, VllmEnv};
use crate::workspace::Workspace;

const TESTS: &str = "python/wheel/test_wheel.py";
const OF_MAKING: &str = "python/wheel/test_make_wheel.py";

/// Packs the binary that the tests have built as a wheel; then as [`tests_of`].
pub(crate) fn tests(workspace: &Workspace, env: &VllmEnv, models: &Path) -> Result<Command, Error> {
    child::read(env.python_command().arg("-B").arg(workspace.file(OF_MAKING)?), OF_MAKING)?;
    let folder = empty(workspace.root.join("target/wheel-test"))?;
    // Not built here: another set of features would compile the dependencies again.
    let wheel =
        dist::make_wheel(workspace, &workspace.file("target/debug/chiasm")?, None, &folder)?;
    tests_of(&wheel, workspace, env, models)
}

/// Installs a wheel beside the vLLM of `env`, and returns what tests it there. `models` are the
/// tiny models.
pub(crate) fn tests_of(
    wheel: &Path,
    workspace: &Workspace,
    env: &VllmEnv,
    models: &Path,
) -> Result<Command, Error> {
    let python = environment(env, &empty(workspace.root.join("target/wheel-env"))?)?;
    let mut pip = env.python_command();
    pip.args(["-m", "pip", "--python"]).arg(&python);
    pip.args(["install", "--no-deps", "--no-index", "--no-input", "--disable-pip-version-check"])
        .arg(wheel);
    child::read(&mut pip, "pip install of the wheel")?;
    let mut tests = Command::new(python);
    venv::isolate(&mut tests);
    tests.envs(vllm_env::ENGINE_VARIABLES).env("CHIASM_TEST_MODELS", models);
    tests.arg("-B").arg(workspace.file(TESTS)?).arg("-v");
    Ok(tests)
}

fn empty(folder: PathBuf) -> Result<PathBuf, Error> {
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
    }
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    Ok(folder)
}

/// Makes an environment that has the packages of `env` and its own before them, with the command
/// `vllm` as pip writes it; returns its Python.
fn environment(env: &VllmEnv, path: &Path) -> Result<PathBuf, Error> {
    child::read(
        env.python_command().args(["-m", "venv", "--without-pip"]).arg(path),
        "python -m venv",
    )?;
    let made = VllmEnv::at(path);
    let own = vllm_env::site_packages(&made)?;
    // An overlay's packages come before those that it is made over.
    let overlay = env.path().join("site");
    let sites = [overlay, vllm_env::site_packages(env)?];
    let lines = sites
        .iter()
        .filter(|site| site.is_dir())
        .map(|site| format!("import site; site.addsitedir({site:?})\n"));
    let links = own.join("vllm_of_tests.pth");
    fs::write(&links, lines.collect::<String>()).map_err(Error::io("write", &links))?;
    let vllm = made.vllm();
    let text = format!(
        "#!{}\nimport sys\nfrom vllm.entrypoints.cli.main import main\nif __name__ == \"__main__\":\n    sys.exit(main())\n",
        made.python().display()
    );
    fs::write(&vllm, text).map_err(Error::io("write", &vllm))?;
    fs::set_permissions(&vllm, Permissions::from_mode(0o755))
        .map_err(Error::io("change", &vllm))?;
    Ok(made.python())
}
