//! What an agent between a frontend and its engine costs: in CPU time, in latency, in bytes on the
//! wire. Before engines of the same kind a frontend has an engine of its own, one that an agent on
//! loopback has, one that an agent behind a shaped link has.
//!
//! | file | is |
//! |---|---|
//! | `machine` | where an agent runs: here, or behind a link of 10 Gbit/s |
//! | `certificates` | an authority, and what it has signed |
//! | `sides` | frontend, agent and engine |
//! | `echo` | a call over gRPC that does nothing: the limit for the latency of a hop |
//! | `transfer` | bytes over TCP and nothing else: the limit for tensors that would cross the network |
//! | `wire` | what a frontend and an agent say to each other, counted |

mod certificates;
mod echo;
mod machine;
mod sides;
mod transfer;
mod wire;

use std::cell::RefCell;
use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use peers::numbers::median;

use crate::client::Connection;
use crate::dynamo::{self, Discovery, Stage};
use crate::load::Outcome;
use crate::measure;
use crate::ours::{self, OURS};
use crate::print;
use crate::side::{Inputs, Side};
use crate::workload::{Case, Pace, Rate, Told, Workload};

pub(crate) use echo::serve as echo;
pub(crate) use transfer::sink;

use certificates::Certificates;
use echo::Echo;
use machine::Machine;
use sides::{FILES, TENSORS};
use transfer::Transfer;
use wire::Wire;

/// A frontend that has attached its engine itself.
const LOCAL: &str = "local engine";
const NEW_IMAGE: Case = Case::Distinct;
const STREAMS: Case = Case::Long(Told::Plain, Rate::Hundred);

/// Cases before engines that wait for nothing: one client tells the latency, 16 what a busy process
/// spends.
const REQUESTS: [(Case, &[usize]); 4] =
    [(Case::Text, &[1, 16]), (Case::RepeatedInline, &[1, 16]), (Case::RepeatedUrl, &[1, 16]), (NEW_IMAGE, &[1])];
/// The case before engines that make 100 steps per second.
const ANSWERS: [(Case, &[usize]); 1] = [(STREAMS, &[64])];

/// Time for which the null call is made in each round.
const ECHO_TIME: Duration = Duration::from_millis(500);
/// Times that the bytes of an image's tensors are sent in each round.
const TRANSFERS: usize = 10;
/// New images whose bytes are counted.
const COUNTED_IMAGES: usize = 30;
/// New images that are sent as files and as many that are sent as tensors, and how many of each of
/// them come before what counts.
const COMPARED_IMAGES: usize = 60;
const UNCOUNTED_IMAGES: usize = 10;
/// What a frontend counts the images by that it has sent as tensors.
const SENT_TENSORS: &str = "chiasm_media_sent_items_total{form=\"tensors\"}";
/// How long a frontend and an agent get to say what they have to say of an answered request.
const SETTLE: Duration = Duration::from_millis(100);

/// Measures all of it and prints the results.
pub(crate) async fn run(
    inputs: &Inputs,
    dynamo: &(PathBuf, String),
    etcd: &Path,
    rounds: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    let mut machines = vec![Machine::here()];
    machines.extend(Machine::behind_a_link()?);
    let certificates = Certificates::new(&inputs.scratch, machines.iter().map(|machine| machine.host))?;
    let tensors = vec![0; transfer::tensor_bytes(inputs, &workload.borrow().origin().url())?];
    for (pace, cases) in [(Pace::Unbounded, &REQUESTS[..]), (Pace::Calls(Rate::Hundred), &ANSWERS)] {
        let (mut sides, agents) = start(inputs, &machines, &certificates, pace, workload)?;
        let dynamo = {
            let workload = workload.borrow();
            dynamo::start(inputs, dynamo, pace, workload.origin(), Discovery::Etcd(etcd), &[Stage::All])?
        };
        sides.push(dynamo);
        let mut limits = Vec::new();
        for machine in &machines {
            limits.push(Limits::start(inputs, machine, &certificates).await?);
        }
        for side in &mut sides {
            side.wait(workload).await?;
        }
        measure(&mut sides, &mut limits, cases, &tensors, rounds, workload).await?;
        if pace == Pace::Unbounded {
            for (side, agent) in sides[1..].iter().zip(agents) {
                count_bytes(inputs, &side.name, agent, &certificates, workload).await?;
                compare_forms(inputs, &side.name, agent, &certificates, workload).await?;
            }
        }
    }
    Ok(())
}

