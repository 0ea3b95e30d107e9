//! The environment that `cargo xtask test --sglang` provides, and the servers that tests start in
//! it.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{self, Answer, Server, free_port, wait_for};

/// The deadline for a server's start, most of which is Python's import of SGLang on a small, busy
/// machine.
pub(crate) const STARTUP_TIMEOUT: Duration = Duration::from_secs(400);
pub(crate) const BLOCK_SIZE: u64 = 16;

/// The environment that `cargo xtask test --sglang` provides.
pub(crate) struct Environment {
    python: String,
    models: PathBuf,
}

impl Environment {
    pub(crate) fn read() -> Self {
        let variable = |name| {
            std::env::var(name)
                .unwrap_or_else(|_| panic!("{name} is not set; run `cargo xtask test --sglang`"))
        };
        Self {
            python: variable("CHIASM_TEST_SGLANG_PYTHON"),
            models: variable("CHIASM_TEST_MODELS").into(),
        }
    }

    pub(crate) fn model(&self, name: &str) -> String {
        self.models.join(name).display().to_string()
    }

    /// Starts a server with a tiny model.
    pub(crate) fn sglang(&self, model: &str, flags: &[&str]) -> SglangServer {
        let model = copy_model(&self.models.join(model));
        let mut server = SglangServer {
            python: self.python.clone(),
            model,
            flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
            ports: [free_port(), free_port(), free_port()],
            child: None,
        };
        server.start();
        server
    }
}

/// Creates a copy of a model that SGLang can read: it needs a field of Qwen2-VL's original
/// configuration that `transformers` no longer writes.
fn copy_model(model: &Path) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(model).expect("a model") {
        let path = entry.expect("a file").path();
        let target = folder.path().join(path.file_name().expect("a name"));
        if !path.ends_with("config.json") {
            symlink(&path, target).expect("a link");
            continue;
        }
        let mut config: Value =
            serde_json::from_str(&fs::read_to_string(&path).expect("a file")).expect("JSON");
        if config["model_type"] == "qwen2_vl" {
            config["vision_config"]["in_chans"] = config["vision_config"]["in_channels"].clone();
        }
        fs::write(target, config.to_string()).expect("written");
    }
    folder
}

/// A server and its child processes. Killed when dropped.
pub(crate) struct SglangServer {
    python: String,
    model: TempDir,
    flags: Vec<String>,
    /// The ports of HTTP, KV events and their replay.
    ports: [u16; 3],
    child: Option<Child>,
}

impl SglangServer {
    /// Starts the server on its ports.
    pub(crate) fn start(&mut self) {
        let [port, events, replay] = self.ports;
        let events = json!({
            "publisher": "zmq",
            "endpoint": format!("tcp://*:{events}"),
            "replay_endpoint": format!("tcp://*:{replay}"),
        });
        let mut command = Command::new(&self.python);
        command.args([
            "-m",
            "sglang.launch_server",
            "--host",
            "127.0.0.1",
            "--port",
            &port.to_string(),
            "--model-path",
        ]);
        command.arg(self.model.path()).args(["--kv-events-config", &events.to_string()]);
        // Backends that work without SGLang's CPU kernels.
        command.args([
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--sampling-backend",
            "pytorch",
        ]);
        command.args([
            "--disable-overlap-schedule",
            "--disable-cuda-graph",
            "--skip-server-warmup",
        ]);
        command.args([
            "--max-total-tokens",
            "16384",
            "--mem-fraction-static",
            "0.1",
            "--page-size",
            "16",
        ]);
        command
            .args([
                "--enable-metrics",
                "--sleep-on-idle",
                "--constrained-json-disable-any-whitespace",
            ])
            .args(&self.flags);
        command
            .env("SGLANG_USE_CPU_ENGINE", "1")
            .env("OMP_NUM_THREADS", "1")
            .env("HF_HUB_OFFLINE", "1");
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        if std::env::var_os("CHIASM_TEST_SHOW_SGLANG").is_none() {
            command.stderr(Stdio::null());
        }
        self.child = Some(command.spawn().expect("python runs"));
    }

    /// Kills the server and its child processes.
    pub(crate) fn kill(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let group = format!("-{}", child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = child.wait();
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports[0])
    }

    pub(crate) async fn wait_healthy(&mut self) {
        let client = support::client();
        let health = format!("{}/health", self.url());
        let started = std::time::Instant::now();
        loop {
            if client.get(&health).send().await.is_ok_and(|answer| answer.status().is_success()) {
                return;
            }
            let ended = self.child.as_mut().and_then(|child| child.try_wait().expect("wait"));
            assert!(
                ended.is_none() && started.elapsed() < STARTUP_TIMEOUT,
                "SGLang does not start: {ended:?}"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Returns the server's answer to a request.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        let post = support::client()
            .post(format!("{}{path}", self.url()))
            .header("content-type", "application/json");
        Answer::read(post.body(body.to_string()).send().await.expect("SGLang answers")).await
    }

    /// Returns the sum of a gauge's samples.
    pub(crate) async fn gauge(&self, name: &str) -> f64 {
        let text =
            support::client().get(format!("{}/metrics", self.url())).send().await.expect("metrics");
        let text = text.text().await.expect("text");
        let samples = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until no request is running or queued.
    pub(crate) async fn wait_idle(&self) {
        let is_idle = async || {
            self.gauge("sglang:num_running_reqs").await + self.gauge("sglang:num_queue_reqs").await
                == 0.0
        };
        wait_for("idle server", Duration::from_secs(30), is_idle).await;
    }
}

impl Drop for SglangServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts a frontend of these servers. `kind` is the prefix of each URL, or empty if the frontend
/// should detect the kind.
pub(crate) async fn serve(
    environment: &Environment,
    model: &str,
    servers: &[&SglangServer],
    kind: &str,
) -> Server {
    let mut args = vec![environment.model(model), "--served-model-name".to_owned(), "m".to_owned()];
    args.push("--allow-private-media".to_owned());
    for server in servers {
        args.extend(["--upstream".to_owned(), format!("{kind}{}", server.url())]);
    }
    let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
    let frontend = Server::start(&args);
    frontend.wait_ready(servers.len() as u64, STARTUP_TIMEOUT).await;
    frontend
}

/// Returns the frontend's list of workers.
pub(crate) async fn workers(frontend: &Server) -> Vec<Value> {
    let workers =
        frontend.client.get(format!("{}/workers", frontend.url)).send().await.expect("workers");
    let workers: Value = serde_json::from_str(&workers.text().await.expect("text")).expect("JSON");
    workers["workers"].as_array().expect("workers").clone()
}
