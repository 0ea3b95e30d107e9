//! The frontends, each of which starts two engines itself.

use std::error::Error;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use peers::flags::Flags;
use peers::row::OURS;

use crate::client::{get, ready_engines};
use crate::ours::STATE_DIR;
use crate::program::{Program, free_address};
use crate::side;
use crate::workload::MODEL;

/// The number of engines of each side.
pub(super) const ENGINES: usize = 2;
/// The flags of one frontend of vLLM for all engines.
const ALL_ENGINES: [&str; 2] = ["--data-parallel-size", "2"];
/// The sizes of receiver cache and arena with our frontend and without a frontend. They have room
/// for the tensors of all pictures. Other frontends have vLLM's default.
const RECEIVER_CACHE_GB: &str = "0.5";
const ARENA_GB: &str = "1";
/// The flags for a CPU engine with a tiny model. The blocks of its KV cache have room for all
/// pictures several times.
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
/// The timeout of a side's start. Its processes import many modules.
const START_TIMEOUT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(200);

/// The inputs of all sides.
pub(crate) struct Inputs {
    chiasm: PathBuf,
    /// The example `replay` of `chiasm`.
    pub(crate) replay: PathBuf,
    /// The programs `vllm` and `python` of an environment with vLLM, and its version.
    vllm: PathBuf,
    python: PathBuf,
    version: String,
    /// The program `vllm-rs` of the same version.
    vllm_rs: PathBuf,
    /// The folder of our plugin for vLLM.
    plugin: PathBuf,
    model: PathBuf,
    engine_flags: Vec<&'static str>,
    /// Environment variables of engines, as `NAME=VALUE`.
    variables: Vec<String>,
    /// The folder of logs and of our state.
    pub(crate) scratch: PathBuf,
}

impl Inputs {
    pub(crate) fn new(
        flags: &Flags,
        engine_flags: &[&'static str],
        scratch: PathBuf,
    ) -> Result<Self, Box<dyn Error>> {
        fs::create_dir(&scratch)?;
        Ok(Self {
            chiasm: flags.path("--chiasm")?,
            replay: flags.path("--replay")?,
            vllm: flags.path("--vllm")?,
            python: flags.path("--python")?,
            version: flags.get("--version")?.to_owned(),
            vllm_rs: flags.path("--vllm-rs")?,
            plugin: flags.path("--plugin")?,
            model: flags.path("--model")?,
            engine_flags: [&ENGINE_FLAGS[..], engine_flags].concat(),
            variables: flags.get("--engine-variables")?.split(',').map(str::to_owned).collect(),
            scratch,
        })
    }

    /// Returns the command of a program that starts engines on CPUs.
    fn command(&self, program: &Path) -> Command {
        let mut command = side::command(program);
        command.envs(self.variables.iter().filter_map(|variable| variable.split_once('=')));
        // Two engines share the cores. With one NUMA node, the second one would find no node.
        command.env("OMP_NUM_THREADS", "1").env("VLLM_CPU_SIM_MULTI_NUMA", "0");
        command
    }

    /// Returns the command of a program that starts engines with our plugin, with the arguments
    /// `first` and its flags. `arena` is the name of the flag of the arena's size.
    pub(crate) fn our_command(&self, program: &Path, first: &[&str], arena: &str) -> Command {
        let mut command = self.command(program);
        command.env("PYTHONPATH", &self.plugin).env(STATE_DIR, self.scratch.join("state"));
        command.args(first).arg(&self.model).args(["--served-model-name", MODEL]);
        command.arg("--vllm").arg(&self.vllm).args(["--engines", &ENGINES.to_string()]);
        command.args(["--receiver-cache-gb", RECEIVER_CACHE_GB, arena, ARENA_GB]);
        command
    }

    pub(crate) fn engine_flags(&self) -> &[&'static str] {
        &self.engine_flags
    }
}

/// A frontend with its engines.
pub(crate) struct Side {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    pub(crate) program: Program,
    /// `true` if the side reports its ready engines.
    reports_engines: bool,
}

/// Starts our frontend.
pub(crate) fn chiasm(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    chiasm_with(inputs, OURS, &[])
}

/// Starts our frontend with additional flags.
pub(super) fn chiasm_with(
    inputs: &Inputs,
    name: &str,
    flags: &[&str],
) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let mut command = inputs.our_command(&inputs.chiasm, &["serve"], "--mm-arena-gb");
    command.args(["--port", &address.port().to_string()]).args(flags);
    command.arg("--").args(inputs.engine_flags());
    let program = Program::start(name, &mut command, &inputs.scratch)?;
    Ok(Side { name: name.to_owned(), address, program, reports_engines: true })
}

/// Starts vLLM's own frontend, which balances by the number of requests of each engine.
pub(crate) fn vllm_serve(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    vllm("vllm serve", inputs.command(&inputs.vllm), inputs, &ALL_ENGINES)
}

/// Starts vLLM's own frontend with one engine and additional flags.
pub(super) fn vllm_serve_alone(
    inputs: &Inputs,
    name: &str,
    flags: &[&str],
) -> Result<Side, Box<dyn Error>> {
    vllm(name, inputs.command(&inputs.vllm), inputs, flags)
}

/// Starts vLLM's Rust frontend.
pub(crate) fn vllm_rs(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    let mut command = inputs.command(&inputs.vllm_rs);
    command.env("VLLM_RS_PYTHON", &inputs.python);
    command.env("VLLM_RUST_FRONTEND_PATH", &inputs.vllm_rs);
    vllm("vllm-rs", command, inputs, &ALL_ENGINES)
}

fn vllm(
    name: &str,
    mut command: Command,
    inputs: &Inputs,
    flags: &[&str],
) -> Result<Side, Box<dyn Error>> {
    let name = format!("{name} {}", inputs.version);
    let address = free_address()?;
    command.arg("serve").arg(&inputs.model).args(["--served-model-name", MODEL]);
    command.args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
    command.arg("--enable-prompt-tokens-details").args(inputs.engine_flags()).args(flags);
    let program = Program::start(&name, &mut command, &inputs.scratch)?;
    Ok(Side { name, address, program, reports_engines: false })
}

impl Side {
    /// Waits until the side and all its engines are ready.
    pub(crate) async fn wait(&mut self) -> Result<(), Box<dyn Error>> {
        eprintln!("starting {}", self.name);
        let start = Instant::now();
        while !self.is_ready().await {
            self.program.check()?;
            if start.elapsed() > START_TIMEOUT {
                return Err(self.program.failed("is not ready"));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    async fn is_ready(&self) -> bool {
        if self.reports_engines {
            return ready_engines(self.address).await.is_ok_and(|engines| engines == ENGINES);
        }
        get(self.address, "/health").await.is_ok_and(|it| it.status == StatusCode::OK)
    }
}
