//! Frontends under the same load, in turns: the measuring half of `cargo xtask bench-peers` for
//! `door`, `stream`, `machines`, `roles`, `upstream`, `serve` and `video`. Its commands and flags
//! are in `bench/peers/README.md`; it prints [`Row`]s.
//!
//! | file | contents |
//! |---|---|
//! | `workload` | the cases, and the requests of each |
//! | `words`, `picture` | texts and JPEG files that are all different |
//! | `origin` | the server from which images are fetched |
//! | `client`, `pieces`, `load` | connections, request bodies, concurrent clients |
//! | `beside` | texts beside a burst of images |
//! | `program`, `memory` | other programs: start, CPU time, end; peak memory |
//! | `side`, `splits` | sides, and a check that requests are split between engines |
//! | `ours`, `vllm_rs`, `vllm_serve`, `dynamo` | the frontends |
//! | `footprint` | the start of frontends, and their memory |
//! | `relay` | a frontend that only relays |
//! | `measure` | rounds and their results |
//! | `machines` | an agent between frontend and engine |
//! | `roles` | engines that prefill and engines that decode |
//! | `routers` | routers in front of servers of models |
//! | `real_engines` | frontends with real engines |
//! | `captions` | captions of many clips at once, by whole servers |

#![forbid(unsafe_code)]

mod beside;
mod captions;
mod client;
mod dynamo;
mod footprint;
mod load;
mod machines;
mod measure;
mod memory;
mod origin;
mod ours;
mod picture;
mod pieces;
mod program;
mod real_engines;
mod relay;
mod roles;
mod routers;
mod side;
mod splits;
mod vllm_rs;
mod vllm_serve;
mod words;
mod workload;

use std::cell::RefCell;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use peers::flags::Flags;
use peers::row::{OURS, Row};
use peers::{USAGE, exit_code};

use crate::beside::TextTimes;
use crate::dynamo::Stage;
use crate::footprint::Footprint;
use crate::measure::CaseResults;
use crate::ours::BASELINE;
use crate::picture::Format;
use crate::side::{Inputs, Side, Versioned};
use crate::vllm_serve::VllmServe;
use crate::workload::{Case, Pace, Rate, Workload};

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    exit_code(runtime.map_err(Into::into).and_then(|runtime| {
        runtime.block_on(async {
            // The programs that were started end when `run` is dropped, and so does the link to
            // another machine.
            tokio::select! {
                result = run() => result,
                signal = wait_for_signal() => signal,
            }
        })
    }))
}

/// Waits for SIGTERM or Ctrl-C, and then returns an error.
async fn wait_for_signal() -> Result<(), Box<dyn Error>> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        interrupt = tokio::signal::ctrl_c() => interrupt?,
    }
    Err("ended by a signal".into())
}

async fn run() -> Result<(), Box<dyn Error>> {
    let (command, flags) = Flags::parse_arguments()?;
    let listen = || flags.parse("--listen");
    match &*command {
        "relay" => return relay::serve(listen()?, flags.get("--engine")?).await,
        "relay-source" => {
            let rate = flags.parse("--rate")?;
            return relay::send(flags.get("--relay")?, rate, flags.get("--step-log")?).await;
        }
        "echo" => return machines::echo(listen()?, &flags.path("--certificates")?).await,
        "pass" => {
            return roles::pass([flags.parse("--outputs")?, flags.parse("--requests")?]).await;
        }
        "sink" => return machines::sink(listen()?),
        "upstream" => return routers::serve(&flags).await,
        _ => {}
    }
    let scratch = tempfile::tempdir()?;
    let scratch_dir = scratch.path().to_owned();
    if command == "captions" {
        return captions::run(&flags, scratch_dir).await;
    }
    let rounds = flags.parse("--rounds")?;
    if command == "serve" {
        return real_engines::run(&flags, scratch_dir, rounds).await;
    }
    let model = flags.path("--model")?;
    let mut workload = Workload::new(&flags.path("--pictures")?, &flags.path("--burst")?, &model)?;
    let chiasm = flags.path("--chiasm")?;
    let inputs = Inputs { chiasm, model, scratch: scratch_dir, call: workload.call() };
    let workload = RefCell::new(workload);
    let versioned = |program: &str, version: &str| -> Result<Versioned, Box<dyn Error>> {
        Ok((flags.path(program)?, flags.get(version)?.to_owned()))
    };
    let dynamo = || versioned("--python", "--dynamo");
    match &*command {
        "run" | "streams" => {
            let mut peers = None;
            if flags.find("--vllm-rs").is_some() {
                peers = Some((versioned("--vllm-rs", "--vllm")?, dynamo()?));
            }
            let frontends = Frontends {
                engines: flags.parse("--engines")?,
                baseline: flags.find("--baseline").map(PathBuf::from),
                peers,
                libraries: flags.find("--libraries"),
                vllm_serve: VllmServe::from_flags(&flags)?,
            };
            frontends.run(&inputs, command == "streams", rounds, &workload).await
        }
        "machines" => {
            machines::run(&inputs, &dynamo()?, &flags.path("--etcd")?, rounds, &workload).await
        }
        "roles" => roles::run(&inputs, &dynamo()?, rounds, &workload).await,
        "routers" => routers::run(&inputs, &dynamo()?, &flags, rounds, &workload).await,
        _ => Err(USAGE.into()),
    }
}

