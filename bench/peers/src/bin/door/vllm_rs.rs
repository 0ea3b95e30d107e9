//! vLLM's Rust frontend. It starts its engine itself; here a script runs our simulated engine in
//! place of Python.

use std::error::Error;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::origin::Origin;
use crate::program::{Program, free_address};
use crate::side::{Inputs, Side, Versioned, command, engine_arguments};
use crate::workload::{MODEL, Pace};

/// The URL of the repeated picture, with an address for examples (RFC 5737). The frontend fetches
/// nothing from this machine's addresses, and no flag changes that. With the origin as its proxy it
/// opens the same connection and gets the same answers.
const PUBLIC_URL: &str = "http://203.0.113.10/picture.jpg";

/// Starts the frontend. `libraries` is the folder of libturbojpeg, with which it decodes.
pub(crate) fn start(
    inputs: &Inputs,
    (program, version): &Versioned,
    libraries: Option<&str>,
    pace: Pace,
    origin: &Origin,
) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let step_log = inputs.scratch.join("vllm-rs.steps");
    let engine = engine_arguments(inputs, pace, &step_log);
    let mut frontend = frontend(inputs, program, address, engine)?;
    frontend.env("http_proxy", format!("http://{}", origin.address));
    if let Some(libraries) = libraries {
        frontend.env("LD_LIBRARY_PATH", libraries);
    }
    if pace.has_long_answers() {
        frontend.args(["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]);
    }
    let frontend = Program::start("vllm-rs", &mut frontend, &inputs.scratch)?;
    Ok(Side {
        children: 1,
        step_log: pace.has_long_answers().then_some(step_log),
        ..Side::new(&format!("vllm-rs {version}"), address, PUBLIC_URL.to_owned(), frontend)
    })
}

/// Returns the command of the frontend at `address`, which starts our binary with the arguments
/// `engine`.
pub(crate) fn frontend(
    inputs: &Inputs,
    program: &Path,
    address: SocketAddr,
    engine: Vec<String>,
) -> Result<Command, Box<dyn Error>> {
    let mut frontend = command(program);
    frontend.env("VLLM_RS_PYTHON", engine_script(inputs, engine)?);
    frontend.arg("serve").arg(&inputs.model);
    frontend.args(["--served-model-name", MODEL, "--port", &address.port().to_string()]);
    Ok(frontend)
}

/// Writes the script that stands in for `python -m … --data-parallel-address HOST
/// --data-parallel-rpc-port PORT …`.
fn engine_script(inputs: &Inputs, arguments: Vec<String>) -> Result<PathBuf, Box<dyn Error>> {
    let mut engine = vec![inputs.chiasm.display().to_string()];
    engine.extend(arguments);
    let quoted = engine.iter().map(|argument| format!("'{}'", argument.replace('\'', r"'\''")));
    let script = format!(
        r#"#!/bin/sh
while [ $# -gt 1 ]; do
    case "$1" in
        --data-parallel-address) host=$2 ;;
        --data-parallel-rpc-port) port=$2 ;;
    esac
    shift
done
exec {} --handshake "tcp://$host:$port"
"#,
        quoted.collect::<Vec<_>>().join(" "),
    );
    let path = inputs.scratch.join("engine.sh");
    fs::write(&path, script)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}
