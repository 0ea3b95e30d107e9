//! Benchmarks of Chiasm against its peers: `cargo xtask bench-peers BENCH`.
//!
//! Each benchmark prepares its inputs, measures all sides in one run, and writes rows and a page
//! made from them to `docs/benchmarks`.
//!
//! | file | is |
//! |---|---|
//! | `measured` | the results that measuring programs print |
//! | `row` | the rows made from results, and the check for missing rows |
//! | `page`, `templates` | pages made from templates and rows |
//! | `committed` | tests of the files in `docs/benchmarks` |
//! | `pixels`, `pixels_note` | image preprocessing: targets and page |
//! | `handoff`, `handoff_note` | the transfer of tensors into the engine |
//! | `index`, `index_note` | the prefix index |
//! | `door`, `door_note` | the frontend |
//! | `stream`, `stream_note` | streamed answers |
//! | `machines`, `machines_note` | an agent between frontend and engine |
//! | `roles`, `roles_note` | engines that prefill and engines that decode |
//! | `upstream`, `upstream_note` | routers in front of servers that run already |
//! | `door_run` | a run of any of these five |
//! | `door_peers`, `router_peers` | the frontends and routers that they measure against |
//! | `door_inputs` | their model and pictures |
//! | `processor`, `processor_note`, `processor_run` | vLLM's processor |
//! | `serve`, `serve_note`, `serve_run` | frontend and real engines together |
//! | `peers` | the measuring programs, in a workspace of their own |
//! | `load` | the load of the machine before a run |
//! | `built` | programs that cargo builds in this workspace |
//! | `turbojpeg` | a library with which two of the peers decode |

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
mod measured;
mod page;
mod peers;
mod pixels;
mod pixels_note;
mod processor;
mod processor_note;
mod processor_run;
mod roles;
mod roles_note;
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

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::bench_peers::load::Load;
use crate::bench_peers::peers::Pixels;
use crate::bench_peers::row::{Mandatory, Row};
use crate::child;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;
use crate::vllm_env::{self, VllmEnv};

pub(crate) use door_run::Sides as DoorSides;

/// The number of rounds of a short run, which only tests that the benchmark works.
pub(crate) const SHORT_ROUNDS: u32 = 1;
const RESULTS: &str = "docs/benchmarks";
const MANIFEST: &str = "Cargo.toml";
const MODELS: &str = "bench/peers/models";
const TRANSFORMERS_PEER: &str = "bench/peers/transformers_peer.py";
const MAKE_PICTURES: &str = "bench/peers/make_pictures.py";
const HANDOFF_SCRIPTS: &str = "bench/handoff";
const PLUGIN: &str = "python/chiasm_vllm";
const PLUGIN_PACKAGE: &str = "python/chiasm_vllm/chiasm_vllm/__init__.py";

/// A benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bench {
    /// Image preprocessing of Chiasm, `llm-multimodal` and `transformers` on the same files.
    Pixels,
    /// The transfer of a tensor into the engine by shared memory, messages, and segments as in
    /// Dynamo.
    Handoff,
    /// The prefix indices of Chiasm and of `dynamo-kv-router` on the same traces.
    Index,
    /// `chiasm serve`, vLLM's Rust frontend and Dynamo's frontend under the same load.
    Door,
    /// The same frontends with long streams.
    Stream,
    /// vLLM's processor in processes beside `chiasm serve`, in `vllm launch render`, and in one
    /// process as in Dynamo.
    Processor,
    /// `chiasm serve`, `vllm serve` and vLLM's Rust frontend in front of real engines, and the
    /// engines without a frontend.
    Serve,
    /// `chiasm serve` in front of an agent and in front of its own engine, and Dynamo's frontend.
    Machines,
    /// `chiasm serve` and Dynamo's frontend in front of engines with roles.
    Roles,
    /// `chiasm serve`, SMG, Envoy and nginx in front of the same servers, and Dynamo's frontend.
    Upstream,
}

impl Bench {
    const ALL: [Self; 10] = [
        Self::Pixels,
        Self::Handoff,
        Self::Index,
        Self::Door,
        Self::Stream,
        Self::Processor,
        Self::Serve,
        Self::Machines,
        Self::Roles,
        Self::Upstream,
    ];

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|bench| bench.name() == name)
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

    /// Returns the comparisons that a run must contain.
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

    /// Returns the page made from rows.
    fn page(self, rows: &[Row]) -> Result<String, Error> {
        match self {
            Self::Pixels => pixels_note::write(rows),
            Self::Handoff => handoff_note::write(rows),
            Self::Index => index_note::write(rows),
            Self::Door => door_note::write(rows),
            Self::Stream => stream_note::write(rows),
            Self::Processor => processor_note::write(rows),
            Self::Serve => serve_note::write(rows),
            Self::Machines => machines_note::write(rows),
            Self::Roles => roles_note::write(rows),
            Self::Upstream => upstream_note::write(rows),
        }
    }

    /// Returns `true` if the benchmark has a run of [`SHORT_ROUNDS`], whose page is only printed.
    pub(crate) fn has_short_run(self) -> bool {
        matches!(
            self,
            Self::Processor | Self::Serve | Self::Machines | Self::Roles | Self::Upstream
        )
    }

    /// Returns the minimum number of rounds for a meaningful result on a shared machine. Wall-clock
    /// times of several processes vary more than the CPU time of one process.
    pub(crate) fn min_rounds(self) -> u32 {
        match self {
            Self::Pixels | Self::Index => 15,
            Self::Handoff => 21,
            // A round takes a minute.
            Self::Door | Self::Machines | Self::Roles | Self::Upstream => 7,
            // A round takes 2.5 minutes, mostly waiting for the steps of engines.
            Self::Stream => 5,
            Self::Processor => 9,
            // A round takes half a minute, after some minutes in which vLLM starts.
            Self::Serve => 5,
        }
    }
}

