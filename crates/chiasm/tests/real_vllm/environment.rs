//! What `cargo xtask test` provides, and the engines and references that are started with it.

use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use chiasm_engine::SocketDir;
use chiasm_engine::launch::{KvEventEndpoints, LaunchSpec};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::vllm_serves::{Group, VllmServes};
use crate::support::{self, Answer, Process, Server, chiasm, free_port, wait_for};

/// Engines start one after the other on a small machine.
pub(crate) const STARTUP: Duration = Duration::from_secs(240);
pub(crate) const BLOCK_SIZE: u64 = 32;
/// Holds some five of the pictures, so that engines evict.
pub(crate) const RECEIVER_CACHE_GB: f64 = 0.002;
/// Holds some twelve of the pictures: slots are used again and again.
pub(crate) const ARENA_GB: &str = "0.005";
/// Holds every picture as any family's tensors, of which those in tiles take ten times as much.
pub(crate) const ROOMY_ARENA_GB: &str = "0.1";
/// What a CPU engine with a tiny model needs, also when `vllm serve` starts it.
pub(crate) const ENGINE_FLAGS: &[&str] =
    &["--enforce-eager", "--block-size", "32", "--max-model-len", "4096", "--dtype", "float32"];

/// Held by a test that runs engines.
pub(crate) static ENGINES: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// What `cargo xtask test` provides.
pub(crate) struct Environment {
    pub(crate) vllm: String,
    pub(crate) python: String,
    models: PathBuf,
    /// Where the plugin is installed.
    plugin: String,
    /// The version of vLLM, as engines tell it.
    pub(crate) version: String,
    /// Another version of vLLM, for tests of both together.
    pub(crate) other_version: String,
    pub(crate) other_python: String,
    /// A Python with clients that other people use.
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

    /// The command of the other version.
    pub(crate) fn other_vllm(&self) -> String {
        Path::new(&self.other_python).with_file_name("vllm").display().to_string()
    }

    /// What engines need that another process than the tests' own launches.
    pub(crate) fn variables(&self) -> [(&str, &str); 1] {
        [("PYTHONPATH", &self.plugin)]
    }

    pub(crate) fn model(&self, name: &str) -> String {
        self.models.join(name).display().to_string()
    }

    /// Launches engines with the plugin.
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
        self.serve_with(mode, model, engines, &[], flags)
    }

    /// The same with flags for Chiasm alone.
    pub(crate) fn serve_with(
        &self,
        mode: &str,
        model: &str,
        engines: &str,
        own: &[&str],
        flags: &[&str],
    ) -> Server {
        let model = self.model(model);
        let mut args = [model.as_str(), "--engines", engines, "--vllm", &self.vllm]
            .map(str::to_owned)
            .to_vec();
        args.extend(serve_flags(mode, ARENA_GB));
        args.extend(own.iter().map(|&flag| flag.to_owned()));
        args.extend(
            [&["--port", "0", "--"], ENGINE_FLAGS, flags].concat().into_iter().map(str::to_owned),
        );
        let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
        Server::start_with(&args, &[("PYTHONPATH", &self.plugin)])
    }

    /// A place for engines to attach to, with the flags with which they would have been launched.
    pub(crate) fn place(&self, model: &str, flags: &[&str]) -> Place {
        let (sockets, handshake) =
            (SocketDir::new().expect("a folder"), format!("tcp://127.0.0.1:{}", free_port()));
        let mut spec = LaunchSpec::new("engine", &self.vllm, self.model(model), &handshake);
        spec.receiver_cache_gb = RECEIVER_CACHE_GB;
        spec.kv_events = Some(KvEventEndpoints::ipc(&sockets));
        spec.extra_args = [ENGINE_FLAGS, flags].concat().into_iter().map(str::to_owned).collect();
        let arguments = spec.arguments().expect("flags that engines take").split_off(1);
        Place { handshake, arguments, plugin: self.plugin.clone(), _sockets: sockets }
    }

    /// Attaches to an engine with the plugin.
    pub(crate) fn attach(
        &self,
        mode: &str,
        arena_gb: &str,
        model: &str,
        flags: &[&str],
    ) -> (Server, AttachedEngine) {
        self.attach_with(mode, arena_gb, model, &[], flags)
    }

    /// The same with flags for Chiasm alone.
    pub(crate) fn attach_with(
        &self,
        mode: &str,
        arena_gb: &str,
        model: &str,
        own: &[&str],
        flags: &[&str],
    ) -> (Server, AttachedEngine) {
        let place = self.place(model, flags);
        let engine = place.start(&mut vllm_serves());
        let state = tempfile::tempdir().expect("a folder");
        let attach = [self.model(model), "--attach".to_owned(), place.handshake.clone()];
        let keep = ["--state-dir".to_owned(), state.path().display().to_string()];
        let mut args = [&attach[..], &keep, &serve_flags(mode, arena_gb)].concat();
        args.extend(own.iter().map(|&flag| flag.to_owned()));
        // For what vLLM's own processor makes: as the engine has it.
        let helper = ["--vllm", &self.vllm, "--trust-request-mm-kwargs", "--port", "0", "--"];
        args.extend([&helper[..], ENGINE_FLAGS, flags].concat().into_iter().map(str::to_owned));
        let engine = AttachedEngine { _group: engine, place, state, args };
        (engine.serve(), engine)
    }

    /// Starts what answers are compared with, and what a frontend can be put before.
    pub(crate) fn reference(&self, model: &str, flags: &[&str]) -> Reference {
        let (model, port) = (self.model(model), free_port().to_string());
        let own =
            [model.as_str(), "--served-model-name", "m", "--host", "127.0.0.1", "--port", &port];
        let events = json!({
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://*:{}", free_port()),
            "replay_endpoint": format!("tcp://*:{}", free_port()),
        });
        let events = events.to_string();
        let before =
            ["--enable-scale-out", "--enable-prompt-tokens-details", "--kv-events-config", &events];
        let arguments =
            [&own[..], ENGINE_FLAGS, &["--trust-request-mm-kwargs"], &before, flags].concat();
        let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
        Reference {
            url: format!("http://127.0.0.1:{port}"),
            _server: vllm_serves().serve(&arguments, None, true),
        }
    }
}