/// Starts our sides: the one with its own engine, then one for each machine. Returns them with the
/// agents' addresses.
fn start(
    inputs: &Inputs,
    machines: &[Machine],
    certificates: &Certificates,
    pace: Pace,
    workload: &RefCell<Workload>,
) -> Result<(Vec<Side>, Vec<SocketAddr>), Box<dyn Error>> {
    let workload = workload.borrow();
    let local = ours::start(inputs, (OURS, &inputs.chiasm), pace, workload.origin())?;
    let (mut sides, mut agents) = (vec![Side { name: LOCAL.to_owned(), ..local }], Vec::new());
    for machine in machines {
        let (side, agent) = sides::start(inputs, machine, certificates, pace, workload.origin())?;
        sides.push(side);
        agents.push(agent);
    }
    Ok((sides, agents))
}

/// What is held against the way to a machine, and what each round measured of it.
struct Limits {
    link: &'static str,
    echo: Echo,
    transfer: Transfer,
    /// Medians of the null call, in µs.
    echoes: Vec<f64>,
    /// Medians of the transfer, in ms.
    transfers: Vec<f64>,
}

impl Limits {
    async fn start(inputs: &Inputs, machine: &Machine, certificates: &Certificates) -> Result<Self, Box<dyn Error>> {
        let echo = Echo::start(inputs, machine, certificates).await?;
        let transfer = Transfer::start(inputs, machine)?;
        Ok(Self { link: machine.link, echo, transfer, echoes: Vec::new(), transfers: Vec::new() })
    }

    async fn round(&mut self, tensors: &[u8]) -> Result<(), Box<dyn Error>> {
        self.echoes.push(1e3 * milliseconds(&self.echo.ask(ECHO_TIME).await?));
        let times: Result<Vec<Duration>, _> = (0..TRANSFERS).map(|_| self.transfer.send(tensors)).collect();
        self.transfers.push(milliseconds(&times?));
        Ok(())
    }

    /// What the way to an agent costs a case, in pairs with a local engine and with Dynamo: sides,
    /// metrics and values.
    fn hop(
        &self,
        case: Case,
        side: &str,
        ours: &[Outcome],
        [local, dynamo]: [&[Outcome]; 2],
    ) -> Vec<(String, &'static str, f64)> {
        let rounds = ours.len();
        let pairs = || ours.iter().zip(local).map(|(ours, local)| (p50(case, ours), p50(case, local)));
        let part = |it: &Outcome| 100.0 * it.of_frontend.as_secs_f64() / it.cpu.as_secs_f64();
        let added = pairs().map(|(ours, local)| 1e3 * (ours - local));
        let mut values = vec![
            (side.to_owned(), "CPU in times of the local engine's", measure::share(case, ours, local, rounds)),
            (side.to_owned(), "CPU in times of Dynamo's", measure::share(case, ours, dynamo, rounds)),
            (side.to_owned(), "frontend's part of the CPU", median(ours.iter().map(part).collect())),
            (side.to_owned(), "added p50", median(added.collect())),
            (format!("null gRPC echo, {}", self.link), "call p50", median(self.echoes.clone())),
        ];
        if case == NEW_IMAGE {
            let times = pairs().zip(&self.transfers).map(|((ours, local), transfer)| (local + transfer) / ours);
            let bare = format!("bare TCP, {}", self.link);
            values.extend([
                (side.to_owned(), "local engine and bare transfer in times of this", median(times.collect())),
                (bare, "transfer of the tensors", median(self.transfers.clone())),
            ]);
        }
        values
    }
}

/// Asks all sides in turns and prints what came of it. The first side is the one without an agent,
/// then come those with one, in the order of `limits`, then Dynamo.
async fn measure(
    sides: &mut [Side],
    limits: &mut [Limits],
    cases: &[(Case, &[usize])],
    tensors: &[u8],
    rounds: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    let outcomes = measure::measure(sides, 0, cases, rounds, workload, async |_, _| {
        for limits in &mut *limits {
            limits.round(tensors).await?;
        }
        Ok(())
    });
    let outcomes = outcomes.await?;
    for (&(number, clients, index), of_side) in &outcomes {
        let case = cases[number].0;
        if let Some(limits) = index.checked_sub(1).and_then(|index| limits.get(index)) {
            let others = [0, sides.len() - 1].map(|other| &*outcomes[&(number, clients, other)]);
            for (side, metric, value) in limits.hop(case, &sides[index].name, of_side, others) {
                print(case, Some(clients), &side, metric, value)?;
            }
        }
    }
    Ok(())
}

