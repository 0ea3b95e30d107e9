//! `chiasm serve` with engines in separate processes: ours, and a baseline, which is the binary of
//! another commit.

use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use peers::row::OURS;

use crate::origin::Origin;
use crate::program::{Program, free_address};
use crate::side::{Inputs, RECEIVER_CACHE_GB, Side, command, engine_arguments};
use crate::workload::{MODEL, Pace};

pub(crate) const BASELINE: &str = "chiasm (baseline)";
/// The environment variable with the folder of state, which must not be the user's. A baseline may
/// not have the flag.
pub(crate) const STATE_DIR: &str = "CHIASM_STATE_DIR";

/// Starts our side, or the one with the binary `baseline`. Both have engines of our binary, so only
/// frontends differ. With [`Pace::Unbounded`] each frontend has `engines` engines, otherwise one.
pub(crate) fn start(
    inputs: &Inputs,
    baseline: Option<&Path>,
    engines: usize,
    pace: Pace,
    origin: &Origin,
) -> Result<Side, Box<dyn Error>> {
    let name = if baseline.is_some() { BASELINE } else { OURS };
    // A step holds as many streams as there are clients only if one engine gets all streams.
    let count = if pace == Pace::Unbounded { engines } else { 1 };
    let step_log = inputs.scratch.join(format!("{name}.steps"));
    let mut engines = Vec::new();
    let mut handshakes = Vec::new();
    for number in 0..count {
        let name = format!("{name} engine {number}");
        let (engine, handshake) =
            engine(inputs, pace, &name, command(&inputs.chiasm), &step_log, &[])?;
        engines.push(engine);
        handshakes.push(handshake);
    }
    let address = free_address()?;
    let mut frontend = frontend(inputs, baseline.unwrap_or(&inputs.chiasm), address);
    frontend.args(attach_flags(&handshakes)?);
    if pace.has_long_answers() && baseline.is_none() {
        frontend.args(["--tool-call-parser", "hermes"]);
    }
    let frontend = Program::start(name, &mut frontend, &inputs.scratch)?;
    Ok(Side {
        engines,
        reports_engines: true,
        // A baseline may be older than the support for tools.
        streams_text_only: baseline.is_some(),
        step_log: pace.has_long_answers().then_some(step_log),
        ..Side::new(name, address, origin.url(), frontend)
    })
}

/// Starts a simulated engine with `command`, which runs our binary, and additional `flags`. Returns
/// it with the address of its handshake.
pub(crate) fn engine(
    inputs: &Inputs,
    pace: Pace,
    name: &str,
    mut command: Command,
    step_log: &Path,
    flags: &[String],
) -> Result<(Program, String), Box<dyn Error>> {
    let handshake = format!("tcp://{}", free_address()?);
    command.args(engine_arguments(inputs, pace, step_log));
    command.args(["--handshake", &handshake]).args(flags);
    Ok((Program::start(name, &mut command, &inputs.scratch)?, handshake))
}

/// Returns the flags of a process that attaches these engines.
pub(crate) fn attach_flags(handshakes: &[String]) -> Result<Vec<String>, Box<dyn Error>> {
    // By default each arena is 1 GiB larger than the receiver cache; here the engines share 1 GiB.
    let arena_gb = RECEIVER_CACHE_GB.parse::<f64>()? + 1.0 / handshakes.len() as f64;
    let arena_gb = format!("{arena_gb:.2}");
    let handshakes = handshakes.join(",");
    let cache = ["--receiver-cache-gb", RECEIVER_CACHE_GB, "--mm-arena-gb", &arena_gb];
    let flags = ["--attach", &handshakes].into_iter().chain(cache);
    Ok(flags.map(str::to_owned).collect())
}

/// Returns the command of a frontend at `address`, without flags for engines.
pub(crate) fn frontend(inputs: &Inputs, program: &Path, address: SocketAddr) -> Command {
    let mut frontend = command(program);
    frontend.arg("serve").arg(&inputs.model).args(["--served-model-name", MODEL]);
    frontend.args(["--port", &address.port().to_string()]);
    frontend.env(STATE_DIR, inputs.scratch.join("state"));
    // The origin is on this machine.
    frontend.arg("--allow-private-media");
    frontend
}
