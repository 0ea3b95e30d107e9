//! Writes the Rust code of `agent.proto`. A workspace of its own: nothing that it needs comes into
//! Chiasm's build, and no `protoc` is needed here either.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = protox::compile([folder.join("agent.proto")], [folder])?;
    let out = folder.join("../src/generated");
    std::fs::create_dir_all(&out)?;
    tonic_prost_build::configure()
        .build_transport(false)
        .bytes(".")
        .emit_rerun_if_changed(false)
        .out_dir(out)
        .compile_fds(files)?;
    Ok(())
}