/// The median latency of an outcome in ms. That of streams is counted from when the engine has its
/// outputs ready until the client has read the event.
fn p50(case: Case, outcome: &Outcome) -> f64 {
    match case.is_streamed() {
        true => median(outcome.delays.iter().map(|&delay| delay as f64 / 1e6).collect()),
        false => milliseconds(&outcome.answered.latencies),
    }
}

/// The median.
fn milliseconds(times: &[Duration]) -> f64 {
    median(times.iter().map(|time| time.as_secs_f64() * 1e3).collect())
}

/// Counts and prints what new images send over the connections of another frontend to the agent of
/// a side.
async fn count_bytes(
    inputs: &Inputs,
    name: &str,
    agent: SocketAddr,
    certificates: &Certificates,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    let wire = Wire::to(agent).await?;
    let mut side = sides::frontend(
        inputs,
        &format!("{name}, counted"),
        wire.address,
        FILES,
        certificates,
        workload.borrow().origin(),
    )?;
    side.wait(workload).await?;
    let mut connection = Connection::open(side.address).await?;
    let [mut beyond, mut back] = [Vec::new(), Vec::new()];
    for _ in 0..COUNTED_IMAGES {
        let before = wire.bytes();
        let body = workload.borrow_mut().next(NEW_IMAGE, "");
        connection.chat(body).await?;
        tokio::time::sleep(SETTLE).await;
        let [to, from] = [0, 1].map(|way| (wire.bytes()[way] - before[way]) as f64);
        beyond.push(to - workload.borrow().picture_bytes()? as f64);
        back.push(from);
    }
    print(NEW_IMAGE, Some(1), name, "bytes to the agent beyond the file", median(beyond))?;
    print(NEW_IMAGE, Some(1), name, "bytes from the agent", median(back))
}

/// Times and prints new images that two other frontends send to the agent of a side, one as files
/// and one as tensors.
async fn compare_forms(
    inputs: &Inputs,
    name: &str,
    agent: SocketAddr,
    certificates: &Certificates,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    let (mut sides, mut connections) = (Vec::new(), Vec::new());
    for form in [FILES, TENSORS] {
        let side_name = format!("{name}, {form}");
        let mut side = sides::frontend(inputs, &side_name, agent, form, certificates, workload.borrow().origin())?;
        side.wait(workload).await?;
        connections.push(Connection::open(side.address).await?);
        sides.push(side);
    }
    let mut times = [Vec::new(), Vec::new()];
    for number in 0..UNCOUNTED_IMAGES + COMPARED_IMAGES {
        for form in [number % 2, 1 - number % 2] {
            let body = workload.borrow_mut().next(NEW_IMAGE, "");
            let begun = Instant::now();
            connections[form].chat(body).await?;
            if number >= UNCOUNTED_IMAGES {
                times[form].push(begun.elapsed());
            }
        }
    }
    // Each as it was to go, or nothing was compared.
    for (form, connection) in [FILES, TENSORS].into_iter().zip(&mut connections) {
        let (_, metrics) = connection.get("/metrics").await?;
        let sent = metrics.lines().find_map(|line| line.strip_prefix(SENT_TENSORS));
        let sent: f64 = sent.ok_or("a frontend does not count tensors")?.trim().parse()?;
        let expected = if form == TENSORS { UNCOUNTED_IMAGES + COMPARED_IMAGES } else { 0 };
        if sent != expected as f64 {
            return Err(format!("{name}, {form}: {sent} images were sent as tensors, not {expected}").into());
        }
    }
    let [files, tensors] = times.map(|times| milliseconds(&times));
    print(NEW_IMAGE, Some(1), name, "latency p50 with files", files)?;
    print(NEW_IMAGE, Some(1), name, "latency p50 with tensors", tensors)
}