/// The frontends of `door run` and `door streams`.
struct Frontends<'a> {
    /// The number of engines of `chiasm` and of its baseline, in cases in which engines do not
    /// wait.
    engines: usize,
    /// The binary of another commit.
    baseline: Option<PathBuf>,
    /// `vllm-rs` and a Python with Dynamo.
    peers: Option<(Versioned, Versioned)>,
    /// The folder of libturbojpeg, for `vllm-rs`.
    libraries: Option<&'a str>,
    /// vLLM's own frontend, for bursts.
    vllm_serve: Option<VllmServe>,
}

impl Frontends<'_> {
    /// Measures all cases and prints the rows.
    async fn run(
        &self,
        inputs: &Inputs,
        has_streams: bool,
        rounds: usize,
        workload: &RefCell<Workload>,
    ) -> Result<(), Box<dyn Error>> {
        Row::for_run("rounds", rounds, OURS).print()?;
        let mut paces = [Pace::Calls(Rate::Hundred), Pace::Calls(Rate::TwentyFive)];
        if !has_streams {
            paces = [Pace::Unbounded, Pace::Steps];
            let row = Row::for_run("engines of chiasm", self.engines, OURS);
            Row { unit: "engines", peer: f64::NAN, ..row }.print()?;
        }
        for pace in paces {
            let mut sides = self.start(inputs, pace, &workload.borrow())?;
            for side in &mut sides {
                side.wait(workload).await?;
            }
            let cases: Vec<_> =
                Case::with_pace(pace).into_iter().map(|case| (case, case.spec().clients)).collect();
            let mut texts = vec![Format::ALL.map(|_| TextTimes::default()); sides.len()];
            let results =
                measure::measure(&mut sides, 0, &cases, rounds, workload, async |sides, _| {
                    for (side, texts) in sides.iter().zip(&mut texts) {
                        if pace != Pace::Unbounded || !takes_bursts(side) {
                            continue;
                        }
                        for (format, texts) in Format::ALL.into_iter().zip(texts) {
                            texts.measure(side, workload, format).await?;
                        }
                    }
                    Ok(())
                });
            let (results, lengths) = results.await?;
            lengths.iter().try_for_each(Row::print)?;
            for results in &results {
                print_rows(results, &sides)?;
                results.burst_limit(0).iter().try_for_each(Row::print)?;
            }
            if pace == Pace::Unbounded {
                print_texts(&sides, &texts)?;
            }
        }
        if has_streams {
            self.measure_footprints(inputs, rounds.min(footprint::MAX_ROUNDS), workload).await?;
        }
        Ok(())
    }

    /// Measures start and memory of each frontend alone.
    async fn measure_footprints(
        &self,
        inputs: &Inputs,
        rounds: usize,
        workload: &RefCell<Workload>,
    ) -> Result<(), Box<dyn Error>> {
        let pace = Pace::Calls(Rate::TwentyFive);
        type Start<'a> = Box<dyn Fn(&Workload) -> Result<Side, Box<dyn Error>> + 'a>;
        let mut starts: Vec<Start<'_>> = vec![Box::new(|workload| {
            ours::start(inputs, None, self.engines, pace, workload.origin())
        })];
        if let Some((vllm_rs, dynamo)) = &self.peers {
            starts.push(Box::new(|workload| {
                vllm_rs::start(inputs, vllm_rs, self.libraries, pace, workload.origin())
            }));
            starts.push(Box::new(|workload| {
                dynamo::start(inputs, dynamo, pace, workload.origin(), None, &[Stage::All])
            }));
        }
        let mut footprints: Vec<(String, Footprint)> = Vec::new();
        for _ in 0..rounds {
            for (number, start) in starts.iter().enumerate() {
                let side = start(&workload.borrow())?;
                if footprints.len() == number {
                    footprints.push((side.name.clone(), Footprint::default()));
                }
                footprints[number].1.measure(side, workload).await?;
            }
        }
        let [(_, ours), peers @ ..] = &*footprints else { return Ok(()) };
        let peers = peers.iter().map(|(name, footprint)| (&**name, footprint));
        ours.rows(peers).iter().try_for_each(Row::print)
    }

    fn start(
        &self,
        inputs: &Inputs,
        pace: Pace,
        workload: &Workload,
    ) -> Result<Vec<Side>, Box<dyn Error>> {
        let origin = workload.origin();
        let mut sides = vec![ours::start(inputs, None, self.engines, pace, origin)?];
        if let Some(baseline) = &self.baseline {
            sides.push(ours::start(inputs, Some(baseline), self.engines, pace, origin)?);
        }
        if let Some(rate) = pace.steps_per_second().filter(|_| pace.has_long_answers()) {
            sides.push(relay::start(inputs, rate)?);
        }
        if let Some((vllm_rs, dynamo)) = &self.peers {
            sides.push(vllm_rs::start(inputs, vllm_rs, self.libraries, pace, origin)?);
            // The mocker can't make steps at this pace.
            if pace != Pace::Steps {
                sides.push(dynamo::start(inputs, dynamo, pace, origin, None, &[Stage::All])?);
            }
        }
        if let Some(vllm) = self.vllm_serve.as_ref().filter(|_| pace == Pace::Unbounded) {
            sides.push(vllm_serve::start(inputs, vllm, pace, origin)?);
        }
        Ok(sides)
    }
}

