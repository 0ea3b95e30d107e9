//! Chiasm's prefix index and those of `dynamo-kv-router` on the same traces, in turns: the
//! measuring half of `cargo xtask bench-peers index`. Its commands and flags are in
//! `bench/peers/README.md`; it prints [`Measurement`]s.
//!
//! | file | is |
//! |---|---|
//! | `workload`, `cache` | who asks what, and what the workers' caches do |
//! | `trace` | that as events, prompts and tokens, and its file |
//! | `subject` | what all sides have in common |
//! | `ours`, `radix_tree`, `compressed_tree`, `positional` | the sides |
//! | `dynamo` | events and hashes as Dynamo has them |
//! | `frame` | events as an engine publishes them |
//! | `speed`, `memory` | what is measured |
//! | `clock` | CPU time and the clock on the wall |

#![forbid(unsafe_code)]

mod cache;
mod clock;
mod compressed_tree;
mod dynamo;
mod frame;
mod memory;
mod ours;
mod positional;
mod radix_tree;
mod speed;
mod subject;
mod trace;
mod workload;

use std::error::Error;
use std::process::{Command, ExitCode};

use peers::arguments::Flags;
use peers::ending;
use serde::Serialize;

use crate::compressed_tree::Compressed;
use crate::frame::Telling;
use crate::ours::Ours;
use crate::positional::Positional;
use crate::radix_tree::Single;
use crate::subject::{Ready, Subject};
use crate::trace::Trace;
use crate::workload::Fleet;

/// One side's result for one fleet.
#[derive(Serialize)]
struct Measurement {
    /// The size of the fleet, such as `64 workers`.
    case: String,
    /// `chiasm`, or the type's name and the crate's name and version.
    side: String,
    /// See `speed` and `memory`.
    metric: &'static str,
    value: f64,
}

const USAGE: &str = "usage: see bench/peers/README.md";

/// Few, some and many workers, and as many blocks as fit.
const FLEETS: [Fleet; 3] = [
    Fleet { workers: 8, blocks: 100_000 },
    Fleet { workers: 64, blocks: 30_000 },
    Fleet { workers: 1_000, blocks: 4_000 },
];

/// Any.
const SEED: u64 = 20_261_121;

const SIDES: [&str; 4] = ["chiasm", "RadixTree", "ConcurrentRadixTreeCompressed", "PositionalIndexer"];

fn side(name: &str, workers: u32) -> Option<Box<dyn Subject>> {
    Some(match name {
        "chiasm" => Box::new(Ready::new(Ours::new(workers, Telling::Plain))),
        "RadixTree" => Box::new(Single::default()),
        "ConcurrentRadixTreeCompressed" => Box::new(Ready::new(Compressed::new())),
        "PositionalIndexer" => Box::new(Ready::new(Positional::new())),
        _ => return None,
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    ending::exit(run(&arguments))
}

fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let (command, flags) = arguments.split_first().ok_or(USAGE)?;
    let flags = Flags::new(flags);
    let read = || -> Result<Trace, Box<dyn Error>> { Ok(Trace::read(&flags.path("--trace")?)?) };
    match command.as_str() {
        "run" => all(flags.get("--rounds")?),
        "trace" => {
            let fleet = Fleet { workers: flags.parse("--workers")?, blocks: flags.parse("--blocks")? };
            let trace = workload::make(&fleet, speed::blocks(flags.parse("--rounds")?), SEED);
            Ok(trace.write(&flags.path("--trace")?)?)
        }
        "speed" => {
            let trace = read()?;
            let mut sides = Vec::new();
            for name in SIDES {
                sides.push((name, side(name, trace.workers).ok_or("no such side")?));
            }
            print(&trace, speed::measure(&trace, &mut sides, flags.parse("--rounds")?)?)
        }
        "tellings" => {
            let trace = read()?;
            print(&trace, speed::measure_tellings(&trace, flags.parse("--rounds")?)?)
        }
        "scaling" => {
            let trace = read()?;
            print(&trace, speed::measure_scaling(&trace, flags.parse("--rounds")?)?)
        }
        "memory" => {
            let trace = read()?;
            let name = flags.get("--side")?;
            let side = side(name, trace.workers).ok_or("no such side")?;
            print(&trace, memory::measure(&trace, name, side)?)
        }
        _ => Err(USAGE.into()),
    }
}

/// Starts this program again for each part of each fleet.
fn all(rounds: &str) -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("trace");
    let again = |arguments: &[&str]| -> Result<(), Box<dyn Error>> {
        let status = Command::new(std::env::current_exe()?).args(arguments).arg("--trace").arg(&file).status()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("index {} failed with {status}", arguments.join(" ")).into())
        }
    };
    for fleet in FLEETS {
        eprintln!("{} workers", fleet.workers);
        let [workers, blocks] = [fleet.workers.to_string(), fleet.blocks.to_string()];
        again(&["trace", "--workers", &workers, "--blocks", &blocks, "--rounds", rounds])?;
        again(&["speed", "--rounds", rounds])?;
        again(&["tellings", "--rounds", rounds])?;
        again(&["scaling", "--rounds", rounds])?;
        for side in SIDES {
            again(&["memory", "--side", side])?;
        }
    }
    Ok(())
}

/// A side's name, what was measured, and the number.
type Value = (&'static str, &'static str, f64);

fn print(trace: &Trace, values: Vec<Value>) -> Result<(), Box<dyn Error>> {
    for (side, metric, value) in values {
        let side = if side == SIDES[0] { side.to_owned() } else { format!("{side} ({})", dynamo::CRATE) };
        let measurement = Measurement { case: format!("{} workers", trace.workers), side, metric, value };
        println!("{}", serde_json::to_string(&measurement)?);
    }
    Ok(())
}