/// Runs a benchmark and writes its rows and its page. With `json`, prints the rows. `sides` are the
/// sides of `Door` and `Stream`.
pub(crate) fn run(
    setup: &Setup,
    bench: Bench,
    rounds: u32,
    json: bool,
    sides: &DoorSides,
) -> Result<(), Error> {
    match bench {
        Bench::Pixels => pixels(setup, rounds, json),
        Bench::Handoff => handoff(setup, rounds, json),
        Bench::Index => index(setup, rounds, json),
        Bench::Door | Bench::Stream => door_run::run(setup, bench, rounds, json, sides),
        Bench::Machines | Bench::Roles | Bench::Upstream => {
            door_run::run_fleets(setup, bench, rounds, json)
        }
        Bench::Processor => processor_run::run(setup, rounds, json),
        Bench::Serve => serve_run::run(setup, rounds, json),
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
    let measurements = peers::results(&mut measure, "pixels run")?;
    let rows = pixels::rows(&measurements, rounds);
    let written = write(setup, Bench::Pixels, &rows, json)?;
    for refusal in pixels::refusals(&measurements) {
        setup.output.print_line(&format!("!!! not supported yet: {refusal}"))?;
    }
    for row in rows.iter().filter(|row| row.equal == Some(false) && row.metric == pixels::DIFFERS) {
        let share = row.peer.unwrap_or_default();
        setup.output.print_line(&format!(
            "!!! other bits: {}, {}: {share} % of the values",
            row.case, row.peer_name
        ))?;
    }
    setup.output.print_line(&written)
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
    setup
        .output
        .print_line("starting an engine's input side, which imports vLLM, then measuring")?;
    let load = Load::now();
    let rows =
        handoff::rows(&handoff::parse(&peers::lines(&mut measure, "the example handoff")?)?, load);
    let written = write(setup, Bench::Handoff, &rows, json)?;
    for row in rows.iter().filter(|row| row.equal == Some(false)) {
        setup.output.print_line(&format!(
            "!!! other bytes arrived: {}, {}, {}",
            row.case, row.metric, row.peer_name
        ))?;
    }
    setup.output.print_line(&written)
}

fn index(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let mut measure = Command::new(peers::build(setup, index::BENCH)?);
    measure.args(["run", "--rounds", &rounds.to_string()]).stdin(Stdio::null());
    let load = Load::now();
    let measurements = peers::results(&mut measure, "index run")?;
    let rows = index::rows(&measurements, rounds, load);
    let written = write(setup, Bench::Index, &rows, json)?;
    for row in rows.iter().filter(|row| row.equal == Some(false) && row.metric == index::DIFFERENT)
    {
        let different = row.peer.unwrap_or_default();
        setup.output.print_line(&format!(
            "!!! other overlaps: {}, {}: {different} prompts",
            row.case, row.peer_name
        ))?;
    }
    setup.output.print_line(&written)
}

/// Prints the page of a short run, or writes the results.
fn finish(setup: &Setup, bench: Bench, rows: &[Row], rounds: u32, json: bool) -> Result<(), Error> {
    let text =
        if rounds == SHORT_ROUNDS { bench.page(rows)? } else { write(setup, bench, rows, json)? };
    setup.output.print_line(&text)
}

/// Writes the results if no mandatory row is missing. Returns a line with the page's path and the
/// number of reached targets.
fn write(setup: &Setup, bench: Bench, rows: &[Row], json: bool) -> Result<String, Error> {
    if json {
        for line in row::lines(rows)? {
            println!("{line}");
        }
    }
    row::check_complete(bench.name(), rows, bench.mandatory())?;
    let name = bench.name();
    let page = bench.page(rows)?;
    let results = setup.workspace.root.join(RESULTS);
    fs::create_dir_all(&results).map_err(Error::io("create", &results))?;
    row::write(&results.join(format!("{name}.json")), rows)?;
    let path = results.join(format!("{name}.md"));
    fs::write(&path, page).map_err(Error::io("write", &path))?;
    let reached = rows.iter().filter(|row| row.ok == Some(true)).count();
    let all = rows.iter().filter(|row| row.ok.is_some()).count();
    Ok(format!("{reached} of {all} targets reached, see {}", path.display()))
}

/// Makes the pictures unless they exist.
fn pictures(setup: &Setup, env: &VllmEnv) -> Result<PathBuf, Error> {
    let script = setup.workspace.file(MAKE_PICTURES)?;
    // The bytes depend on the version of Pillow as well as on the script.
    let mut inputs = vllm_env::inputs(&setup.workspace)?;
    inputs.push(fs::read(&script).map_err(Error::io("read", &script))?);
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "pictures", &inputs);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| true,
        |path, lock| {
            setup.output.print_line(&format!("making {}", path.display()))?;
            let mut python = env.python_command();
            python.arg("-B").arg(&script).arg(path).stdin(lock.as_stdin()?);
            child::run(&mut python, MAKE_PICTURES, &setup.output, &setup.cancel)
        },
    )?;
    Ok(dir.path().to_owned())
}
