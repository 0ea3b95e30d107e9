//! Generates the Rust code of the agent protocol from `agent.proto`.

use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;

/// The manifest of the generator. It is a workspace of its own, so that the protocol compiler is
/// not a dependency of Chiasm.
const MANIFEST: &str = "crates/chiasm-agent/proto/Cargo.toml";

/// Runs the generator.
pub(crate) fn run(setup: &Setup) -> Result<(), Error> {
    let manifest = setup.workspace.file(MANIFEST)?;
    let mut generate = cargo(&setup.workspace);
    generate.args(["run", "--release", "--locked", "--manifest-path"]).arg(manifest);
    child::run(&mut generate, "agent-proto", &setup.output, &setup.cancel)
}
