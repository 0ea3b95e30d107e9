//! The setup of real engines. Environments and models are prepared on another thread while Rust
//! compiles. The setup is mostly downloads.

use std::ffi::OsString;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

use crate::child::{Cancel, Output};
use crate::clients_env::{self, ClientsEnv};
use crate::error::Error;
use crate::models;
use crate::plugin;
use crate::setup::Setup;
use crate::vllm_env::{self, VllmEnv};
use crate::vllm_overlay;
use crate::workspace::Workspace;

/// The paths and versions for tests with real engines.
#[derive(Clone, Debug)]
pub(crate) struct Engines {
    pub(crate) version: &'static str,
    pub(crate) env: VllmEnv,
    pub(crate) models: PathBuf,
    plugin: PathBuf,
    /// Another version, for tests with engines of both versions.
    other_version: &'static str,
    other: VllmEnv,
    /// Third-party clients.
    clients: ClientsEnv,
}

impl Engines {
    /// Returns the environment variables that pass the paths and versions to tests.
    pub(crate) fn variables(&self) -> [(&'static str, OsString); 11] {
        [
            ("CHIASM_TEST_OTHER_VLLM_VERSION", self.other_version.into()),
            ("CHIASM_TEST_OTHER_PYTHON", self.other.python().into()),
            ("CHIASM_TEST_VLLM_VERSION", self.version.into()),
            ("CHIASM_TEST_VLLM", self.env.vllm().into()),
            ("CHIASM_TEST_PYTHON", self.env.python().into()),
            // NIXL is in the base environment, so an overlay takes it from the other environment.
            (
                "CHIASM_TEST_NIXL",
                self.env.nixl().or_else(|| self.other.nixl()).unwrap_or_default().into(),
            ),
            ("CHIASM_TEST_MODELS", self.models.clone().into()),
            ("CHIASM_TEST_PLUGIN", self.plugin.clone().into()),
            ("CHIASM_TEST_CLIENTS_PYTHON", self.clients.python().into()),
            ("CHIASM_TEST_NODE", self.clients.node().into()),
            ("CHIASM_TEST_NODE_PACKAGES", self.clients.packages().into()),
        ]
    }
}

/// The setup of environments and models on another thread. Dropping it stops the thread.
pub(crate) struct EngineSetup {
    cancel: Cancel,
    thread: Option<JoinHandle<Result<Engines, Error>>>,
    engines: Option<Engines>,
}

impl EngineSetup {
    /// Starts the thread.
    pub(crate) fn start(workspace: &Workspace, version: &'static str) -> Result<Self, Error> {
        std::fs::create_dir_all(&workspace.cache).map_err(Error::io("create", &workspace.cache))?;
        let log = workspace.cache.join("vllm-env.log");
        println!("preparing vLLM {version} and models in the background, log: {}", log.display());
        let cancel = Cancel::default();
        let setup = Setup {
            workspace: workspace.clone(),
            output: Output::Log(log),
            cancel: cancel.clone(),
        };
        let thread = thread::spawn(move || {
            let result = vllm_env::ensure(&setup).and_then(|base| {
                let models = models::ensure(&setup, &base)?;
                let plugin = plugin::ensure(&setup, &base)?;
                let env = vllm_overlay::ensure_version(&setup, &base, version)?;
                let other_version = vllm_overlay::companion(version);
                let other = vllm_overlay::ensure_version(&setup, &base, other_version)?;
                let clients = clients_env::ensure(&setup)?;
                Ok(Engines { version, env, models, plugin, other_version, other, clients })
            });
            match &result {
                Ok(_) | Err(Error::Cancelled) => {}
                // The step that needs the engines fails minutes later; report the error now.
                Err(error) => eprintln!("the real engines will fail: {error}"),
            }
            result
        });
        Ok(Self { cancel, thread: Some(thread), engines: None })
    }

    /// Returns a handle that stops the setup.
    pub(crate) fn canceller(&self) -> Cancel {
        self.cancel.clone()
    }

    /// Waits until the environments are ready.
    pub(crate) fn wait(&mut self) -> Result<Engines, Error> {
        if let Some(thread) = self.thread.take() {
            self.engines = Some(thread.join().map_err(|_| Error::Panicked)??);
        }
        // `None` only after an error was returned, which ends the run.
        self.engines.clone().ok_or(Error::Panicked)
    }
}

impl Drop for EngineSetup {
    fn drop(&mut self) {
        self.cancel.cancel();
        if let Some(thread) = self.thread.take() {
            // The result is irrelevant; the thread and its child processes have to end.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_setup_reaches_the_waiting_thread() {
        let dir = tempfile::tempdir().unwrap();
        let workspace =
            Workspace { root: dir.path().join("empty"), cache: dir.path().join("cache") };
        // The repository has no requirements.txt, so the setup fails with an error that names it.
        let error =
            EngineSetup::start(&workspace, vllm_env::VLLM_VERSION).unwrap().wait().unwrap_err();
        assert!(error.to_string().contains("requirements.txt"), "{error}");
    }
}
