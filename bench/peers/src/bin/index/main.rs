//! Chiasm's prefix index and those of `dynamo-kv-router` with the same traces, in turns: the
//! measuring half of `cargo xtask bench-peers index`. Its commands and flags are in
//! `bench/peers/README.md`; `index run` prints [`Row`]s.
//!
//! | file | contents |
//! |---|---|
//! | `workload`, `cache` | requests, and the caches of simulated workers |
//! | `trace` | the events and prompts of a workload, and their file |
//! | `subject` | the interface of all sides |
//! | `ours`, `radix_tree`, `compressed_tree`, `positional` | the sides |
//! | `dynamo` | Dynamo's events and hashes |
//! | `frame` | events as engines publish them |
//! | `speed`, `memory` | the measurements |
//! | `clock` | time without the wait for a core |
//! | `rows` | rows made from the measurements of a fleet |

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
mod rows;
mod speed;
mod subject;
mod trace;
mod workload;

use std::error::Error;
use std::process::{Command, ExitCode, Stdio};

use peers::flags::Flags;
use peers::row::{OURS, Row};
use peers::{USAGE, exit_code};

use crate::compressed_tree::Compressed;
use crate::frame::Variant;
use crate::ours::Ours;
use crate::positional::Positional;
use crate::radix_tree::Single;
use crate::subject::{Ready, Subject};
use crate::trace::Trace;
use crate::workload::Fleet;

/// Fleets with few, some and many workers, and as many blocks as fit into memory.
const FLEETS: [Fleet; 3] = [
    Fleet { workers: 8, blocks: 100_000 },
    Fleet { workers: 64, blocks: 30_000 },
    Fleet { workers: 1_000, blocks: 4_000 },
];
/// The seed of the traces. The number has no meaning.
const SEED: u64 = 20_261_121;
const SIDES: [&str; 4] = [OURS, "RadixTree", "ConcurrentRadixTreeCompressed", "PositionalIndexer"];

/// A measured value: the name of a side, the metric and the number.
type Value = (&'static str, &'static str, f64);

fn side(name: &str, workers: u32) -> Result<Box<dyn Subject>, Box<dyn Error>> {
    Ok(match name {
        OURS => Box::new(Ready::new(Ours::new(workers, Variant::Plain))),
        "RadixTree" => Box::new(Single::default()),
        "ConcurrentRadixTreeCompressed" => Box::new(Ready::new(Compressed::new())),
        "PositionalIndexer" => Box::new(Ready::new(Positional::new())),
        _ => return Err("no such side".into()),
    })
}

/// Returns all sides with their names.
fn all_sides(workers: u32) -> Result<Vec<(&'static str, Box<dyn Subject>)>, Box<dyn Error>> {
    SIDES.into_iter().map(|name| Ok::<_, Box<dyn Error>>((name, side(name, workers)?))).collect()
}

fn main() -> ExitCode {
    exit_code(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let (command, flags) = Flags::parse_arguments()?;
    let rounds = || flags.parse("--rounds");
    let read = || Trace::read(&flags.path("--trace")?).map_err(Box::<dyn Error>::from);
    let values = match &*command {
        "run" => return run_all(rounds()?),
        "trace" => {
            let workers = flags.parse("--workers")?;
            let fleet = Fleet { workers, blocks: flags.parse("--blocks")? };
            let trace = workload::make(&fleet, speed::blocks(rounds()?), SEED);
            return Ok(trace.write(&flags.path("--trace")?)?);
        }
        "speed" => {
            let trace = read()?;
            speed::measure(&trace, &mut all_sides(trace.workers)?, rounds()?)?
        }
        "variants" => speed::measure_variants(&read()?, rounds()?)?,
        "scaling" => speed::measure_scaling(&read()?, rounds()?)?,
        "memory" => {
            let trace = read()?;
            let name = SIDES.into_iter().find(|name| flags.find("--side") == Some(*name));
            let name = name.ok_or("no such side")?;
            memory::measure(&trace, name, side(name, trace.workers)?)?
        }
        _ => return Err(USAGE.into()),
    };
    println!("{}", serde_json::to_string(&values)?);
    Ok(())
}

/// Runs this program for each part of each fleet, and prints the rows.
fn run_all(rounds: usize) -> Result<(), Box<dyn Error>> {
    Row::for_run("rounds", rounds, OURS).print()?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("trace");
    let rounds = rounds.to_string();
    let run = |arguments: &[&str]| -> Result<Vec<u8>, Box<dyn Error>> {
        let mut part = Command::new(std::env::current_exe()?);
        part.args(arguments).arg("--trace").arg(&file).stderr(Stdio::inherit());
        let output = part.output()?;
        if !output.status.success() {
            return Err(format!("index {} failed: {}", arguments.join(" "), output.status).into());
        }
        Ok(output.stdout)
    };
    for Fleet { workers, blocks } in FLEETS {
        eprintln!("{workers} workers");
        let [workers, blocks] = [workers.to_string(), blocks.to_string()];
        run(&["trace", "--workers", &workers, "--blocks", &blocks, "--rounds", &rounds])?;
        let mut parts: Vec<Vec<&str>> =
            ["speed", "variants", "scaling"].map(|part| vec![part, "--rounds", &rounds]).into();
        parts.extend(SIDES.map(|side| vec!["memory", "--side", side]));
        let mut values = rows::Values::default();
        for part in parts {
            values.0.extend(serde_json::from_slice::<rows::Values>(&run(&part)?)?.0);
        }
        values.rows(&format!("{workers} workers")).iter().try_for_each(Row::print)?;
    }
    Ok(())
}
