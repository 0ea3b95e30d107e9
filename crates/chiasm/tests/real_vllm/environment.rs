//! The environment that `cargo xtask test` provides, and the engines and reference servers that
//! tests start in it.

use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use chiasm_engine::SocketDir;
use chiasm_engine::launch::{KvEventEndpoints, LaunchSpec};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::vllm_serves::{Group, VllmServes};
use crate::support::{self, Answer, Process, Server, chiasm, free_port, wait_for};

/// The deadline for a start. Engines start one after the other on a small machine.
pub(crate) const STARTUP_TIMEOUT: Duration = Duration::from_secs(240);
pub(crate) const BLOCK_SIZE: u64 = 32;
/// A receiver cache for about five of the pictures, so that engines evict.
pub(crate) const RECEIVER_CACHE_GB: f64 = 0.002;
/// An arena for about twelve of the pictures, so that slots are reused.
pub(crate) const ARENA_GB: &str = "0.005";
/// An arena for all pictures as tensors of any family. Tiled images take ten times as much.
pub(crate) const ROOMY_ARENA_GB: &str = "0.1";
/// vLLM's flags for a CPU engine with a tiny model, also for `vllm serve`.
pub(crate) const ENGINE_FLAGS: &[&str] =
    &["--enforce-eager", "--block-size", "32", "--max-model-len", "4096", "--dtype", "float32"];

/// The lock that serializes tests that run engines.
pub(crate) static ENGINES: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The environment that `cargo xtask test` provides.
pub(crate) struct Environment {
    pub(crate) vllm: String,
    pub(crate) python: String,
    models: PathBuf,
    /// The folder in which the plugin is installed.
    plugin: String,
    /// The version of vLLM, as engines report it.
    pub(crate) version: String,
    /// A second version of vLLM, for tests with both.
    pub(crate) other_version: String,
    pub(crate) other_python: String,
    /// A Python with third-party client packages.
    pub(crate) clients_python: String,
}

impl Environment {
    pub(crate) fn read() -> Self {
        let variable = |name| {
            std::env::var(name)
                .unwrap_or_else(|_| panic!("{name} is not set; run `cargo xtask test`"))
        };
        Self {
            vllm: variable("CHIASM_TEST_VLLM"),
            python: variable("CHIASM_TEST_PYTHON"),
            models: variable("CHIASM_TEST_MODELS").into(),
            plugin: variable("CHIASM_TEST_PLUGIN"),
            version: variable("CHIASM_TEST_VLLM_VERSION"),
            other_version: variable("CHIASM_TEST_OTHER_VLLM_VERSION"),
            other_python: variable("CHIASM_TEST_OTHER_PYTHON"),
            clients_python: variable("CHIASM_TEST_CLIENTS_PYTHON"),
        }
    }

    /// Returns the `vllm` command of the other version.
    pub(crate) fn other_vllm(&self) -> String {
        Path::new(&self.other_python).with_file_name("vllm").display().to_string()
    }

    /// Returns the environment variables for processes that launch engines themselves.
    pub(crate) fn variables(&self) -> [(&str, &str); 1] {
        [("PYTHONPATH", &self.plugin)]
    }

    pub(crate) fn model(&self, name: &str) -> String {
        self.models.join(name).display().to_string()
    }

    /// Starts a server that launches engines with the plugin.
    pub(crate) fn serve(&self, model: &str, engines: &str, flags: &[&str]) -> Server {
        self.serve_in_mode("shm", model, engines, flags)
    }

    pub(crate) fn serve_in_mode(
        &self,
        mode: &str,
        model: &str,
        engines: &str,
        flags: &[&str],
    ) -> Server {
        self.serve_with_flags(mode, model, engines, &[], flags)
    }

