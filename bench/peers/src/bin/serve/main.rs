//! Frontends before real engines under the same load, in turns: the measuring half of `cargo xtask bench-peers serve`, which builds
//! this program and turns what it prints into rows.
//!
//! ```text
//! serve run --chiasm PROGRAM --replay PROGRAM --vllm PROGRAM --python PROGRAM --vllm-rs PROGRAM --version VERSION --plugin DIR
//!           --model DIR --pictures DIR --case NAME --rounds N [--logs DIR] [-- ENGINE FLAGS]
//! ```
//!
//! starts `chiasm serve`, `vllm serve` and `vllm-rs`, each with engines of its own, and engines whose requests were recorded before;
//! prints one JSON object per result of the case: see [`Measurement`](measure::Measurement). What it started ends with it.
//!
//! | file | is |
//! |---|---|
//! | `workload` | the requests |
//! | `picture`, `body` | JPEG files, no two alike, and a request's body: those of the program `door` |
//! | `client` | a connection, many at once |
//! | `group` | another program with all that it starts: its start, its CPU time, its end |
//! | `side` | the frontends |
//! | `replay` | the engines alone |
//! | `measure` | in which order who is asked, and what comes of it |

#![forbid(unsafe_code)]

#[path = "../door/body.rs"]
mod body;
mod client;
mod group;
mod measure;
#[path = "../door/picture.rs"]
mod picture;
mod replay;
mod side;
mod workload;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};

use crate::replay::Replay;
use crate::side::{Inputs, Side};
use crate::workload::Workload;

const USAGE: &str = "usage: see the head of bench/peers/src/bin/serve/main.rs";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(Into::into).and_then(|runtime| {
        runtime.block_on(async {
            // What was started is in groups of its own, which the terminal's signal does not reach; they end when this is dropped.
            tokio::select! {
                done = run(&arguments) => done,
                signal = ended_by_signal() => signal,
            }
        })
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let mut halves = arguments.splitn(2, |argument| argument == "--");
    let (command, flags) = halves.next().and_then(<[String]>::split_first).ok_or(USAGE)?;
    if command != "run" {
        return Err(USAGE.into());
    }
    let flags: BTreeMap<&str, &str> = flags.chunks(2).filter_map(|pair| Some((&*pair[0], &**pair.get(1)?))).collect();
    let flag = |name: &str| flags.get(name).copied().ok_or_else(|| format!("{name} is missing"));
    let path = |name: &str| flag(name).map(PathBuf::from);
    let mut workload = Workload::new(Path::new(flag("--pictures")?))?;
    let scratch = tempfile::tempdir()?;
    let inputs = Inputs {
        chiasm: path("--chiasm")?,
        replay: path("--replay")?,
        vllm: path("--vllm")?,
        python: path("--python")?,
        vllm_rs: path("--vllm-rs")?,
        version: flag("--version")?.to_owned(),
        plugin: path("--plugin")?,
        model: path("--model")?,
        engine_flags: halves.next().unwrap_or_default().to_vec(),
        logs: flags.get("--logs").map_or_else(|| scratch.path().into(), PathBuf::from),
        state: scratch.path().join("state"),
    };
    let rounds = flag("--rounds")?.parse()?;
    // One after the other: each takes all cores to import what it needs.
    let replay = Replay::start(&inputs).await?;
    let mut sides = Vec::new();
    for start in [side::chiasm, side::vllm_serve, side::vllm_rs] {
        let mut side: Side = start(&inputs)?;
        side.wait().await?;
        sides.push(side);
    }
    for measurement in measure::measure(flag("--case")?, &mut sides, replay, &mut workload, rounds).await? {
        println!("{}", serde_json::to_string(&measurement)?);
    }
    Ok(())
}

/// Returns when this process is to end.
async fn ended_by_signal() -> Result<(), Box<dyn Error>> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        pressed = tokio::signal::ctrl_c() => pressed?,
    }
    Err("ended by a signal".into())
}
