//! Dynamo's frontend before its own simulated engine, the mocker.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::origin::Origin;
use crate::program::Program;
use crate::side::{Counts, Inputs, Peers, Side, command, free_address};
use crate::workload::{MODEL, MOST_STREAMS, Pace};

pub(crate) fn start(inputs: &Inputs, peers: &Peers, pace: Pace, origin: &Origin) -> Result<Side, Box<dyn Error>> {
    let ((program, version), address) = (&peers.dynamo, free_address()?);
    let store = inputs.scratch.join(format!("dynamo-store-{}", address.port()));
    fs::create_dir(&store)?;
    let mut frontend = python(program, &store, "dynamo.frontend");
    frontend.args(["--http-host", "127.0.0.1", "--http-port", &address.port().to_string(), "--router-mode", "kv"]);
    let mut engine = python(program, &store, "dynamo.mocker");
    engine.arg("--model-path").arg(&inputs.model).args(["--model-name", MODEL, "--block-size", "16"]);
    match pace {
        // 0, said to be infinite, costs 20 ms.
        Pace::Unbounded | Pace::Steps => engine.args(["--speedup-ratio", "1000000"]),
        // Its steps take as long as it thinks they do on some GPU; no flag says how many there are per second.
        Pace::Calls(_) => engine.args(["--max-num-seqs", &MOST_STREAMS.to_string()]),
    };
    Ok(Side {
        name: format!("Dynamo {version}"),
        address,
        url: origin.url(),
        counts: Counts::Text,
        frontend: Program::start("dynamo-frontend", &mut frontend, &inputs.scratch)?,
        children: 0,
        engines: vec![Program::start("dynamo-mocker", &mut engine, &inputs.scratch)?],
        tells_engines: false,
        // Its mocker knows no log probabilities, and registers no parser of calls.
        tells_text_alone: true,
        steps: None,
    })
}

/// A module that finds others by files, and talks to them on this machine only.
fn python(program: &Path, store: &Path, module: &str) -> Command {
    let mut python = command(program);
    python.args(["-B", "-m", module]).env("DYN_FILE_KV", store);
    for (name, value) in [("DYN_DISCOVERY_BACKEND", "file"), ("DYN_REQUEST_PLANE", "tcp"), ("DYN_EVENT_PLANE", "zmq")] {
        python.env(name, value);
    }
    // The origin is on this machine. It only looks at the URL: who fetches is the worker.
    python.env("DYN_MM_ALLOW_INTERNAL", "1");
    for name in ["DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"] {
        python.env(name, "127.0.0.1");
    }
    python
}
