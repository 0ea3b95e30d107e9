//! `chiasm serve` before engines of processes of their own: ours, and the baseline that is a binary
//! of another commit.

use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use peers::programs::free_address;

use crate::origin::Origin;
use crate::program::Program;
use crate::side::{Inputs, RECEIVER_CACHE_GB, Side, command, engine_arguments};
use crate::workload::{MODEL, Pace};

/// Side of the binary that is measured.
pub(crate) const OURS: &str = "chiasm";
/// Side of the binary that it is compared with.
pub(crate) const BASELINE: &str = "chiasm (baseline)";
/// What outlives a frontend is none of the user's, so it goes elsewhere: by a variable, as a
/// baseline may not know the flag.
pub(crate) const STATE_DIR: &str = "CHIASM_STATE_DIR";

/// Both sides have the engines of our binary, so that only frontends differ.
pub(crate) fn start(
    inputs: &Inputs,
    (name, program): (&str, &Path),
    pace: Pace,
    origin: &Origin,
) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    // A step is to hold as many streams as there are clients, so one engine gets them all.
    let count = if pace == Pace::Unbounded { inputs.engines } else { 1 };
    let (mut engines, mut handshakes) = (Vec::new(), Vec::new());
    let steps = inputs.scratch.join(format!("{name}.steps"));
    for number in 0..count {
        let name = format!("{name} engine {number}");
        let (engine, handshake) = engine(inputs, pace, &name, command(&inputs.chiasm), &steps, &[])?;
        engines.push(engine);
        handshakes.push(handshake);
    }
    let mut frontend = frontend(inputs, program, address);
    frontend.args(attach(&handshakes)?);
    let is_old = name == BASELINE;
    if matches!(pace, Pace::Calls(_)) && !is_old {
        frontend.args(["--tool-call-parser", "hermes"]);
    }
    Ok(Side {
        engines,
        tells_engines: true,
        // It may be of a time before there were tools.
        tells_text_alone: is_old,
        steps: matches!(pace, Pace::Calls(_)).then_some(steps),
        ..Side::new(name, address, origin.url(), Program::start(name, &mut frontend, &inputs.scratch)?)
    })
}

/// Starts a simulated engine by `command`, which runs our binary, with `more` flags; returns it
/// with the address at which it waits to be attached.
pub(crate) fn engine(
    inputs: &Inputs,
    pace: Pace,
    name: &str,
    mut command: Command,
    steps: &Path,
    more: &[String],
) -> Result<(Program, String), Box<dyn Error>> {
    let handshake = format!("tcp://{}", free_address()?);
    command.args(engine_arguments(inputs, pace, steps)).args(["--handshake", &handshake]).args(more);
    Ok((Program::start(name, &mut command, &inputs.scratch)?, handshake))
}

/// The flags of a process that attaches these engines.
pub(crate) fn attach(handshakes: &[String]) -> Result<Vec<String>, Box<dyn Error>> {
    // Each arena is 1 GiB larger than the receiver cache by default; here that GiB is divided among
    // the engines.
    let arena = RECEIVER_CACHE_GB.parse::<f64>()? + 1.0 / handshakes.len() as f64;
    let [handshakes, arena] = [handshakes.join(","), format!("{arena:.2}")];
    let flags = ["--attach", &*handshakes, "--receiver-cache-gb", RECEIVER_CACHE_GB, "--mm-arena-gb", &*arena];
    Ok(flags.map(str::to_owned).into())
}

/// A frontend that listens at `address`, of whatever engines flags will name.
pub(crate) fn frontend(inputs: &Inputs, program: &Path, address: SocketAddr) -> Command {
    let mut frontend = command(program);
    frontend.arg("serve").arg(&inputs.model).args(["--served-model-name", MODEL]);
    frontend.args(["--port", &address.port().to_string()]);
    frontend.env(STATE_DIR, inputs.state());
    // The origin is on this machine.
    frontend.arg("--allow-private-media");
    frontend
}
