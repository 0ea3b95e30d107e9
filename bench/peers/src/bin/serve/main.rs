//! Frontends before real engines under the same load, in turns: the measuring half of
//! `cargo xtask bench-peers serve`. Its flags are in `bench/peers/README.md`; it prints
//! [`Measurement`](measure::Measurement)s.
//!
//! `chiasm serve`, `vllm serve` and `vllm-rs` have engines of their own, and there are engines
//! whose requests were recorded before. All that is started ends with this program.
//!
//! | file | is |
//! |---|---|
//! | `workload` | the requests |
//! | `client` | a connection, many at once |
//! | `group` | another program with all that it starts: its start, its CPU time, its end |
//! | `side` | the frontends |
//! | `replay` | the engines alone |
//! | `measure` | in which order who is asked, and what comes of it |

#![forbid(unsafe_code)]

mod client;
mod group;
mod measure;
mod replay;
mod side;
mod workload;

use std::error::Error;
use std::process::ExitCode;

use peers::arguments::Flags;
use peers::ending;

use crate::replay::Replay;
use crate::side::{Inputs, Side};
use crate::workload::Workload;

const USAGE: &str = "usage: see bench/peers/README.md";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // The programs are in groups of their own, which the terminal's signal does not reach. They end
    // when this is dropped.
    ending::run(run(&arguments))
}

async fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let mut halves = arguments.splitn(2, |argument| argument == "--");
    let (command, flags) = halves.next().and_then(<[String]>::split_first).ok_or(USAGE)?;
    if command != "run" {
        return Err(USAGE.into());
    }
    let flags = Flags::new(flags);
    let mut workload = Workload::new(&flags.path("--pictures")?)?;
    let scratch = tempfile::tempdir()?;
    let inputs = Inputs {
        chiasm: flags.path("--chiasm")?,
        replay: flags.path("--replay")?,
        vllm: flags.path("--vllm")?,
        python: flags.path("--python")?,
        vllm_rs: flags.path("--vllm-rs")?,
        version: flags.get("--version")?.to_owned(),
        plugin: flags.path("--plugin")?,
        model: flags.path("--model")?,
        engine_flags: halves.next().unwrap_or_default().to_vec(),
        logs: scratch.path().into(),
        state: scratch.path().join("state"),
    };
    let rounds = flags.parse("--rounds")?;
    // One after the other: each takes all cores to import what it needs.
    let replay = Replay::start(&inputs).await?;
    let mut sides = Vec::new();
    for start in [side::chiasm, side::vllm_serve, side::vllm_rs] {
        let mut side: Side = start(&inputs)?;
        side.wait().await?;
        sides.push(side);
    }
    for measurement in measure::measure(flags.get("--case")?, &mut sides, replay, &mut workload, rounds).await? {
        println!("{}", serde_json::to_string(&measurement)?);
    }
    Ok(())
}
