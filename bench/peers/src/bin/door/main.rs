//! Frontends under the same load, in turns: the measuring half of `cargo xtask bench-peers door` and of `bench-peers stream`, which
//! build this program and turn what it prints into rows.
//!
//! ```text
//! door run --chiasm PROGRAM --engines N --model DIR --pictures DIR --rounds N
//!          [--vllm-rs PROGRAM --vllm VERSION --python PROGRAM --dynamo VERSION [--libraries DIR]] [--baseline PROGRAM]
//! ```
//!
//! prints one JSON object per result: see [`Measurement`]. Sides are `chiasm`, the peers if they are given, and another build of
//! `chiasm` if it is. `door streams` has the same flags and measures long streams.
//!
//! ```text
//! door load --address HOST:PORT --case NUMBER --clients N --seconds N --model DIR --pictures DIR
//! ```
//!
//! asks a frontend that somebody else has started, for a profile.
//!
//! ```text
//! door machines --chiasm PROGRAM --model DIR --pictures DIR --rounds N --python PROGRAM --dynamo VERSION --etcd PROGRAM
//! ```
//!
//! measures what an agent between frontend and engines costs, for `bench-peers machines`.
//!
//! ```text
//! door roles --chiasm PROGRAM --model DIR --pictures DIR --rounds N --python PROGRAM --dynamo VERSION
//! ```
//!
//! measures what it costs that one engine computes a prompt and another one answers, for `bench-peers roles`.
//!
//! ```text
//! door routers --chiasm PROGRAM --model DIR --pictures DIR --rounds N --conversations N --python PROGRAM --dynamo VERSION
//!              --smg PROGRAM,VERSION --envoy PROGRAM,VERSION --nginx PROGRAM,VERSION
//! ```
//!
//! measures what routers cost before the same upstreams, and what these find in their caches, for `bench-peers upstream`.
//!
//! | file | is |
//! |---|---|
//! | `workload` | the cases, and the requests of each |
//! | `picture`, `words` | JPEG files and texts, no two alike |
//! | `origin` | the server that images are fetched from |
//! | `body`, `client`, `load` | a request's body, a connection, many at once |
//! | `program` | another program: its start, its CPU time, its end |
//! | `side`, `splits` | what all sides have in common; whether two engines had a request |
//! | `ours`, `vllm_rs`, `dynamo` | the sides |
//! | `relay` | a frontend that does nothing, and what stands for its engine |
//! | `measure` | in which order what is asked, and what comes of it |
//! | `machines` | the same, where an agent is between frontend and engine |
//! | `roles` | the same, where one engine computes prompts and another one answers |
//! | `routers` | the same, before servers of models that somebody else runs |

#![forbid(unsafe_code)]

mod body;
mod client;
mod dynamo;
mod load;
mod machines;
mod measure;
mod origin;
mod ours;
mod picture;
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
use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use crate::dynamo::{Discovery, Stage};
use crate::ours::{BASELINE, OURS};
use crate::side::{Inputs, Peers, Side};
use crate::workload::{Case, Pace, Rate, Workload};

const USAGE: &str = "usage: see the head of bench/peers/src/bin/door/main.rs";

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

