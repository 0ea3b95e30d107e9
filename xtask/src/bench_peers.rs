//! Chiasm against its peers in one run: `cargo xtask bench-peers BENCH`.
//!
//! Each bench makes what it needs, measures, and leaves rows and a note made of them in `docs/benchmarks`.
//!
//! | file | is |
//! |---|---|
//! | `row` | the form of every result, and that none is missing |
//! | `committed` | tests of what lies in `docs/benchmarks` |
//! | `pixels`, `pixels_note` | the bench of image preprocessing: its targets, its note |
//! | `handoff`, `handoff_note` | the bench of the way into the engine: its targets, its note |
//! | `index`, `index_note` | the bench of the prefix index: its targets, its note |
//! | `door`, `door_note` | the bench of the frontend: its targets, its note |
//! | `stream`, `stream_note` | the bench of streamed answers: its targets, its note |
//! | `door_run` | a run of either: which sides, in which order what |
//! | `door_peers`, `door_inputs` | the frontends that it is measured against; its model and pictures |
//! | `processor`, `processor_note` | the bench of vLLM's processor: its targets, its note |
//! | `processor_run` | a run of it |
//! | `serve`, `serve_note` | the bench of the whole with real engines: its targets, its note |
//! | `serve_run` | a run of it |
//! | `machines`, `machines_note` | the bench of an agent between frontend and engine: its targets, its note |
//! | `machines_run` | a run of it |
//! | `roles`, `roles_note` | the bench of engines that prefill and engines that decode: its targets, its note |
//! | `roles_run` | a run of it |
//! | `upstream`, `upstream_note` | the bench of routers before servers that run already: its targets, its note |
//! | `upstream_run`, `router_peers` | a run of it; the routers that it is measured against |
//! | `page` | what several notes are written with |
//! | `peers` | the programs that measure pixels, index, door and serve, which have a workspace of their own |
//! | `load` | what else the machine does |
//! | `built` | what cargo builds of this workspace, and where |
//! | `turbojpeg` | a library that two of the peers decode with |

mod built;
#[cfg(test)]
mod committed;
mod door;
mod door_inputs;
mod door_note;
pub(crate) mod door_peers;
mod door_run;
mod handoff;
mod handoff_note;
mod index;
mod index_note;
mod load;
mod machines;
mod machines_note;
mod machines_run;
mod page;
mod peers;
mod pixels;
mod pixels_note;
mod processor;
mod processor_note;
mod processor_run;
mod roles;
mod roles_note;
mod roles_run;
mod router_peers;
mod row;
mod serve;
mod serve_note;
mod serve_run;
mod stream;
mod stream_note;
mod turbojpeg;
mod upstream;
mod upstream_note;
mod upstream_run;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::bench_peers::load::Load;
use crate::bench_peers::peers::Pixels;
use crate::bench_peers::row::{Mandatory, Row};
use crate::child;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::vllm_env::{self, Setup, VllmEnv};

pub(crate) use door_run::Sides as DoorSides;
pub(crate) use machines_run::SHORT as SHORT_MACHINES;
pub(crate) use processor_run::SHORT as SHORT_PROCESSOR;
pub(crate) use roles_run::SHORT as SHORT_ROLES;
pub(crate) use serve_run::SHORT as SHORT_SERVE;
pub(crate) use upstream_run::SHORT as SHORT_UPSTREAM;

const RESULTS: &str = "docs/benchmarks";
const MANIFEST: &str = "Cargo.toml";
const MODELS: &str = "bench/peers/models";
const TRANSFORMERS_PEER: &str = "bench/peers/transformers_peer.py";
const MAKE_PICTURES: &str = "bench/peers/make_pictures.py";
const HANDOFF_SCRIPTS: &str = "bench/handoff";
const PLUGIN: &str = "python/chiasm_vllm";
const PLUGIN_PACKAGE: &str = "python/chiasm_vllm/chiasm_vllm/__init__.py";

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bench {
    /// Image preprocessing: ours, `llm-multimodal` and `transformers` on the same files.
    Pixels,
    /// The way of a tensor into the engine: shared memory, messages, segments as Dynamo makes them.
    Handoff,
    /// The prefix index and those of `dynamo-kv-router` on the same traces.
    Index,
    /// `chiasm serve`, vLLM's Rust frontend and Dynamo's under the same load.
    Door,
    /// The same frontends and long streams.
    Stream,
    /// vLLM's own processor: in processes beside `chiasm serve`, in `vllm launch render`, and in one process as Dynamo has it.
    Processor,
    /// `chiasm serve`, `vllm serve` and vLLM's Rust frontend before real engines, and what these alone can do.
    Serve,
    /// `chiasm serve` before an agent, before an engine of its own, and Dynamo's frontend.
    Machines,
    /// `chiasm serve` and Dynamo's frontend before engines with roles.
    Roles,
    /// `chiasm serve`, SMG, Envoy and nginx before the same servers, and Dynamo's frontend.
    Upstream,
}

