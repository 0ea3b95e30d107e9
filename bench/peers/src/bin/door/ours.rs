//! `chiasm serve` before an engine of its own process.

use std::error::Error;

use crate::origin::Origin;
use crate::program::Program;
use crate::side::{Inputs, RECEIVER_CACHE_GB, Side, command, engine_arguments, free_address};
use crate::workload::MODEL;

pub(crate) fn start(inputs: &Inputs, origin: &Origin) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let handshake = format!("tcp://{}", free_address()?);
    let mut engine = command(&inputs.chiasm);
    engine.args(engine_arguments(inputs)).args(["--handshake", &handshake]);
    let mut frontend = command(&inputs.chiasm);
    frontend.arg("serve").arg(&inputs.model).args([
        "--served-model-name",
        MODEL,
        "--port",
        &address.port().to_string(),
    ]);
    // The origin is on this machine.
    frontend.args(["--attach", &handshake, "--receiver-cache-gb", RECEIVER_CACHE_GB, "--allow-private-media"]);
    Ok(Side {
        name: "chiasm".to_owned(),
        address,
        url: origin.url(),
        counts_images: true,
        frontend: Program::start("chiasm", &mut frontend, &inputs.scratch)?,
        children: 0,
        engine: Some(Program::start("chiasm-engine", &mut engine, &inputs.scratch)?),
    })
}
