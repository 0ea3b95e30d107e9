//! Our frontend with two engines: both compute everything, or one prefills and one decodes.

use std::error::Error;
use std::path::PathBuf;

use crate::origin::Origin;
use crate::ours;
use crate::program::{Program, free_address};
use crate::side::{Inputs, Side, command};
use crate::splits::Splits;
use crate::workload::Pace;

/// Weights with which no new prompt stays with the engine that answers. The router still computes
/// the cost of splitting for each request.
const ALWAYS_SPLIT: [&str; 4] = ["--disturb-weight", "1000", "--hop-weight", "0"];

/// The logs of the times around the frontend's hand-over of a computed prompt.
pub(crate) struct HopLogs {
    /// The times at which the prefilling engine had an output.
    pub(crate) outputs: PathBuf,
    /// The times at which the decoding engine received a request.
    pub(crate) requests: PathBuf,
}

/// Starts a side with two engines without roles.
pub(crate) fn aggregated(
    inputs: &Inputs,
    name: &str,
    pace: Pace,
    origin: &Origin,
) -> Result<Side, Box<dyn Error>> {
    start(inputs, name, pace, origin, [("", vec![]), ("", vec![])])
}

/// Starts a side with an engine of each role. Unbounded engines write logs.
pub(crate) fn split(
    inputs: &Inputs,
    name: &str,
    pace: Pace,
    origin: &Origin,
) -> Result<(Side, HopLogs), Box<dyn Error>> {
    let [outputs, requests] =
        ["outputs", "requests"].map(|times| inputs.scratch.join(format!("{name}.{times}")));
    let flags = |flag: &str, log: &PathBuf| {
        let mut flags = vec!["--sim-kv-connector".to_owned()];
        if pace == Pace::Unbounded {
            flags.extend([flag.to_owned(), log.display().to_string()]);
        }
        flags
    };
    let engines = [
        ("prefill=", flags("--sim-step-log", &outputs)),
        ("decode=", flags("--sim-request-log", &requests)),
    ];
    let side = start(inputs, name, pace, origin, engines)?;
    Ok((Side { splits: Splits::ByHeader, ..side }, HopLogs { outputs, requests }))
}

/// Starts a side with engines, each given by the prefix of its handshake address and its flags.
fn start(
    inputs: &Inputs,
    name: &str,
    pace: Pace,
    origin: &Origin,
    engine_flags: [(&str, Vec<String>); 2],
) -> Result<Side, Box<dyn Error>> {
    let mut engines = Vec::new();
    let mut handshakes = Vec::new();
    for (number, (role, flags)) in engine_flags.iter().enumerate() {
        let name = format!("{name} engine {number}");
        let step_log = inputs.scratch.join(format!("{name}.steps"));
        let (engine, handshake) =
            ours::engine(inputs, pace, &name, command(&inputs.chiasm), &step_log, flags)?;
        engines.push(engine);
        handshakes.push(format!("{role}{handshake}"));
    }
    let address = free_address()?;
    let mut frontend = ours::frontend(inputs, &inputs.chiasm, address);
    frontend.args(ours::attach_flags(&handshakes)?).args(ALWAYS_SPLIT);
    let frontend = Program::start(name, &mut frontend, &inputs.scratch)?;
    Ok(Side { engines, reports_engines: true, ..Side::new(name, address, origin.url(), frontend) })
}