/// Flags of `chiasm serve` that do not depend on where engines come from.
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

/// The one process that has imported vLLM. Ends with the tests: then its input does.
pub(crate) fn vllm_serves() -> std::sync::MutexGuard<'static, VllmServes> {
    pub(crate) static ONE: LazyLock<Mutex<VllmServes>> =
        LazyLock::new(|| Mutex::new(VllmServes::start(&Environment::read().python)));
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where one engine after the other can be.
pub(crate) struct Place {
    /// Where they ask for their frontend.
    pub(crate) handshake: String,
    /// Those of `vllm`.
    arguments: Vec<String>,
    plugin: String,
    _sockets: SocketDir,
}

impl Place {
    /// Starts an engine with the plugin, in the process that has imported its version of vLLM.
    /// Killed when dropped.
    pub(crate) fn start(&self, serves: &mut VllmServes) -> Group {
        serves.serve(&self.arguments, Some(&self.plugin), false)
    }
}

/// An engine that a server attaches to. Killed when dropped.
pub(crate) struct AttachedEngine {
    _group: Group,
    place: Place,
    state: TempDir,
    /// Those of its frontends.
    args: Vec<String>,
}

impl AttachedEngine {
    /// Starts a frontend for it.
    pub(crate) fn serve(&self) -> Server {
        let args: Vec<&str> = self.args.iter().map(AsRef::as_ref).collect();
        Server::start(&args)
    }

    /// Starts an agent for it, and a frontend of that. `own` are flags of the agent, `flags` those
    /// of the engine.
    pub(crate) fn behind_agent(&self, own: &[&str], flags: &[&str]) -> (Process, Server) {
        let (model, state) = (self.args[0].as_str(), self.state.path().display().to_string());
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
            &self.place.handshake,
        ]);
        // An agent has no name for its model.
        agent
            .args(["--state-dir", &state])
            .args(&serve_flags("shm", ROOMY_ARENA_GB)[2..])
            .args(own);
        let agent = agent.arg("--").args(ENGINE_FLAGS).args(flags).spawn().expect("an agent");
        let own = [model, "--served-model-name", "m", "--state-dir", &state, "--agents", &address];
        (Process(agent), Server::start(&[&own[..], &["--allow-private-media"]].concat()))
    }
}

/// A `vllm serve` that starts.
pub(crate) struct Reference {
    url: String,
    _server: Group,
}

impl Reference {
    /// Waits until it is ready; its answer to each request.
    pub(crate) async fn answers(&self, requests: &[Value]) -> Vec<Value> {
        let mut answers = Vec::new();
        for request in requests {
            answers.push(self.post("/v1/chat/completions", request).await.ok());
        }
        answers
    }

    /// Where a frontend finds it.
    pub(crate) fn upstream(&self) -> String {
        format!("vllm+{}", self.url)
    }

    pub(crate) async fn wait_healthy(&self) {
        let client = support::client();
        let is_healthy = async || client.get(format!("{}/health", self.url)).send().await.is_ok();
        wait_for("vllm serve", STARTUP, is_healthy).await;
    }

    /// Waits until it is ready; its answer.
    pub(crate) async fn post(&self, path: &str, request: &Value) -> Answer {
        let client = support::client();
        self.wait_healthy().await;
        let post =
            client.post(format!("{}{path}", self.url)).header("content-type", "application/json");
        Answer::of(post.body(request.to_string()).send().await.expect("vllm serve answers")).await
    }
}