impl Bench {
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            pixels::BENCH => Some(Self::Pixels),
            handoff::BENCH => Some(Self::Handoff),
            index::BENCH => Some(Self::Index),
            door::BENCH => Some(Self::Door),
            stream::BENCH => Some(Self::Stream),
            processor::BENCH => Some(Self::Processor),
            serve::BENCH => Some(Self::Serve),
            machines::BENCH => Some(Self::Machines),
            roles::BENCH => Some(Self::Roles),
            upstream::BENCH => Some(Self::Upstream),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Pixels => pixels::BENCH,
            Self::Handoff => handoff::BENCH,
            Self::Index => index::BENCH,
            Self::Door => door::BENCH,
            Self::Stream => stream::BENCH,
            Self::Processor => processor::BENCH,
            Self::Serve => serve::BENCH,
            Self::Machines => machines::BENCH,
            Self::Roles => roles::BENCH,
            Self::Upstream => upstream::BENCH,
        }
    }

    /// What it must not end without.
    const fn mandatory(self) -> &'static [Mandatory] {
        match self {
            Self::Pixels => &pixels::MANDATORY,
            Self::Handoff => &handoff::MANDATORY,
            Self::Index => &index::MANDATORY,
            Self::Door => &door::MANDATORY,
            Self::Stream => &stream::MANDATORY,
            Self::Processor => &processor::MANDATORY,
            Self::Serve => &serve::MANDATORY,
            Self::Machines => &machines::MANDATORY,
            Self::Roles => &roles::MANDATORY,
            Self::Upstream => &upstream::MANDATORY,
        }
    }

    /// Fewer say nothing on a machine that others use too. Times of several processes scatter more than CPU time of one.
    pub(crate) fn fewest_rounds(self) -> u32 {
        match self {
            Self::Pixels | Self::Index => 15,
            Self::Handoff => 21,
            // A round takes a minute.
            Self::Door | Self::Machines | Self::Roles | Self::Upstream => 7,
            // Two and a half, of which most is waiting for the engines' steps.
            Self::Stream => 5,
            Self::Processor => 9,
            // Half a minute, and before the first minutes for vLLM to start.
            Self::Serve => 5,
        }
    }
}

/// Runs one bench and writes its rows and its note. With `json`, prints the rows. `sides` are those of the door and of streams.
pub(crate) fn run(setup: &Setup, bench: Bench, rounds: u32, json: bool, sides: &DoorSides) -> Result<(), Error> {
    match bench {
        Bench::Pixels => pixels(setup, rounds, json),
        Bench::Handoff => handoff(setup, rounds, json),
        Bench::Index => index(setup, rounds, json),
        Bench::Door | Bench::Stream => door_run::run(setup, bench, rounds, json, sides),
        Bench::Processor => processor_run::run(setup, rounds, json),
        Bench::Serve => serve_run::run(setup, rounds, json),
        Bench::Machines => machines_run::run(setup, rounds, json),
        Bench::Roles => roles_run::run(setup, rounds, json),
        Bench::Upstream => upstream_run::run(setup, rounds, json),
    }
}

fn pixels(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let root = &setup.workspace.root;
    let script = setup.workspace.file(TRANSFORMERS_PEER)?;
    let env = vllm_env::ensure(setup)?;
    let pictures = pictures(setup, &env)?;
    let mut measure = Pixels::build(setup)?.command();
    measure.arg("run");
    for (flag, value) in [
        ("--models", root.join(MODELS)),
        ("--pictures", pictures),
        ("--python", env.python()),
        ("--script", script),
        ("--rounds", rounds.to_string().into()),
    ] {
        measure.arg(flag).arg(value);
    }
    let measurements = pixels::parse(&peers::lines(&mut measure, "pixels run")?)?;
    let rows = pixels::rows(&measurements, rounds);
    let written = write(setup, Bench::Pixels, &rows, &pixels_note::write(&rows), json)?;
    for refusal in pixels::refusals(&measurements) {
        setup.output.say(&format!("!!! not supported yet: {refusal}"))?;
    }
    for row in rows.iter().filter(|row| row.equal == Some(false) && row.metric == pixels::DIFFERS) {
        let share = row.peer.unwrap_or_default();
        setup.output.say(&format!("!!! other bits: {}, {}: {share} % of the values", row.case, row.peer_name))?;
    }
    setup.output.say(&written)
}

