//! Dynamo's mocker: a worker without a model that simulates an engine's KV cache.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::etcd::Etcd;
use crate::support::{Process, demo_model, send_signal};

/// The seconds until a dead worker is removed from etcd.
const LEASE_SECONDS: &str = "10";

/// Sets the variables for the request and event planes that Chiasm supports, on loopback only.
pub(crate) fn set_planes(worker: &mut Command) {
    worker.envs([
        ("DYN_REQUEST_PLANE", "tcp"),
        ("DYN_EVENT_PLANE", "zmq"),
        ("HF_HUB_OFFLINE", "1"),
    ]);
    for name in [
        "DYN_TCP_RPC_HOST",
        "DYN_TCP_RESPONSE_STREAM_HOST",
        "DYN_EVENT_PLANE_HOST",
        "DYN_SYSTEM_HOST",
    ] {
        worker.env(name, "127.0.0.1");
    }
}

/// A running mocker. Killed when dropped.
pub(crate) struct Mocker {
    process: Process,
}

impl Mocker {
    /// Starts a mocker of the demo's model. It registers in etcd when it is ready.
    pub(crate) fn start(etcd: &Etcd, namespace: &str) -> Self {
        Self::start_with_model(etcd, namespace, &demo_model())
    }

    /// Starts a mocker of another model.
    pub(crate) fn start_with_model(etcd: &Etcd, namespace: &str, model: &Path) -> Self {
        let variables = [
            ("DYN_DISCOVERY_BACKEND", "etcd".to_owned()),
            ("ETCD_ENDPOINTS", format!("http://{}", etcd.server())),
            ("ETCD_LEASE_TTL", LEASE_SECONDS.to_owned()),
        ];
        Self::spawn(&variables, namespace, model)
    }

    /// Starts a mocker that registers as files in a folder.
    pub(crate) fn start_in_folder(folder: &Path, namespace: &str) -> Self {
        let variables = [
            ("DYN_DISCOVERY_BACKEND", "file".to_owned()),
            ("DYN_FILE_KV", folder.display().to_string()),
        ];
        Self::spawn(&variables, namespace, &demo_model())
    }

    fn spawn(variables: &[(&str, String)], namespace: &str, model: &Path) -> Self {
        let python = std::env::var_os("CHIASM_TEST_DYNAMO")
            .expect("CHIASM_TEST_DYNAMO must be the path of a Python with Dynamo");
        let mut mocker = Command::new(python);
        mocker.args(["-B", "-m", "dynamo.mocker", "--model-name", "mocked", "--block-size", "16"]);
        mocker.args(["--num-workers", "1", "--speedup-ratio", "1000"]);
        mocker
            .args(["--endpoint", &format!("dyn://{namespace}.backend.generate")])
            .arg("--model-path")
            .arg(model);
        mocker.envs(variables.iter().map(|(name, value)| (name, value)));
        set_planes(&mut mocker);
        mocker.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self { process: Process(mocker.spawn().expect("the mocker starts")) }
    }

    pub(crate) fn signal(&self, signal: &str) {
        send_signal(self.process.0.id(), signal);
    }

    /// Kills the mocker by SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.process.end();
    }
}
