//! Agents and frontends that share a secret.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use tempfile::TempDir;

use crate::support::{Process, Server, chiasm, demo_model, send_signal};

/// Processes with one state folder.
pub(crate) struct Cluster {
    state: TempDir,
}

/// A running agent. Killed when dropped.
pub(crate) struct Agent {
    process: Process,
    /// `host:port`
    pub(crate) address: String,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        Self { state: tempfile::tempdir().expect("a folder") }
    }

    pub(crate) fn state(&self) -> String {
        self.state.path().display().to_string()
    }

    /// An agent on the machine of this number.
    pub(crate) fn agent(&self, machine: u8, flags: &[&str]) -> Agent {
        self.agent_at(&format!("127.0.0.{machine}"), "0", flags)
    }

    /// An agent that listens there.
    pub(crate) fn agent_at(&self, host: &str, port: &str, flags: &[&str]) -> Agent {
        self.agent_by(chiasm(&[]), host, port, flags)
    }

    /// The same by a command that runs the binary under test.
    pub(crate) fn agent_by(
        &self,
        mut chiasm: Command,
        host: &str,
        port: &str,
        flags: &[&str],
    ) -> Agent {
        let model = demo_model().display().to_string();
        let mut child = chiasm
            .args(["agent", &model, "--host", host, "--port", port])
            .args(flags)
            .env("CHIASM_STATE_DIR", self.state.path())
            // For the program that stands in for vLLM.
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
                    .split_once("an agent waits")
                    .and_then(|(_, rest)| rest.split_once(" address="))
                {
                    let _ = sender.send(address.split(' ').next().unwrap_or_default().to_owned());
                }
            }
        });
        let process = Process(child);
        let address =
            address.recv_timeout(Duration::from_secs(60)).expect("it says where it listens");
        Agent { process, address }
    }

    /// A frontend of these agents.
    pub(crate) fn serve(&self, agents: &[Agent], flags: &[&str]) -> Server {
        let addresses: Vec<&str> = agents.iter().map(|agent| &*agent.address).collect();
        self.serve_at(&addresses.join(","), flags)
    }

    /// A frontend of the agents at these addresses.
    pub(crate) fn serve_at(&self, addresses: &str, flags: &[&str]) -> Server {
        self.serve_with(&[&["--agents", addresses], flags].concat())
    }

    /// A frontend that finds its agents by these flags.
    pub(crate) fn serve_with(&self, flags: &[&str]) -> Server {
        let (model, state) = (demo_model().display().to_string(), self.state());
        let args = [&model, "--served-model-name", "m", "--state-dir", &state];
        Server::start(&[&args[..], flags].concat())
    }
}

impl Agent {
    /// Ends it at once.
    pub(crate) fn kill(&mut self) {
        self.process.end();
    }

    pub(crate) fn signal(&self, signal: &str) {
        send_signal(self.process.0.id(), signal);
    }

    /// Waits for its end. Whether that was in order.
    pub(crate) fn wait(&mut self) -> bool {
        self.process.0.wait().expect("it ends").success()
    }

    pub(crate) fn port(&self) -> String {
        self.address.rsplit_once(':').expect("host:port").1.to_owned()
    }
}
