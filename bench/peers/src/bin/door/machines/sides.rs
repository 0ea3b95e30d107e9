//! A frontend, an agent that it speaks to with certificates on both sides, and the agent's engine.

use std::error::Error;
use std::net::SocketAddr;

use peers::programs::free_address;

use crate::machines::certificates::Certificates;
use crate::machines::machine::Machine;
use crate::origin::Origin;
use crate::ours::{self, STATE_DIR};
use crate::program::Program;
use crate::side::{Inputs, Side};
use crate::workload::Pace;

/// The forms in which images are sent.
pub(crate) const FILES: &str = "encoded";
pub(crate) const TENSORS: &str = "tensors";

/// Starts all three, agent and engine on `machine`; returns them with the agent's address.
pub(crate) fn start(
    inputs: &Inputs,
    machine: &Machine,
    certificates: &Certificates,
    pace: Pace,
    origin: &Origin,
) -> Result<(Side, SocketAddr), Box<dyn Error>> {
    let name = format!("agent, {}", machine.link);
    let steps = inputs.scratch.join(format!("{name}.steps"));
    let (engine, handshake) =
        ours::engine(inputs, pace, &format!("{name}: engine"), machine.command(&inputs.chiasm), &steps, &[])?;
    let address = SocketAddr::new(machine.host, free_address()?.port());
    let mut agent = machine.command(&inputs.chiasm);
    agent.arg("agent").arg(&inputs.model).args(ours::attach(&[handshake])?).args(certificates.flags());
    // The frontend that sends tensors is compared with this one, and agents take them only if they
    // are told to.
    agent.arg("--take-tensors");
    agent.args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()]);
    agent.env(STATE_DIR, inputs.state());
    let agent = Program::start(&name, &mut agent, &inputs.scratch)?;
    let side = Side {
        agents: vec![agent],
        engines: vec![engine],
        tells_engines: true,
        steps: matches!(pace, Pace::Calls(_)).then_some(steps),
        ..frontend(inputs, &name, address, FILES, certificates, origin)?
    };
    Ok((side, address))
}

/// Starts a frontend alone, of an agent at this address that it sends images in this form.
pub(crate) fn frontend(
    inputs: &Inputs,
    name: &str,
    agent: SocketAddr,
    media: &str,
    certificates: &Certificates,
    origin: &Origin,
) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let mut frontend = ours::frontend(inputs, &inputs.chiasm, address);
    frontend.args(["--agents", &agent.to_string(), "--agent-media", media]).args(certificates.flags());
    let frontend = Program::start(&format!("{name}: frontend"), &mut frontend, &inputs.scratch)?;
    Ok(Side::new(name, address, origin.url(), frontend))
}
