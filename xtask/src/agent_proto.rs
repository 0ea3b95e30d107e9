//! The code of the protocol between frontends and agents, written again from `agent.proto`.

use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;

/// A workspace of its own: what compiles the protocol is no part of Chiasm's build.
const MANIFEST: &str = "crates/chiasm-agent/proto/Cargo.toml";

pub(crate) fn run(setup: &Setup) -> Result<(), Error> {
    let manifest = setup.workspace.file(MANIFEST)?;
    let mut write = cargo(&setup.workspace);
    write.args(["run", "--release", "--locked", "--manifest-path"]).arg(manifest);
    child::run(&mut write, "agent-proto", &setup.output, &setup.cancel)
}
