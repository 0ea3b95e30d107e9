//! Dynamo's frontend before its own simulated engine, the mocker.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use peers::programs::free_address;

use crate::origin::Origin;
use crate::program::Program;
use crate::side::{Counts, Inputs, Side, command};
use crate::splits::Splits;
use crate::workload::{MODEL, MOST_STREAMS, Pace};

/// By what its processes find each other.
pub(crate) enum Discovery<'a> {
    /// Files of this run.
    Files,
    /// This program, started for them.
    Etcd(&'a Path),
}

/// What its simulated engines compute, one for each of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Prompts and answers.
    All,
    Prompts,
    Answers,
}

/// Starts it, by a Python that has it in the version that is named.
pub(crate) fn start(
    inputs: &Inputs,
    (program, version): &(PathBuf, String),
    pace: Pace,
    origin: &Origin,
    discovery: Discovery,
    stages: &[Stage],
) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let store = inputs.scratch.join(format!("dynamo-store-{}", address.port()));
    fs::create_dir(&store)?;
    let (etcd, found) = match discovery {
        Discovery::Files => (None, [("DYN_DISCOVERY_BACKEND", "file".into()), ("DYN_FILE_KV", store.into_os_string())]),
        Discovery::Etcd(program) => {
            let (etcd, url) = etcd(inputs, program, &store)?;
            (Some(etcd), [("DYN_DISCOVERY_BACKEND", "etcd".into()), ("ETCD_ENDPOINTS", url.into())])
        }
    };
    let mut frontend = python(program, &found, "dynamo.frontend");
    frontend.args(["--http-host", "127.0.0.1", "--http-port", &address.port().to_string(), "--router-mode", "kv"]);
    let (mut engines, mut splits) = (Vec::new(), Splits::Never);
    for (number, &stage) in stages.iter().enumerate() {
        let mut engine = mocker(inputs, program, &found, pace, stage);
        if stage == Stage::Prompts {
            let told_at = free_address()?;
            engine.env("DYN_SYSTEM_PORT", told_at.port().to_string());
            splits = Splits::Counted(told_at);
        }
        let name = format!("dynamo-mocker-{}-{number}", address.port());
        engines.push(Program::start(&name, &mut engine, &inputs.scratch)?);
    }
    engines.extend(etcd);
    let name = format!("dynamo-frontend-{}", address.port());
    let frontend = Program::start(&name, &mut frontend, &inputs.scratch)?;
    Ok(Side {
        counts: Counts::Text,
        engines,
        splits,
        // Its mocker knows no log probabilities, and registers no parser of calls.
        tells_text_alone: true,
        ..Side::new(&format!("Dynamo {version}"), address, origin.url(), frontend)
    })
}

/// One of its simulated engines.
fn mocker(inputs: &Inputs, program: &Path, found: &[(&str, OsString)], pace: Pace, stage: Stage) -> Command {
    let mut engine = python(program, found, "dynamo.mocker");
    engine.arg("--model-path").arg(&inputs.model).args(["--model-name", MODEL, "--block-size", "16"]);
    match pace {
        // 0, said to be infinite, costs 20 ms.
        Pace::Unbounded | Pace::Steps => engine.args(["--speedup-ratio", "1000000"]),
        // Its steps take as long as it thinks they do on some GPU; no flag says how many there are
        // per second.
        Pace::Calls(_) => engine.args(["--max-num-seqs", &MOST_STREAMS.to_string()]),
    };
    let mode = match stage {
        Stage::All => return engine,
        Stage::Prompts => "prefill",
        Stage::Answers => "decode",
    };
    // Else it waits for as long as it thinks that keys and values take from one GPU to another.
    engine.args(["--disaggregation-mode", mode, "--kv-transfer-bandwidth", "0"]);
    engine
}

/// Starts etcd and waits until it listens; returns it with its address.
fn etcd(inputs: &Inputs, program: &Path, store: &Path) -> Result<(Program, String), Box<dyn Error>> {
    let (client, peer) = (free_address()?, format!("http://{}", free_address()?));
    let url = format!("http://{client}");
    let mut command = command(program);
    command.arg("--data-dir").arg(store.join("etcd")).args(["--initial-cluster", &format!("default={peer}")]);
    for flag in ["--listen-client-urls", "--advertise-client-urls"] {
        command.args([flag, &url]);
    }
    for flag in ["--listen-peer-urls", "--initial-advertise-peer-urls"] {
        command.args([flag, &peer]);
    }
    let mut etcd = Program::start("etcd", &mut command, &inputs.scratch)?;
    etcd.listens(client)?;
    Ok((etcd, url))
}

/// A module that finds others by what `found` says, and talks to them on this machine only.
fn python(program: &Path, found: &[(&str, OsString)], module: &str) -> Command {
    let mut python = command(program);
    python.args(["-B", "-m", module]).envs(found.iter().map(|(name, value)| (name, value)));
    python.env("DYN_REQUEST_PLANE", "tcp").env("DYN_EVENT_PLANE", "zmq");
    // The origin is on this machine. It only looks at the URL: who fetches is the worker.
    python.env("DYN_MM_ALLOW_INTERNAL", "1");
    for name in ["DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST"] {
        python.env(name, "127.0.0.1");
    }
    python
}
