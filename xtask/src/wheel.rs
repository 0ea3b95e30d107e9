//! Tests of the wheel: pip installs it into an environment with vLLM, as users do. That environment
//! is new each time. It sees the packages of the tests' vLLM environment, which does not change.

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
const MAKER_TESTS: &str = "python/wheel/test_make_wheel.py";

/// Packs the debug binary as a wheel, installs it and returns its tests as [`tests_of_wheel`] does.
pub(crate) fn tests(workspace: &Workspace, env: &VllmEnv, models: &Path) -> Result<Command, Error> {
    child::read(env.python_command().arg("-B").arg(workspace.file(MAKER_TESTS)?), MAKER_TESTS)?;
    let folder = empty(workspace.root.join("target/wheel-test"))?;
    // The binary is not built here: another set of features would compile the dependencies again.
    let wheel =
        dist::make_wheel(workspace, &workspace.file("target/debug/chiasm")?, None, &folder)?;
    tests_of_wheel(&wheel, workspace, env, models)
}

/// Installs a wheel beside the vLLM of `env` and returns the command that tests it. `models` is the
/// directory of the tiny models.
pub(crate) fn tests_of_wheel(
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

/// Empties or creates the folder, and returns it.
fn empty(folder: PathBuf) -> Result<PathBuf, Error> {
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
    }
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    Ok(folder)
}

/// Makes an environment that searches its own packages first, then those of `env`. Writes its
/// command `vllm` as pip would. Returns its Python.
fn environment(env: &VllmEnv, path: &Path) -> Result<PathBuf, Error> {
    child::read(
        env.python_command().args(["-m", "venv", "--without-pip"]).arg(path),
        "python -m venv",
    )?;
    let environment = VllmEnv::at(path);
    let own = vllm_env::site_packages(&environment)?;
    // The packages of an overlay are searched before those of its base.
    let overlay = env.path().join("site");
    let sites = [overlay, vllm_env::site_packages(env)?];
    let lines = sites
        .iter()
        .filter(|site| site.is_dir())
        .map(|site| format!("import site; site.addsitedir({site:?})\n"));
    let links = own.join("vllm_of_tests.pth");
    fs::write(&links, lines.collect::<String>()).map_err(Error::io("write", &links))?;
    let vllm = environment.vllm();
    let text = format!(
        "#!{}\nimport sys\nfrom vllm.entrypoints.cli.main import main\n\
         if __name__ == \"__main__\":\n    sys.exit(main())\n",
        environment.python().display()
    );
    fs::write(&vllm, text).map_err(Error::io("write", &vllm))?;
    fs::set_permissions(&vllm, Permissions::from_mode(0o755))
        .map_err(Error::io("change", &vllm))?;
    Ok(environment.python())
}
