//! The frontends: each starts two engines itself.

use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use peers::programs::free_address;
use serde::Deserialize;

use crate::client::get;
use crate::group::Group;
use crate::workload::MODEL;

/// Side of the binary that is measured.
pub(crate) const OURS: &str = "chiasm";
/// Engines of each side.
pub(crate) const ENGINES: &str = "2";
/// Sizes for the engines that our frontend, or none, stands before: they have room for the tensors
/// of all pictures. The others have vLLM's default.
pub(crate) const RECEIVER_CACHE_GB: &str = "0.5";
pub(crate) const ARENA_GB: &str = "1";
/// What a CPU engine with a tiny model needs. The blocks of its KV cache have room for all pictures
/// several times over.
const ENGINE_FLAGS: [&str; 9] = [
    "--enforce-eager",
    "--block-size",
    "32",
    "--max-model-len",
    "4096",
    "--dtype",
    "float32",
    "--num-gpu-blocks-override",
    "2048",
];
/// How long a side may take to be ready. Its processes import much.
const START: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(200);

/// What the sides are started with.
pub(crate) struct Inputs {
    pub(crate) chiasm: PathBuf,
    /// The example `replay` of `chiasm`.
    pub(crate) replay: PathBuf,
    /// The programs `vllm` and `python` of an environment with vLLM.
    pub(crate) vllm: PathBuf,
    pub(crate) python: PathBuf,
    /// The program `vllm-rs`, of the same version.
    pub(crate) vllm_rs: PathBuf,
    /// The version of vLLM.
    pub(crate) version: String,
    /// A folder with our plugin for vLLM.
    pub(crate) plugin: PathBuf,
    pub(crate) model: PathBuf,
    /// Flags of the case, which all engines get beside those that they need here.
    pub(crate) engine_flags: Vec<String>,
    /// Where what the programs say goes.
    pub(crate) logs: PathBuf,
    /// Where our frontend keeps what outlives it: none of the user's.
    pub(crate) state: PathBuf,
}

impl Inputs {
    pub(crate) fn engine_flags(&self) -> impl Iterator<Item = &str> {
        ENGINE_FLAGS.into_iter().chain(self.engine_flags.iter().map(String::as_str))
    }
}

/// A frontend with its engines.
pub(crate) struct Side {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    pub(crate) group: Group,
    /// Tells how many engines are ready.
    tells_engines: bool,
}

/// Ours.
pub(crate) fn chiasm(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let mut command = with_plugin(&inputs.chiasm, inputs);
    command.arg("serve").arg(&inputs.model).args(["--served-model-name", MODEL]).arg("--vllm").arg(&inputs.vllm);
    command.args(["--engines", ENGINES, "--port", &address.port().to_string()]);
    command.args(["--receiver-cache-gb", RECEIVER_CACHE_GB, "--mm-arena-gb", ARENA_GB, "--"]);
    command.args(inputs.engine_flags());
    let group = Group::start(OURS, &mut command, &inputs.logs, false)?;
    Ok(Side { name: OURS.to_owned(), address, group, tells_engines: true })
}

/// vLLM's own frontend, which balances between engines by how many requests they have.
pub(crate) fn vllm_serve(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    vllm("vllm serve", command(&inputs.vllm), inputs)
}

/// vLLM's Rust frontend.
pub(crate) fn vllm_rs(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    let mut command = command(&inputs.vllm_rs);
    command.env("VLLM_RS_PYTHON", &inputs.python).env("VLLM_RUST_FRONTEND_PATH", &inputs.vllm_rs);
    vllm("vllm-rs", command, inputs)
}

fn vllm(name: &str, mut command: Command, inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    let (name, address) = (format!("{name} {}", inputs.version), free_address()?);
    command.arg("serve").arg(&inputs.model).args(["--served-model-name", MODEL]);
    command.args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
    command.args(["--data-parallel-size", ENGINES, "--enable-prompt-tokens-details"]);
    command.args(inputs.engine_flags());
    let group = Group::start(&name, &mut command, &inputs.logs, false)?;
    Ok(Side { name, address, group, tells_engines: false })
}

/// A program that starts engines with our plugin.
pub(crate) fn with_plugin(program: &Path, inputs: &Inputs) -> Command {
    let mut command = command(program);
    command.env("PYTHONPATH", &inputs.plugin).env("CHIASM_STATE_DIR", &inputs.state);
    command
}

/// A program with the environment that `xtask` has given to this one, in which engines know that
/// they are on CPUs.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    // One thread per engine: two engines share the cores. Where there is one NUMA node, the second
    // one would find none for itself.
    command.env("OMP_NUM_THREADS", "1").env("VLLM_CPU_SIM_MULTI_NUMA", "0");
    command
}

impl Side {
    /// Waits until it says that it is ready, with all its engines.
    pub(crate) async fn wait(&mut self) -> Result<(), Box<dyn Error>> {
        eprintln!("starting {}", self.name);
        let start = Instant::now();
        while !self.is_ready().await {
            self.group.check()?;
            if start.elapsed() > START {
                return Err(self.group.failed("is not ready"));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    async fn is_ready(&self) -> bool {
        #[derive(Deserialize)]
        struct Ready {
            workers: u64,
        }
        let path = if self.tells_engines { "/ready" } else { "/health" };
        let Ok((StatusCode::OK, text)) = get(self.address, path).await else { return false };
        let ready = serde_json::from_str::<Ready>(&text);
        !self.tells_engines || ready.is_ok_and(|ready| ready.workers.to_string() == ENGINES)
    }
}
