//! A frontend, an agent with certificates on both sides, and the agent's engine.

use std::error::Error;
use std::net::SocketAddr;

use crate::machines::certificates::Certificates;
use crate::machines::machine::Machine;
use crate::origin::Origin;
use crate::ours::{self, STATE_DIR};
use crate::program::{Program, free_address};
use crate::side::{Inputs, Side};
use crate::workload::Pace;

/// The forms of images on the wire.
pub(crate) const FILES: &str = "encoded";
pub(crate) const TENSORS: &str = "tensors";

/// Starts a frontend here, and an agent with its engine on `machine`. Returns the side and the
/// agent's address.
pub(crate) fn start(
    inputs: &Inputs,
    machine: &Machine,
    certificates: &Certificates,
    pace: Pace,
    origin: &Origin,
) -> Result<(Side, SocketAddr), Box<dyn Error>> {
    let name = format!("agent, {}", machine.link);
    let step_log = inputs.scratch.join(format!("{name}.steps"));
    let command = machine.command(&inputs.chiasm);
    let (engine, handshake) =
        ours::engine(inputs, pace, &format!("{name}: engine"), command, &step_log, &[])?;
    let address = SocketAddr::new(machine.host, free_address()?.port());
    let mut agent = machine.command(&inputs.chiasm);
    agent.arg("agent").arg(&inputs.model);
    agent.args(ours::attach_flags(&[handshake])?).args(certificates.flags());
    // For the frontend that sends tensors: agents refuse them by default.
    agent.arg("--take-tensors");
    agent.args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()]);
    agent.env(STATE_DIR, inputs.scratch.join("state"));
    let agent = Program::start(&name, &mut agent, &inputs.scratch)?;
    let side = Side {
        agents: vec![agent],
        engines: vec![engine],
        reports_engines: true,
        step_log: pace.has_long_answers().then_some(step_log),
        ..frontend(inputs, &name, address, FILES, certificates, origin.url())?
    };
    Ok((side, address))
}

/// Starts a frontend that sends images to an agent in this form.
pub(crate) fn frontend(
    inputs: &Inputs,
    name: &str,
    agent: SocketAddr,
    form: &str,
    certificates: &Certificates,
    picture_url: String,
) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let mut frontend = ours::frontend(inputs, &inputs.chiasm, address);
    frontend.args(["--agents", &agent.to_string(), "--agent-media", form]);
    frontend.args(certificates.flags());
    let frontend = Program::start(&format!("{name}: frontend"), &mut frontend, &inputs.scratch)?;
    Ok(Side::new(name, address, picture_url, frontend))
}