    /// Like [`serve_in_mode`](Self::serve_in_mode), with additional flags of Chiasm.
    pub(crate) fn serve_with_flags(
        &self,
        mode: &str,
        model: &str,
        engines: &str,
        frontend_flags: &[&str],
        flags: &[&str],
    ) -> Server {
        let model = self.model(model);
        let mut args = [model.as_str(), "--engines", engines, "--vllm", &self.vllm]
            .map(str::to_owned)
            .to_vec();
        args.extend(serve_flags(mode, ARENA_GB));
        args.extend(frontend_flags.iter().map(|&flag| flag.to_owned()));
        args.extend(
            [&["--port", "0", "--"], ENGINE_FLAGS, flags].concat().into_iter().map(str::to_owned),
        );
        let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
        Server::start_with(&args, &[("PYTHONPATH", &self.plugin)])
    }

    /// Creates an attach point for engines with the flags that a launched engine would have.
    pub(crate) fn attach_point(&self, model: &str, flags: &[&str]) -> AttachPoint {
        let sockets = SocketDir::new().expect("a folder");
        let handshake = format!("tcp://127.0.0.1:{}", free_port());
        let mut spec = LaunchSpec::new("engine", &self.vllm, self.model(model), &handshake);
        spec.receiver_cache_gb = RECEIVER_CACHE_GB;
        spec.kv_events = Some(KvEventEndpoints::ipc(&sockets));
        spec.extra_args = [ENGINE_FLAGS, flags].concat().into_iter().map(str::to_owned).collect();
        let arguments = spec.arguments().expect("flags that engines take").split_off(1);
        AttachPoint { handshake, arguments, plugin: self.plugin.clone(), _sockets: sockets }
    }

    /// Starts an engine with the plugin and a server that attaches to it.
    pub(crate) fn attach(
        &self,
        mode: &str,
        arena_gb: &str,
        model: &str,
        flags: &[&str],
    ) -> (Server, AttachedEngine) {
        self.attach_with(mode, arena_gb, model, &[], flags)
    }

    /// Like [`attach`](Self::attach), with additional flags of Chiasm.
    pub(crate) fn attach_with(
        &self,
        mode: &str,
        arena_gb: &str,
        model: &str,
        frontend_flags: &[&str],
        flags: &[&str],
    ) -> (Server, AttachedEngine) {
        let attach_point = self.attach_point(model, flags);
        let engine = attach_point.start(&mut vllm_serves());
        let state = tempfile::tempdir().expect("a folder");
        let attach = [self.model(model), "--attach".to_owned(), attach_point.handshake.clone()];
        let state_flags = ["--state-dir".to_owned(), state.path().display().to_string()];
        let mut args = [&attach[..], &state_flags, &serve_flags(mode, arena_gb)].concat();
        args.extend(frontend_flags.iter().map(|&flag| flag.to_owned()));
        // vLLM's own processor needs the flags of the engine.
        let processor = ["--vllm", &self.vllm, "--trust-request-mm-kwargs", "--port", "0", "--"];
        args.extend([&processor[..], ENGINE_FLAGS, flags].concat().into_iter().map(str::to_owned));
        let engine = AttachedEngine { _group: engine, attach_point, state, args };
        (engine.serve(), engine)
    }

    /// Starts a `vllm serve`, to compare answers with or to use as an upstream.
    pub(crate) fn reference(&self, model: &str, flags: &[&str]) -> Reference {
        let model = self.model(model);
        let port = free_port().to_string();
        let server_flags =
            [model.as_str(), "--served-model-name", "m", "--host", "127.0.0.1", "--port", &port];
        let events = json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": format!("tcp://*:{}", free_port()),
            "replay_endpoint": format!("tcp://*:{}", free_port()),
        });
        let events = events.to_string();
        let upstream_flags =
            ["--enable-scale-out", "--enable-prompt-tokens-details", "--kv-events-config", &events];
        let trust_flag = ["--trust-request-mm-kwargs"];
        let arguments =
            [&server_flags[..], ENGINE_FLAGS, &trust_flag, &upstream_flags, flags].concat();
        let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
        Reference {
            url: format!("http://127.0.0.1:{port}"),
            _server: vllm_serves().serve(&arguments, None, true),
        }
    }
}

