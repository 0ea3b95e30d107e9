//! vLLM's Rust frontend, which starts its engine itself: a Python module in its mind, our simulated
//! engine here.

use std::error::Error;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use peers::programs::free_address;

use crate::origin::Origin;
use crate::program::Program;
use crate::side::{Inputs, Peers, Side, command, engine_arguments};
use crate::workload::{MODEL, Pace};

/// It fetches nothing from this machine's addresses, and no flag lets it. So it is given one that
/// is for examples (RFC 5737), and the origin as its proxy: it opens the same connection and gets
/// the same answers.
const PUBLIC_URL: &str = "http://203.0.113.10/picture.jpg";

pub(crate) fn start(inputs: &Inputs, peers: &Peers, pace: Pace, origin: &Origin) -> Result<Side, Box<dyn Error>> {
    let ((program, version), address) = (&peers.vllm_rs, free_address()?);
    let mut frontend = command(program);
    let steps = inputs.scratch.join("vllm-rs.steps");
    frontend.env("VLLM_RS_PYTHON", engine_script(inputs, pace, &steps)?).arg("serve").arg(&inputs.model);
    frontend.env("http_proxy", format!("http://{}", origin.address()));
    if let Some(libraries) = &peers.libraries {
        frontend.env("LD_LIBRARY_PATH", libraries);
    }
    frontend.args(["--served-model-name", MODEL, "--port", &address.port().to_string()]);
    if matches!(pace, Pace::Calls(_)) {
        frontend.args(["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]);
    }
    let frontend = Program::start("vllm-rs", &mut frontend, &inputs.scratch)?;
    Ok(Side {
        children: 1,
        steps: matches!(pace, Pace::Calls(_)).then_some(steps),
        ..Side::new(&format!("vllm-rs {version}"), address, PUBLIC_URL.to_owned(), frontend)
    })
}

/// Stands for the Python that is called as `python -m … --data-parallel-address HOST
/// --data-parallel-rpc-port PORT …`.
fn engine_script(inputs: &Inputs, pace: Pace, steps: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let engine: Vec<String> = engine_arguments(inputs, pace, steps).iter().map(|argument| quoted(argument)).collect();
    let script = format!(
        r#"#!/bin/sh
while [ $# -gt 1 ]; do
    case "$1" in
        --data-parallel-address) host=$2 ;;
        --data-parallel-rpc-port) port=$2 ;;
    esac
    shift
done
exec {} {} --handshake "tcp://$host:$port"
"#,
        quoted(&inputs.chiasm.display().to_string()),
        engine.join(" "),
    );
    let path = inputs.scratch.join("engine.sh");
    fs::write(&path, script)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}
