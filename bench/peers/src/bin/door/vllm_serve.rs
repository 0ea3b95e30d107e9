//! vLLM's own frontend in Python, in front of our simulated engine.

use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use peers::flags::Flags;

use crate::origin::Origin;
use crate::ours;
use crate::program::{Program, free_address};
use crate::side::{Inputs, Side, command};
use crate::workload::{MODEL, Pace};

const NAME: &str = "vllm serve";

/// The program `vllm` of an environment.
pub(crate) struct VllmServe {
    pub(crate) program: PathBuf,
    pub(crate) version: String,
    /// Environment variables for a machine without a GPU.
    pub(crate) variables: Vec<(String, String)>,
}

impl VllmServe {
    /// Returns the program `vllm`, if it is given.
    pub(crate) fn from_flags(flags: &Flags) -> Result<Option<Self>, Box<dyn Error>> {
        let Some(program) = flags.find("--vllm-serve") else { return Ok(None) };
        let variables = flags.get("--engine-variables")?.split(',');
        let variables = variables.filter_map(|variable| variable.split_once('='));
        Ok(Some(Self {
            program: program.into(),
            version: flags.get("--vllm")?.to_owned(),
            variables: variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        }))
    }

    /// Returns the name of the side.
    pub(crate) fn name(&self) -> String {
        format!("{NAME} {}", self.version)
    }
}

/// Starts the frontend and its engine. It takes part in bursts only, so that other cases do not
/// wait for Python.
pub(crate) fn start(
    inputs: &Inputs,
    vllm: &VllmServe,
    pace: Pace,
    origin: &Origin,
) -> Result<Side, Box<dyn Error>> {
    let engine_name = format!("{NAME} engine");
    let (engine, handshake) = ours::engine(
        inputs,
        pace,
        &engine_name,
        command(&inputs.chiasm),
        Path::new("/dev/null"),
        &[],
    )?;
    let address = free_address()?;
    let mut frontend = frontend(inputs, vllm, address, &handshake)?;
    let frontend = Program::start(NAME, &mut frontend, &inputs.scratch)?;
    Ok(Side {
        engines: vec![engine],
        bursts_only: true,
        ..Side::new(&vllm.name(), address, origin.url(), frontend)
    })
}

/// Returns the command of the frontend at `address` of an engine with this handshake.
pub(crate) fn frontend(
    inputs: &Inputs,
    vllm: &VllmServe,
    address: SocketAddr,
    handshake: &str,
) -> Result<Command, Box<dyn Error>> {
    let port = handshake.rsplit_once(':').ok_or("the handshake has no port")?.1;
    let mut frontend = command(&vllm.program);
    frontend.envs(vllm.variables.iter().map(|(name, value)| (name, value)));
    frontend.arg("serve").arg(&inputs.model).args(["--served-model-name", MODEL]);
    frontend.args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
    // The engine is a process that this frontend does not start.
    frontend.args(["--data-parallel-size-local", "0", "--data-parallel-address", "127.0.0.1"]);
    frontend.args(["--data-parallel-rpc-port", port]);
    Ok(frontend)
}
