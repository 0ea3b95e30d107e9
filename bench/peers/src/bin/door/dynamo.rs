//! Dynamo's frontend with its own simulated engine, the mocker.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::origin::Origin;
use crate::program::{Program, free_address};
use crate::side::{Counts, Inputs, Side, Versioned, command};
use crate::splits::Splits;
use crate::workload::{ENGINE_STREAMS, MODEL, Pace};

/// The stages that an engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    All,
    Prompts,
    Answers,
}

/// Starts the frontend, with an engine for each of `stages`. The processes find each other by files
/// of this run, or by the program `etcd`, which is started for them.
pub(crate) fn start(
    inputs: &Inputs,
    (program, version): &Versioned,
    pace: Pace,
    origin: &Origin,
    etcd: Option<&Path>,
    stages: &[Stage],
) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let port = address.port().to_string();
    let store = inputs.scratch.join(format!("dynamo-store-{port}"));
    fs::create_dir(&store)?;
    let mut engines = Vec::new();
    let discovery: [(&str, OsString); 2] = match etcd {
        None => [("DYN_DISCOVERY_BACKEND", "file".into()), ("DYN_FILE_KV", store.into())],
        Some(program) => {
            let (etcd, url) = start_etcd(inputs, program, &store)?;
            engines.push(etcd);
            [("DYN_DISCOVERY_BACKEND", "etcd".into()), ("ETCD_ENDPOINTS", url.into())]
        }
    };
    let mut splits = Splits::Never;
    for (number, &stage) in stages.iter().enumerate() {
        let mut engine = mocker(inputs, python(program, &discovery, "dynamo.mocker"), pace, stage);
        if stage == Stage::Prompts {
            let metrics = free_address()?;
            engine.env("DYN_SYSTEM_PORT", metrics.port().to_string());
            splits = Splits::ByCounter(metrics);
        }
        let name = format!("dynamo-mocker-{port}-{number}");
        engines.push(Program::start(&name, &mut engine, &inputs.scratch)?);
    }
    // etcd ends last.
    engines.rotate_left(usize::from(etcd.is_some()));
    let mut frontend = python(program, &discovery, "dynamo.frontend");
    frontend.args(["--http-host", "127.0.0.1", "--http-port", &port, "--router-mode", "kv"]);
    let name = format!("dynamo-frontend-{port}");
    let frontend = Program::start(&name, &mut frontend, &inputs.scratch)?;
    Ok(Side {
        counts: Counts::Text,
        engines,
        splits,
        // The mocker has no log probabilities, and registers no tool call parser.
        streams_text_only: true,
        ..Side::new(&format!("Dynamo {version}"), address, origin.url(), frontend)
    })
}

/// Completes the command of an engine.
fn mocker(inputs: &Inputs, mut engine: Command, pace: Pace, stage: Stage) -> Command {
    engine.arg("--model-path").arg(&inputs.model);
    engine.args(["--model-name", MODEL, "--block-size", "16"]);
    if pace.has_long_answers() {
        // A step takes as long as on a GPU that the mocker models; no flag sets a rate.
        engine.args(["--max-num-seqs", &ENGINE_STREAMS.to_string()]);
    } else {
        // A ratio of 0, documented as infinite, adds 20 ms.
        engine.args(["--speedup-ratio", "1000000"]);
    }
    let mode = match stage {
        Stage::All => return engine,
        Stage::Prompts => "prefill",
        Stage::Answers => "decode",
    };
    // With another bandwidth the mocker waits for the modelled time of a transfer between GPUs.
    engine.args(["--disaggregation-mode", mode, "--kv-transfer-bandwidth", "0"]);
    engine
}

/// Starts etcd and waits until it listens. Returns it with its URL.
fn start_etcd(
    inputs: &Inputs,
    program: &Path,
    store: &Path,
) -> Result<(Program, String), Box<dyn Error>> {
    let client = free_address()?;
    let url = format!("http://{client}");
    let peer = format!("http://{}", free_address()?);
    let mut command = command(program);
    command.arg("--data-dir").arg(store.join("etcd"));
    command.args(["--initial-cluster", &format!("default={peer}")]);
    command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    let mut etcd = Program::start("etcd", &mut command, &inputs.scratch)?;
    etcd.wait_for_listener(client)?;
    Ok((etcd, url))
}

/// Returns the command of a module, which uses addresses of this machine only.
fn python(program: &Path, discovery: &[(&str, OsString)], module: &str) -> Command {
    let mut python = command(program);
    python.args(["-B", "-m", module]).envs(discovery.iter().map(|(name, value)| (name, value)));
    python.env("DYN_REQUEST_PLANE", "tcp").env("DYN_EVENT_PLANE", "zmq");
    // The origin is on this machine. The frontend only checks the URL; workers would fetch it.
    python.env("DYN_MM_ALLOW_INTERNAL", "1");
    for host in ["TCP_RPC_HOST", "TCP_RESPONSE_STREAM_HOST", "EVENT_PLANE_HOST", "SYSTEM_HOST"] {
        python.env(format!("DYN_{host}"), "127.0.0.1");
    }
    python
}