/// Returns the flags of `chiasm serve` for launched and attached engines alike.
pub(crate) fn serve_flags(mode: &str, arena_gb: &str) -> Vec<String> {
    let cache = RECEIVER_CACHE_GB.to_string();
    let flags = [
        "--served-model-name",
        "m",
        "--receiver-cache-gb",
        &cache,
        "--mm-transfer",
        mode,
        "--mm-arena-gb",
    ];
    [&flags[..], &[arena_gb, "--allow-private-media"]]
        .concat()
        .into_iter()
        .map(str::to_owned)
        .collect()
}

/// Returns the shared process that has imported vLLM. It ends with the test process, which closes
/// its stdin.
pub(crate) fn vllm_serves() -> std::sync::MutexGuard<'static, VllmServes> {
    static SHARED: LazyLock<Mutex<VllmServes>> =
        LazyLock::new(|| Mutex::new(VllmServes::start(&Environment::read().python)));
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handshake address at which engines can be started one after the other.
pub(crate) struct AttachPoint {
    /// The address at which engines look for their frontend.
    pub(crate) handshake: String,
    /// The arguments of `vllm`.
    arguments: Vec<String>,
    plugin: String,
    _sockets: SocketDir,
}

impl AttachPoint {
    /// Starts an engine with the plugin as a fork of `serves`, which has imported its version of
    /// vLLM. The engine is killed when the group is dropped.
    pub(crate) fn start(&self, serves: &mut VllmServes) -> Group {
        serves.serve(&self.arguments, Some(&self.plugin), false)
    }
}

/// An engine that a server attaches to. Killed when dropped.
pub(crate) struct AttachedEngine {
    _group: Group,
    attach_point: AttachPoint,
    state: TempDir,
    /// The arguments of its frontends.
    args: Vec<String>,
}

impl AttachedEngine {
    /// Starts a frontend for the engine.
    pub(crate) fn serve(&self) -> Server {
        let args: Vec<&str> = self.args.iter().map(AsRef::as_ref).collect();
        Server::start(&args)
    }

    /// Starts an agent for the engine, and a frontend of that agent. `flags` are the engine's.
    pub(crate) fn behind_agent(&self, agent_flags: &[&str], flags: &[&str]) -> (Process, Server) {
        let model = self.args[0].as_str();
        let state = self.state.path().display().to_string();
        let address = format!("127.0.0.2:{}", free_port());
        let (host, port) = address.split_once(':').expect("host:port");
        let mut agent = chiasm(&[
            "agent",
            model,
            "--host",
            host,
            "--port",
            port,
            "--attach",
            &self.attach_point.handshake,
        ]);
        // Agents don't take `--served-model-name`, the first two flags.
        agent
            .args(["--state-dir", &state])
            .args(&serve_flags("shm", ROOMY_ARENA_GB)[2..])
            .args(agent_flags);
        let agent = agent.arg("--").args(ENGINE_FLAGS).args(flags).spawn().expect("an agent");
        let args = [model, "--served-model-name", "m", "--state-dir", &state, "--agents", &address];
        (Process(agent), Server::start(&[&args[..], &["--allow-private-media"]].concat()))
    }
}

/// A starting or running `vllm serve`.
pub(crate) struct Reference {
    url: String,
    _server: Group,
}

impl Reference {
    /// Waits until the server is ready and returns its answers to `requests`.
    pub(crate) async fn answers(&self, requests: &[Value]) -> Vec<Value> {
        let mut answers = Vec::new();
        for request in requests {
            answers.push(self.post("/v1/chat/completions", request).await.ok());
        }
        answers
    }

    /// Returns the server's URL.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) async fn wait_healthy(&self) {
        let client = support::client();
        let is_healthy = async || client.get(format!("{}/health", self.url)).send().await.is_ok();
        wait_for("vllm serve", STARTUP_TIMEOUT, is_healthy).await;
    }

    /// Waits until the server is ready and returns its answer.
    pub(crate) async fn post(&self, path: &str, request: &Value) -> Answer {
        let client = support::client();
        self.wait_healthy().await;
        let post =
            client.post(format!("{}{path}", self.url)).header("content-type", "application/json");
        Answer::read(post.body(request.to_string()).send().await.expect("vllm serve answers")).await
    }
}
