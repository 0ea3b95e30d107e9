//! Our frontend before two engines: both of which do everything, or one that prefills and one that
//! decodes.

use std::error::Error;
use std::path::PathBuf;

use peers::programs::free_address;

use crate::origin::Origin;
use crate::ours;
use crate::program::Program;
use crate::side::{Inputs, Side, command};
use crate::splits::Splits;
use crate::workload::Pace;

/// Weights by which a prompt that is not computed yet never stays with the engine that answers.
/// What splitting costs is still worked out for each request.
const ALWAYS: [&str; 4] = ["--disturb-weight", "1000", "--hop-weight", "0"];

/// Where the engines of a side that splits write down the moments between which the frontend passes
/// a prompt on.
pub(crate) struct HopLogs {
    /// When an engine had a prompt computed.
    pub(crate) left: PathBuf,
    /// When one was asked for the answer.
    pub(crate) asked: PathBuf,
}

/// One before two engines without roles.
pub(crate) fn aggregated(inputs: &Inputs, name: &str, pace: Pace, origin: &Origin) -> Result<Side, Box<dyn Error>> {
    before(inputs, name, pace, origin, [("", vec![]), ("", vec![])])
}

/// One before an engine of either role. Where engines wait for nothing they write down those
/// moments.
pub(crate) fn split(
    inputs: &Inputs,
    name: &str,
    pace: Pace,
    origin: &Origin,
) -> Result<(Side, HopLogs), Box<dyn Error>> {
    let [left, asked] = ["left", "asked"].map(|moments| inputs.scratch.join(format!("{name}.{moments}")));
    let arguments = |log: [&str; 2]| {
        let connector = ["--sim-kv-connector"].into_iter();
        let log = log.into_iter().filter(|_| pace == Pace::Unbounded);
        connector.chain(log).map(str::to_owned).collect::<Vec<String>>()
    };
    let engines = [
        ("prefill=", arguments(["--sim-step-log", &left.display().to_string()])),
        ("decode=", arguments(["--sim-request-log", &asked.display().to_string()])),
    ];
    let side = before(inputs, name, pace, origin, engines)?;
    Ok((Side { splits: Splits::Told, ..side }, HopLogs { left, asked }))
}

/// Engines are what their handshake addresses begin with, and what they are told.
fn before(
    inputs: &Inputs,
    name: &str,
    pace: Pace,
    origin: &Origin,
    of_engines: [(&str, Vec<String>); 2],
) -> Result<Side, Box<dyn Error>> {
    let (mut engines, mut handshakes) = (Vec::new(), Vec::new());
    for (number, (role, arguments)) in of_engines.iter().enumerate() {
        let name = format!("{name} engine {number}");
        let steps = inputs.scratch.join(format!("{name}.steps"));
        let (engine, handshake) = ours::engine(inputs, pace, &name, command(&inputs.chiasm), &steps, arguments)?;
        engines.push(engine);
        handshakes.push(format!("{role}{handshake}"));
    }
    let address = free_address()?;
    let mut frontend = ours::frontend(inputs, &inputs.chiasm, address);
    frontend.args(ours::attach(&handshakes)?).args(ALWAYS);
    let frontend = Program::start(name, &mut frontend, &inputs.scratch)?;
    Ok(Side { engines, tells_engines: true, ..Side::new(name, address, origin.url(), frontend) })
}