fn handoff(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let root = &setup.workspace.root;
    setup.workspace.file(PLUGIN_PACKAGE)?;
    let env = vllm_env::ensure(setup)?;
    let program = built::example(setup, "chiasm-engine", "handoff")?;
    let mut measure = Command::new(program);
    measure.envs(vllm_env::ENGINE_VARIABLES).stdin(Stdio::null());
    for (flag, value) in [
        ("--python", env.python()),
        ("--scripts", root.join(HANDOFF_SCRIPTS)),
        ("--plugin", root.join(PLUGIN)),
        ("--rounds", rounds.to_string().into()),
    ] {
        measure.arg(flag).arg(value);
    }
    setup.output.say("starting an engine's input side, which imports vLLM, then measuring")?;
    let load = Load::now();
    let rows = handoff::rows(&handoff::parse(&peers::lines(&mut measure, "the example handoff")?)?, load);
    let written = write(setup, Bench::Handoff, &rows, &handoff_note::write(&rows), json)?;
    for row in rows.iter().filter(|row| row.equal == Some(false)) {
        setup.output.say(&format!("!!! other bytes arrived: {}, {}, {}", row.case, row.metric, row.peer_name))?;
    }
    setup.output.say(&written)
}

fn index(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let mut measure = Command::new(peers::build(setup, index::BENCH)?);
    measure.args(["run", "--rounds", &rounds.to_string()]).stdin(Stdio::null());
    let load = Load::now();
    let measurements = index::parse(&peers::lines(&mut measure, "index run")?)?;
    let rows = index::rows(&measurements, rounds, load);
    let written = write(setup, Bench::Index, &rows, &index_note::write(&rows), json)?;
    for row in rows.iter().filter(|row| row.equal == Some(false) && row.metric == index::DIFFERENT) {
        let different = row.peer.unwrap_or_default();
        setup.output.say(&format!("!!! other overlaps: {}, {}: {different} prompts", row.case, row.peer_name))?;
    }
    setup.output.say(&written)
}

/// Writes what came out, if no mandatory row is missing; says where, and how many targets were reached.
fn write(setup: &Setup, bench: Bench, rows: &[Row], note: &str, json: bool) -> Result<String, Error> {
    if json {
        for line in row::lines(rows)? {
            println!("{line}");
        }
    }
    row::complete(bench.name(), rows, bench.mandatory())?;
    let bench = bench.name();
    let results = setup.workspace.root.join(RESULTS);
    fs::create_dir_all(&results).map_err(Error::io("create", &results))?;
    row::write(&results.join(format!("{bench}.json")), rows)?;
    let path = results.join(format!("{bench}.md"));
    fs::write(&path, note).map_err(Error::io("write", &path))?;
    let (reached, all) = (rows.iter().filter(|row| row.ok == Some(true)), rows.iter().filter(|row| row.ok.is_some()));
    Ok(format!("{} of {} targets reached, see {}", reached.count(), all.count(), path.display()))
}

/// Makes the pictures, or finds them made.
fn pictures(setup: &Setup, env: &VllmEnv) -> Result<PathBuf, Error> {
    let script = setup.workspace.file(MAKE_PICTURES)?;
    // Pillow's version decides on the bytes as much as the script does.
    let mut inputs = vllm_env::inputs(&setup.workspace)?;
    inputs.push(fs::read(&script).map_err(Error::io("read", &script))?);
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "pictures", &inputs);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| true,
        |path, held| {
            setup.output.say(&format!("making {}", path.display()))?;
            let mut python = env.python_command();
            python.arg("-B").arg(&script).arg(path).stdin(held.as_input()?);
            child::run(&mut python, MAKE_PICTURES, &setup.output, &setup.cancel)
        },
    )?;
    Ok(dir.path().to_owned())
}
