//! Agents and frontends that share a block key secret.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use tempfile::TempDir;

use crate::support::{Process, Server, chiasm, demo_model, send_signal};

/// A factory of processes that share one state folder.
pub(crate) struct Cluster {
    state: TempDir,
    model: PathBuf,
}

/// A running agent. Killed when dropped.
pub(crate) struct Agent {
    process: Process,
    /// `host:port`.
    pub(crate) address: String,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        Self::with_model(demo_model())
    }

    /// Creates a cluster that serves the model in this folder.
    pub(crate) fn with_model(model: PathBuf) -> Self {
        Self { state: tempfile::tempdir().expect("a folder"), model }
    }

    pub(crate) fn state(&self) -> String {
        self.state.path().display().to_string()
    }

    /// Starts an agent on `127.0.0.{machine}`.
    pub(crate) fn agent(&self, machine: u8, flags: &[&str]) -> Agent {
        self.agent_at(&format!("127.0.0.{machine}"), "0", flags)
    }

    /// Starts an agent that listens on `host` and `port`.
    pub(crate) fn agent_at(&self, host: &str, port: &str, flags: &[&str]) -> Agent {
        self.agent_with_command(chiasm(&[]), host, port, flags)
    }

    /// Starts an agent with a given command that runs the binary under test.
    pub(crate) fn agent_with_command(
        &self,
        mut chiasm: Command,
        host: &str,
        port: &str,
        flags: &[&str],
    ) -> Agent {
        let model = self.model.display().to_string();
        let mut child = chiasm
            .args(["agent", &model, "--host", host, "--port", port])
            .args(flags)
            .env("CHIASM_STATE_DIR", self.state.path())
            // Read by `stand_in_vllm.sh`.
            .env("CHIASM_TEST_BINARY", env!("CARGO_BIN_EXE_chiasm"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("chiasm starts");
        let stderr = child.stderr.take().expect("stderr is piped");
        let (sender, address) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                eprintln!("  agent | {line}");
                if let Some((_, address)) = line
                    .split_once("the agent is ready")
                    .and_then(|(_, rest)| rest.split_once(" address="))
                {
                    let _ = sender.send(address.split(' ').next().unwrap_or_default().to_owned());
                }
            }
        });
        let process = Process(child);
        let address =
            address.recv_timeout(Duration::from_secs(60)).expect("the agent logs its address");
        Agent { process, address }
    }

    /// Starts a frontend of these agents.
    pub(crate) fn serve(&self, agents: &[Agent], flags: &[&str]) -> Server {
        let addresses: Vec<&str> = agents.iter().map(|agent| &*agent.address).collect();
        self.serve_at(&addresses.join(","), flags)
    }

    /// Starts a frontend of the agents at these comma-separated addresses.
    pub(crate) fn serve_at(&self, addresses: &str, flags: &[&str]) -> Server {
        self.serve_with_flags(&[&["--agents", addresses], flags].concat())
    }

    /// Starts a frontend with `flags`, which say how it finds its agents.
    pub(crate) fn serve_with_flags(&self, flags: &[&str]) -> Server {
        let model = self.model.display().to_string();
        let state = self.state();
        let args = [&model, "--served-model-name", "m", "--state-dir", &state];
        Server::start(&[&args[..], flags].concat())
    }
}

impl Agent {
    /// Kills the agent.
    pub(crate) fn kill(&mut self) {
        self.process.end();
    }

    pub(crate) fn signal(&self, signal: &str) {
        send_signal(self.process.0.id(), signal);
    }

    /// Waits for the agent's exit. Returns `true` if its status is 0.
    pub(crate) fn wait(&mut self) -> bool {
        self.process.0.wait().expect("the agent ends").success()
    }

    pub(crate) fn port(&self) -> String {
        self.address.rsplit_once(':').expect("host:port").1.to_owned()
    }
}