/// Prints the rows of texts beside bursts. `texts` has the times of each side by format.
fn print_texts(sides: &[Side], texts: &[[TextTimes; 2]]) -> Result<(), Box<dyn Error>> {
    for (number, format) in Format::ALL.into_iter().enumerate() {
        let peers = sides.iter().zip(texts).skip(1);
        let peers = peers.filter(|(side, _)| takes_bursts(side));
        let peers = peers.map(|(side, texts)| (&*side.name, &texts[number]));
        texts[0][number].rows(format, peers).iter().try_for_each(Row::print)?;
    }
    Ok(())
}

/// Returns `true` for a side that processes images, as bursts need.
fn takes_bursts(side: &Side) -> bool {
    side.supports(Case::Burst(Format::Png))
}

/// Prints the rows of a case with all sides. Our side is the first one.
fn print_rows(results: &CaseResults, sides: &[Side]) -> Result<(), Box<dyn Error>> {
    let is_long = matches!(results.case, Case::Long(..));
    let noun = if is_long { "stream" } else { "client" };
    let name = results.name_with(results.case.name(), noun);
    for (peer, side) in sides.iter().enumerate().skip(1) {
        for row in results.rows(&name, [0, peer], &side.name) {
            let ratio = match (&*side.name, row.metric) {
                (BASELINE, "CPU per request" | "CPU per output token") => {
                    results.cpu_share(0, peer)
                }
                // The relay is a limit.
                ("null relay", "engine to client p99") => row.ours / row.peer,
                _ => row.ratio,
            };
            if !row.peer.is_nan() {
                Row { ratio, ..row }.print()?;
            }
        }
    }
    Ok(())
}