impl Measurement<'_> {
    fn print(&self) -> Result<(), Box<dyn Error>> {
        println!("{}", serde_json::to_string(self)?);
        Ok(())
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(Into::into).and_then(|runtime| {
        runtime.block_on(async {
            // What was started ends when this is dropped, and so does the link to another machine.
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

/// Returns when this process is to end.
async fn ended_by_signal() -> Result<(), Box<dyn Error>> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => {}
        pressed = tokio::signal::ctrl_c() => pressed?,
    }
    Err("ended by a signal".into())
}

async fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let (command, flags) = arguments.split_first().ok_or(USAGE)?;
    let flags: BTreeMap<&str, &str> = flags.chunks(2).filter_map(|pair| Some((&*pair[0], &**pair.get(1)?))).collect();
    let flag = |name: &str| flags.get(name).copied().ok_or_else(|| format!("{name} is missing"));
    match command.as_str() {
        "relay" => return relay::relay(flag("--listen")?.parse()?, flag("--engine")?).await,
        "beat" => return relay::beat(flag("--relay")?, flag("--rate")?.parse()?, flag("--step-log")?).await,
        "echo" => return machines::echo(flag("--listen")?.parse()?, Path::new(flag("--certificates")?)).await,
        "pass" => return roles::pass([flag("--outputs")?.parse()?, flag("--requests")?.parse()?]).await,
        "sink" => return machines::sink(flag("--listen")?.parse()?),
        "upstream" => {
            let events = flags.get("--events").zip(flags.get("--replay"));
            let events = events.map(|(events, replay)| Ok::<_, Box<dyn Error>>([events.parse()?, replay.parse()?]));
            let rate = flags.get("--prefill-rate").map(|rate| rate.parse()).transpose()?;
            return routers::serve(flag("--listen")?.parse()?, flag("--blocks")?.parse()?, rate, events.transpose()?)
                .await;
        }
        _ => {}
    }
    let model = Path::new(flag("--model")?);
    let workload = RefCell::new(Workload::new(Path::new(flag("--pictures")?), model)?);
    let rounds = || Ok::<usize, Box<dyn Error>>(flag("--rounds")?.parse()?);
    let alone = |scratch: &Path| {
        Ok::<_, Box<dyn Error>>(Inputs {
            chiasm: flag("--chiasm")?.into(),
            engines: 1,
            baseline: None,
            peers: None,
            model: model.into(),
            scratch: scratch.into(),
            call: workload.borrow_mut().call(),
        })
    };
    let dynamo = || Ok::<_, Box<dyn Error>>((PathBuf::from(flag("--python")?), flag("--dynamo")?.to_owned()));
    match command.as_str() {
        "run" | "streams" => {
            let paces = match command.as_str() {
                "run" => [Pace::Unbounded, Pace::Steps],
                _ => [Pace::Calls(Rate::Hundred), Pace::Calls(Rate::TwentyFive)],
            };
            let scratch = tempfile::tempdir()?;
            let peers = match flags.contains_key("--vllm-rs") || flags.contains_key("--dynamo") {
                true => Some(Peers {
                    vllm_rs: (flag("--vllm-rs")?.into(), flag("--vllm")?.to_owned()),
                    libraries: flags.get("--libraries").map(PathBuf::from),
                    dynamo: dynamo()?,
                }),
                false => None,
            };
            let inputs = Inputs {
                chiasm: flag("--chiasm")?.into(),
                engines: flag("--engines")?.parse()?,
                baseline: flags.get("--baseline").map(PathBuf::from),
                peers,
                model: model.into(),
                scratch: scratch.path().into(),
                call: workload.borrow_mut().call(),
            };
            for pace in paces {
                all(&inputs, pace, rounds()?, &workload).await?;
            }
            Ok(())
        }
        "machines" => {
            let scratch = tempfile::tempdir()?;
            let inputs = alone(scratch.path())?;
            machines::run(&inputs, &dynamo()?, Path::new(flag("--etcd")?), rounds()?, &workload).await
        }
        "roles" => {
            let scratch = tempfile::tempdir()?;
            roles::run(&alone(scratch.path())?, &dynamo()?, rounds()?, &workload).await
        }
        "routers" => {
            let scratch = tempfile::tempdir()?;
            let inputs = alone(scratch.path())?;
            let versioned = |name| {
                let (program, version) = flag(name)?.rsplit_once(',').ok_or(USAGE)?;
                Ok::<_, Box<dyn Error>>((PathBuf::from(program), version.to_owned()))
            };
            let programs = routers::Programs {
                smg: versioned("--smg")?,
                envoy: versioned("--envoy")?,
                nginx: versioned("--nginx")?,
                dynamo: dynamo()?,
            };
            routers::run(&inputs, &programs, rounds()?, flag("--conversations")?.parse()?, &workload).await
        }
        "load" => {
            let address = flag("--address")?.parse()?;
            let case = Case::ALL.get(flag("--case")?.parse::<usize>()?).copied().ok_or("--case is 0 to 6")?;
            let time = Duration::from_secs(flag("--seconds")?.parse()?);
            let url = workload.borrow().origin().url();
            let answered =
                load::ask(address, &workload, (case, &url), flag("--clients")?.parse()?, time, &(1..=u64::MAX)).await?;
            eprintln!("{} requests of '{}'", answered.latencies.len(), case.name());
            Ok(())
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
    let cases = Case::at(pace);
    measure::calibrate(&sides[0], workload).await?;
    let mut values = measure::compare(&sides, &cases, workload).await?;
    values.extend(measure::measure(&mut sides, &cases, workload, rounds).await?);
    for value in values {
        let side = &sides[value.side].name;
        let (case, metric) = (value.case.name(), value.metric);
        Measurement { case, clients: value.clients, side, metric, value: value.value }.print()?;
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
