//! `chiasm serve` before engines of processes of their own: ours, and the baseline that is a binary of another commit.

use std::error::Error;
use std::path::Path;

use crate::origin::Origin;
use crate::program::Program;
use crate::side::{Counts, Inputs, RECEIVER_CACHE_GB, Side, command, engine_arguments, free_address};
use crate::workload::{MODEL, Pace};

/// Side of the binary that is measured.
pub(crate) const OURS: &str = "chiasm";
/// Side of the binary that it is compared with.
pub(crate) const BASELINE: &str = "chiasm (baseline)";

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
        let handshake = format!("tcp://{}", free_address()?);
        let mut engine = command(&inputs.chiasm);
        engine.args(engine_arguments(inputs, pace, &steps)).args(["--handshake", &handshake]);
        engines.push(Program::start(&format!("{name} engine {number}"), &mut engine, &inputs.scratch)?);
        handshakes.push(handshake);
    }
    let mut frontend = command(program);
    frontend.arg("serve").arg(&inputs.model).args(["--served-model-name", MODEL]);
    frontend.args(["--port", &address.port().to_string(), "--attach", &handshakes.join(",")]);
    // Each arena is 1 GiB larger than the receiver cache by default; here that GiB is divided among the engines.
    let arena = RECEIVER_CACHE_GB.parse::<f64>()? + 1.0 / count as f64;
    frontend.args(["--receiver-cache-gb", RECEIVER_CACHE_GB, "--mm-arena-gb", &format!("{arena:.2}")]);
    // What outlives a frontend is none of the user's; by a variable, which a baseline may not know.
    frontend.env("CHIASM_STATE_DIR", inputs.scratch.join("state"));
    // The origin is on this machine.
    frontend.arg("--allow-private-media");
    let is_old = name == BASELINE;
    if matches!(pace, Pace::Calls(_)) && !is_old {
        frontend.args(["--tool-call-parser", "hermes"]);
    }
    Ok(Side {
        name: name.to_owned(),
        address,
        url: origin.url(),
        counts: Counts::All,
        frontend: Program::start(name, &mut frontend, &inputs.scratch)?,
        children: 0,
        engines,
        tells_engines: true,
        // It may be of a time before there were tools.
        tells_text_alone: is_old,
        steps: matches!(pace, Pace::Calls(_)).then_some(steps),
    })
}
