//! A mocker of Dynamo: a worker without a model, whose cache is counted as an engine's.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::etcd::Etcd;
use crate::support::{Process, demo_model, send_signal};

/// Seconds until a worker that has died is named no more.
const LEASE: &str = "10";

/// Has a worker use the planes that are served, on this machine alone.
pub(crate) fn planes(worker: &mut Command) {
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

/// Killed when dropped.
pub(crate) struct Mocker {
    process: Process,
}

impl Mocker {
    /// Starts one with the demo's model. It names itself in etcd when it is ready.
    pub(crate) fn start(etcd: &Etcd, namespace: &str) -> Self {
        Self::start_with(etcd, namespace, &demo_model())
    }

    /// The same with another model.
    pub(crate) fn start_with(etcd: &Etcd, namespace: &str, model: &Path) -> Self {
        let names = [
            ("DYN_DISCOVERY_BACKEND", "etcd".to_owned()),
            ("ETCD_ENDPOINTS", format!("http://{}", etcd.server())),
            ("ETCD_LEASE_TTL", LEASE.to_owned()),
        ];
        Self::start_named(&names, namespace, model)
    }

    /// One that names itself by files of a folder.
    pub(crate) fn start_in_folder(folder: &Path, namespace: &str) -> Self {
        let names = [
            ("DYN_DISCOVERY_BACKEND", "file".to_owned()),
            ("DYN_FILE_KV", folder.display().to_string()),
        ];
        Self::start_named(&names, namespace, &demo_model())
    }

    fn start_named(names: &[(&str, String)], namespace: &str, model: &Path) -> Self {
        let python = std::env::var_os("CHIASM_TEST_DYNAMO")
            .expect("CHIASM_TEST_DYNAMO has to name the Python with Dynamo to test with");
        let mut mocker = Command::new(python);
        mocker.args(["-B", "-m", "dynamo.mocker", "--model-name", "mocked", "--block-size", "16"]);
        mocker.args(["--num-workers", "1", "--speedup-ratio", "1000"]);
        mocker
            .args(["--endpoint", &format!("dyn://{namespace}.backend.generate")])
            .arg("--model-path")
            .arg(model);
        mocker.envs(names.iter().map(|(name, value)| (name, value)));
        planes(&mut mocker);
        mocker.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self { process: Process(mocker.spawn().expect("the mocker starts")) }
    }

    pub(crate) fn signal(&self, signal: &str) {
        send_signal(self.process.0.id(), signal);
    }

    /// As by kill -9.
    pub(crate) fn kill(&mut self) {
        self.process.end();
    }
}
