//! Frontends under the same load, in turns: the measuring half of `cargo xtask bench-peers` for
//! `door`, `stream`, `machines`, `roles` and `upstream`. Its commands and flags are in
//! `bench/peers/README.md`; it prints [`Measurement`]s.
//!
//! | file | is |
//! |---|---|
//! | `workload` | the cases, and the requests of each |
//! | `words` | texts, no two alike |
//! | `origin` | the server that images are fetched from |
//! | `client`, `load` | a connection, many at once |
//! | `program` | another program: its start, its CPU time, its end |
//! | `side`, `splits` | what all sides have in common; whether two engines had a request |
//! | `ours`, `vllm_rs`, `dynamo` | the sides |
//! | `relay` | a frontend that does nothing, and what stands for its engine |
//! | `measure` | in which order what is asked, and what comes of it |
//! | `machines` | the same, where an agent is between frontend and engine |
//! | `roles` | the same, where one engine computes prompts and another one answers |
//! | `routers` | the same, before servers of models that somebody else runs |

#![forbid(unsafe_code)]

mod client;
mod dynamo;
mod load;
mod machines;
mod measure;
mod origin;
mod ours;
mod program;
mod relay;
mod roles;
mod routers;
mod side;
mod splits;
mod vllm_rs;
mod words;
mod workload;

use std::cell::RefCell;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use peers::arguments::Flags;
use peers::ending;
use serde::Serialize;

use crate::dynamo::{Discovery, Stage};
use crate::ours::{BASELINE, OURS};
use crate::side::{Inputs, Peers, Side};
use crate::workload::{Case, Pace, Rate, Workload};

const USAGE: &str = "usage: see bench/peers/README.md";

/// One side's result for one case.
#[derive(Serialize)]
struct Measurement<'a> {
    /// Name of the case, such as `1k-token text`.
    case: &'static str,
    /// Number of clients that asked at once; none for a value that does not depend on it.
    clients: Option<usize>,
    /// `chiasm`, `chiasm (baseline)`, or a peer's name and version.
    side: &'a str,
    /// See `measure`.
    metric: &'static str,
    value: f64,
}

/// Prints a result.
fn print(
    case: Case,
    clients: Option<usize>,
    side: &str,
    metric: &'static str,
    value: f64,
) -> Result<(), Box<dyn Error>> {
    Measurement { case: case.name(), clients, side, metric, value }.print()
}

impl Measurement<'_> {
    fn print(&self) -> Result<(), Box<dyn Error>> {
        println!("{}", serde_json::to_string(self)?);
        Ok(())
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // What was started ends when this is dropped, and so does the link to another machine.
    ending::run(run(&arguments))
}

async fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let (command, flags) = arguments.split_first().ok_or(USAGE)?;
    let flags = Flags::new(flags);
    match command.as_str() {
        "relay" => return relay::relay(flags.parse("--listen")?, flags.get("--engine")?).await,
        "beat" => return relay::beat(flags.get("--relay")?, flags.parse("--rate")?, flags.get("--step-log")?).await,
        "echo" => return machines::echo(flags.parse("--listen")?, &flags.path("--certificates")?).await,
        "pass" => return roles::pass([flags.parse("--outputs")?, flags.parse("--requests")?]).await,
        "sink" => return machines::sink(flags.parse("--listen")?),
        "upstream" => {
            let rate = flags.find("--prefill-rate").map(str::parse).transpose()?;
            let events = [flags.parse("--events")?, flags.parse("--replay")?];
            return routers::serve(flags.parse("--listen")?, flags.parse("--blocks")?, rate, events).await;
        }
        _ => {}
    }
    let model = flags.path("--model")?;
    let workload = RefCell::new(Workload::new(&flags.path("--pictures")?, &model)?);
    let rounds = flags.parse("--rounds")?;
    let dynamo = || Ok::<_, Box<dyn Error>>((flags.path("--python")?, flags.get("--dynamo")?.to_owned()));
    let scratch = tempfile::tempdir()?;
    let alone = Inputs {
        chiasm: flags.path("--chiasm")?,
        engines: 1,
        baseline: None,
        peers: None,
        model,
        scratch: scratch.path().into(),
        call: workload.borrow_mut().call(),
    };
    match command.as_str() {
        "run" | "streams" => {
            let paces = match command.as_str() {
                "run" => [Pace::Unbounded, Pace::Steps],
                _ => [Pace::Calls(Rate::Hundred), Pace::Calls(Rate::TwentyFive)],
            };
            let mut peers = None;
            if flags.find("--vllm-rs").or(flags.find("--dynamo")).is_some() {
                peers = Some(Peers {
                    vllm_rs: (flags.path("--vllm-rs")?, flags.get("--vllm")?.to_owned()),
                    libraries: flags.find("--libraries").map(PathBuf::from),
                    dynamo: dynamo()?,
                });
            }
            let engines = flags.parse("--engines")?;
            let inputs = Inputs { engines, baseline: flags.find("--baseline").map(PathBuf::from), peers, ..alone };
            for pace in paces {
                all(&inputs, pace, rounds, &workload).await?;
            }
            Ok(())
        }
        "machines" => machines::run(&alone, &dynamo()?, &flags.path("--etcd")?, rounds, &workload).await,
        "roles" => roles::run(&alone, &dynamo()?, rounds, &workload).await,
        "routers" => {
            let versioned = |name| {
                let (program, version) = flags.get(name)?.rsplit_once(',').ok_or(USAGE)?;
                Ok::<_, Box<dyn Error>>((PathBuf::from(program), version.to_owned()))
            };
            let programs = routers::Programs {
                smg: versioned("--smg")?,
                envoy: versioned("--envoy")?,
                nginx: versioned("--nginx")?,
                dynamo: dynamo()?,
            };
            routers::run(&alone, &programs, rounds, flags.parse("--conversations")?, &workload).await
        }
        _ => Err(USAGE.into()),
    }
}

/// Measures all cases of a pace, with sides started for it.
async fn all(inputs: &Inputs, pace: Pace, rounds: usize, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
    let mut sides = start(inputs, pace, workload)?;
    for side in &mut sides {
        side.wait(workload).await?;
    }
    let cases: Vec<_> = Case::at(pace).into_iter().map(|case| (case, case.clients())).collect();
    let outcomes = measure::measure(&mut sides, 0, &cases, rounds, workload, async |_, _| Ok(())).await?;
    let Some(baseline) = sides.iter().position(|side| side.name == BASELINE) else { return Ok(()) };
    for (&(number, clients, _), of_baseline) in outcomes.iter().filter(|((_, _, side), _)| *side == baseline) {
        let case = cases[number].0;
        // Ours is the first side, and takes part in all cases.
        let share = measure::share(case, &outcomes[&(number, clients, 0)], of_baseline, rounds);
        print(case, Some(clients), BASELINE, "our share of its CPU time", share)?;
    }
    Ok(())
}

fn start(inputs: &Inputs, pace: Pace, workload: &RefCell<Workload>) -> Result<Vec<Side>, Box<dyn Error>> {
    let workload = workload.borrow();
    let origin = workload.origin();
    let mut sides = vec![ours::start(inputs, (OURS, &inputs.chiasm), pace, origin)?];
    if let Some(baseline) = &inputs.baseline {
        sides.push(ours::start(inputs, (BASELINE, baseline), pace, origin)?);
    }
    if let Pace::Calls(rate) = pace {
        sides.push(relay::start(inputs, rate)?);
    }
    if let Some(peers) = &inputs.peers {
        sides.push(vllm_rs::start(inputs, peers, pace, origin)?);
        if pace != Pace::Steps {
            sides.push(dynamo::start(inputs, &peers.dynamo, pace, origin, Discovery::Files, &[Stage::All])?);
        }
    }
    Ok(sides)
}
