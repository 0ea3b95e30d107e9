//! vLLM's own frontend in Python, in front of our simulated engine.

use std::error::Error;
use std::path::{Path, PathBuf};

use crate::origin::Origin;
use crate::ours;
use crate::program::{Program, free_address};
use crate::side::{Inputs, Side, command};
use crate::workload::{MODEL, Pace};

/// The program `vllm` of an environment.
pub(crate) struct VllmServe {
    pub(crate) program: PathBuf,
    pub(crate) version: String,
    /// Environment variables for a machine without a GPU.
    pub(crate) variables: Vec<(String, String)>,
}

/// Starts the frontend and its engine. It takes part in bursts only, so that other cases do not
/// wait for Python.
pub(crate) fn start(
    inputs: &Inputs,
    vllm: &VllmServe,
    pace: Pace,
    origin: &Origin,
) -> Result<Side, Box<dyn Error>> {
    let name = "vllm serve";
    let engine_name = format!("{name} engine");
    let (engine, handshake) = ours::engine(
        inputs,
        pace,
        &engine_name,
        command(&inputs.chiasm),
        Path::new("/dev/null"),
        &[],
    )?;
    let port = handshake.rsplit_once(':').ok_or("the handshake has no port")?.1;
    let address = free_address()?;
    let mut frontend = command(&vllm.program);
    frontend.envs(vllm.variables.iter().map(|(name, value)| (name, value)));
    frontend.arg("serve").arg(&inputs.model).args(["--served-model-name", MODEL]);
    frontend.args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
    // The engine is a process that this frontend does not start.
    frontend.args(["--data-parallel-size-local", "0", "--data-parallel-address", "127.0.0.1"]);
    frontend.args(["--data-parallel-rpc-port", port]);
    let frontend = Program::start(name, &mut frontend, &inputs.scratch)?;
    Ok(Side {
        engines: vec![engine],
        bursts_only: true,
        ..Side::new(&format!("{name} {}", vllm.version), address, origin.url(), frontend)
    })
}
