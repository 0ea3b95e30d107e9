//! The cost of an agent between a frontend and its engine: CPU time, latency and bytes. One
//! frontend has its own engine, one an agent on loopback, and one an agent behind a shaped link.
//!
//! | file | contents |
//! |---|---|
//! | `machine` | the machine of an agent: this one, or a namespace behind a link of 10 Gbit/s |
//! | `certificates` | an authority and a certificate that it signed |
//! | `sides` | frontend, agent and engine |
//! | `echo` | an empty gRPC call: the limit for the latency of a hop |
//! | `transfer` | plain bytes over TCP: the limit for tensors on the network |
//! | `wire` | a count of the bytes between frontend and agent |

mod certificates;
mod echo;
mod machine;
mod sides;
mod transfer;
mod wire;

use std::cell::RefCell;
use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use peers::numbers::median;
use peers::row::{Metric, Row, less, neutral};

use crate::client::{Connection, get};
use crate::dynamo::{self, Stage};
use crate::load::Outcome;
use crate::measure::{self, CaseResults};
use crate::ours;
use crate::side::{Inputs, Side, Versioned};
use crate::workload::{Case, Output, Pace, Rate, Workload};

pub(crate) use echo::serve as echo;
pub(crate) use transfer::sink;

use certificates::Certificates;
use echo::Echo;
use machine::Machine;
use sides::{FILES, TENSORS};
use transfer::Transfer;
use wire::Wire;

/// The side whose frontend has attached its engine itself.
const LOCAL: &str = "local engine";
const NEW_IMAGE: Case = Case::Distinct;
/// The cases with unbounded engines: one client shows the latency, 16 the CPU time of a busy
/// process.
const REQUESTS: [(Case, &[usize]); 4] = [
    (Case::Text, &[1, 16]),
    (Case::RepeatedInline, &[1, 16]),
    (Case::RepeatedUrl, &[1, 16]),
    (NEW_IMAGE, &[1]),
];
/// The case with engines that make 100 steps per second.
const STREAMS: [(Case, &[usize]); 1] = [(Case::Long(Output::Plain, Rate::Hundred), &[64])];

/// The time of empty calls in each round.
const ECHO_TIME: Duration = Duration::from_millis(500);
/// The maximum time that an agent may add to that of an empty call, in µs.
const ADDED_LIMIT_US: f64 = 100.0;
/// The number of transfers of the tensors' bytes in each round.
const TRANSFERS: usize = 10;
/// The number of new images whose bytes are counted.
const COUNTED_IMAGES: usize = 30;
/// The maximum number of bytes that are sent for such an image in addition to its file.
const EXTRA_BYTES_LIMIT: f64 = 2_000.0;
/// The number of new images in each form whose latency is compared.
const COMPARED_IMAGES: usize = 60;
/// The number of new images in each form that are sent before these.
const WARM_UP_IMAGES: usize = 10;
/// A frontend's counter of images sent as tensors.
const SENT_TENSORS: &str = "chiasm_media_sent_items_total{form=\"tensors\"}";
/// The pause after an answered request in which frontend and agent send the rest of their messages.
const SETTLE: Duration = Duration::from_millis(100);

/// Measures everything and prints the rows.
pub(crate) async fn run(
    inputs: &Inputs,
    dynamo: &Versioned,
    etcd: &Path,
    rounds: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    Row::for_run("rounds", rounds, LOCAL).print()?;
    let mut machines = vec![Machine::this()];
    machines.extend(Machine::behind_link()?);
    let hosts = machines.iter().map(|machine| machine.host);
    let certificates = Certificates::new(&inputs.scratch, hosts)?;
    let url = workload.borrow().origin().url();
    let tensors = vec![0; transfer::tensor_bytes(inputs, &url)?];
    for (pace, cases) in [(Pace::Unbounded, &REQUESTS[..]), (Pace::Calls(Rate::Hundred), &STREAMS)]
    {
        let (mut sides, mut links) =
            start(inputs, &machines, &certificates, pace, workload).await?;
        let dynamo = {
            let workload = workload.borrow();
            dynamo::start(inputs, dynamo, pace, workload.origin(), Some(etcd), &[Stage::All])?
        };
        sides.push(dynamo);
        for side in &mut sides {
            side.wait(workload).await?;
        }
        let results = measure::measure(&mut sides, 0, cases, rounds, workload, async |_, _| {
            for link in &mut links {
                link.measure_limits(&tensors).await?;
            }
            Ok(())
        });
        let (results, lengths) = results.await?;
        for results in &results {
            for (number, link) in links.iter().enumerate() {
                link.print(results, number + 1, &sides)?;
            }
        }
        for row in lengths {
            Row { case: case_name(&row.case).to_owned(), ..row }.print()?;
        }
        if pace == Pace::Unbounded {
            for link in &links {
                link.count_bytes(inputs, &certificates, workload).await?;
                link.compare_forms(inputs, &certificates, workload).await?;
            }
        }
    }
    Ok(())
}

/// Returns the name of a case in rows.
fn case_name(name: &str) -> &str {
    if name == STREAMS[0].0.name() { "streams of 256 deltas" } else { name }
}

/// Starts our sides: the one with its own engine, then one for each machine.
async fn start(
    inputs: &Inputs,
    machines: &[Machine],
    certificates: &Certificates,
    pace: Pace,
    workload: &RefCell<Workload>,
) -> Result<(Vec<Side>, Vec<Link>), Box<dyn Error>> {
    let mut sides = Vec::new();
    let mut agents = Vec::new();
    {
        let workload = workload.borrow();
        let local = ours::start(inputs, None, 1, pace, workload.origin())?;
        sides.push(Side { name: LOCAL.to_owned(), ..local });
        for machine in machines {
            let (side, agent) =
                sides::start(inputs, machine, certificates, pace, workload.origin())?;
            sides.push(side);
            agents.push(agent);
        }
    }
    let mut links = Vec::new();
    for (machine, agent) in machines.iter().zip(agents) {
        links.push(Link {
            name: machine.link,
            agent,
            echo: Echo::start(inputs, machine, certificates).await?,
            transfer: Transfer::start(inputs, machine)?,
            echo_ms: Vec::new(),
            transfer_ms: Vec::new(),
        });
    }
    Ok((sides, links))
}

/// The way to an agent, with limits that are measured in each round.
struct Link {
    name: &'static str,
    agent: SocketAddr,
    echo: Echo,
    transfer: Transfer,
    /// The medians of the rounds' empty calls and transfers.
    echo_ms: Vec<f64>,
    transfer_ms: Vec<f64>,
}

impl Link {
    async fn measure_limits(&mut self, tensors: &[u8]) -> Result<(), Box<dyn Error>> {
        self.echo_ms.push(milliseconds(&self.echo.call(ECHO_TIME).await?));
        let times: Result<Vec<Duration>, _> =
            (0..TRANSFERS).map(|_| self.transfer.send(tensors)).collect();
        self.transfer_ms.push(milliseconds(&times?));
        Ok(())
    }

    /// Returns a row of a case on this link.
    fn row(&self, metric: Metric, case: &str, peer: &str, ours: f64, theirs: f64) -> Row {
        metric.row(&format!("{case}, {}", self.name), peer, ours, theirs)
    }

    /// Prints the rows of a case. The first side is the one without an agent, the last one is
    /// Dynamo, and `ours` is the side with an agent on this link.
    fn print(
        &self,
        results: &CaseResults,
        ours: usize,
        sides: &[Side],
    ) -> Result<(), Box<dyn Error>> {
        let case = results.case;
        let case_name = results.name_with(case_name(case.name()), "client");
        let name = format!("{case_name}, {}", self.name);
        let dynamo = sides.len() - 1;
        // A local engine is a limit and not a peer.
        let local_ratio = results.cpu_share(ours, 0);
        let dynamo_ratio = results.cpu_share(ours, dynamo).recip();
        let mut rows = Vec::new();
        for (peer, ratio) in [(0, local_ratio), (dynamo, dynamo_ratio)] {
            let peer_name = &sides[peer].name;
            let mut cost = results.cost_rows(&name, [ours, peer], peer_name, ratio);
            let part = |it: &Outcome| 100.0 * it.frontend_cpu.div_duration_f64(it.cpu);
            let part = median(results.outcomes[ours].iter().map(part).collect());
            let metric = neutral("frontend's part of the CPU", "%");
            cost.insert(1, metric.row(&name, peer_name, part, f64::NAN));
            rows.extend(cost);
        }
        let [with_agent, local] = [ours, 0].map(|side| {
            results.outcomes[side].iter().map(|it| p50_ms(case, it)).collect::<Vec<f64>>()
        });
        let pairs = || with_agent.iter().zip(&local);
        let added = 1e3 * median(pairs().map(|(ours, local)| ours - local).collect());
        let echo = 1e3 * median(self.echo_ms.clone());
        // With 16 clients the median mostly shows the wait in the queue.
        if case != NEW_IMAGE && results.clients != 16 {
            let row = less("added p50", "µs").row(&name, "null gRPC echo", added, echo);
            rows.push(Row { ratio: added / (echo + ADDED_LIMIT_US), ..row });
        }
        if case == NEW_IMAGE {
            let peer = "local engine, then bare TCP";
            let transfer = median(self.transfer_ms.clone());
            let multiples = pairs().zip(&self.transfer_ms);
            let multiples = multiples.map(|((ours, local), transfer)| (local + transfer) / ours);
            let latency = |rows: &[Row], peer: &str| {
                let is_latency = |row: &&Row| row.metric == "latency p50" && row.peer_name == peer;
                rows.iter().find(is_latency).map_or([f64::NAN; 2], |row| [row.ours, row.peer])
            };
            let [ours, local] = latency(&rows, LOCAL);
            let row = less("latency p50", "ms").row(&name, peer, ours, local + transfer);
            rows.push(Row { ratio: median(multiples.collect()), ..row });
            let metric = neutral("transfer of the tensors", "ms");
            rows.push(metric.row(&name, peer, f64::NAN, transfer));
        }
        rows.iter().try_for_each(Row::print)
    }

    /// Counts the bytes that new images send over the connections of another frontend to the agent.
    async fn count_bytes(
        &self,
        inputs: &Inputs,
        certificates: &Certificates,
        workload: &RefCell<Workload>,
    ) -> Result<(), Box<dyn Error>> {
        let wire = Wire::to(self.agent).await?;
        let name = format!("agent, {}, counted", self.name);
        let origin = workload.borrow().origin().url();
        let mut side = sides::frontend(inputs, &name, wire.address, FILES, certificates, origin)?;
        side.wait(workload).await?;
        let mut connection = Connection::open(side.address).await?;
        let mut extra = Vec::new();
        let mut returned = Vec::new();
        for _ in 0..COUNTED_IMAGES {
            let before = wire.bytes();
            let body = workload.borrow_mut().next(NEW_IMAGE, "");
            connection.chat(body).await?;
            tokio::time::sleep(SETTLE).await;
            let [sent, received] = [0, 1].map(|way| (wire.bytes()[way] - before[way]) as f64);
            extra.push(sent - workload.borrow().picture_bytes()? as f64);
            returned.push(received);
        }
        let case = format!("{}, 1 client", NEW_IMAGE.name());
        let metric = neutral("bytes to the agent beyond the file", "bytes");
        let row = self.row(metric, &case, "limit", median(extra), EXTRA_BYTES_LIMIT);
        Row { ratio: row.ours / EXTRA_BYTES_LIMIT, ..row }.print()?;
        let metric = neutral("bytes from the agent", "bytes");
        self.row(metric, &case, "limit", median(returned), f64::NAN).print()
    }

    /// Compares new images that two other frontends send to the agent, one as files and one as
    /// tensors.
    async fn compare_forms(
        &self,
        inputs: &Inputs,
        certificates: &Certificates,
        workload: &RefCell<Workload>,
    ) -> Result<(), Box<dyn Error>> {
        let mut sides = Vec::new();
        let mut connections = Vec::new();
        for form in [FILES, TENSORS] {
            let name = format!("agent, {}, {form}", self.name);
            let origin = workload.borrow().origin().url();
            let mut side = sides::frontend(inputs, &name, self.agent, form, certificates, origin)?;
            side.wait(workload).await?;
            connections.push(Connection::open(side.address).await?);
            sides.push(side);
        }
        let mut times = [Vec::new(), Vec::new()];
        for number in 0..WARM_UP_IMAGES + COMPARED_IMAGES {
            for form in [number % 2, 1 - number % 2] {
                let body = workload.borrow_mut().next(NEW_IMAGE, "");
                let start = Instant::now();
                connections[form].chat(body).await?;
                if number >= WARM_UP_IMAGES {
                    times[form].push(start.elapsed());
                }
            }
        }
        for (form, side) in [FILES, TENSORS].into_iter().zip(&sides) {
            let metrics = get(side.address, "/metrics").await?.text;
            let sent = metrics.lines().find_map(|line| line.strip_prefix(SENT_TENSORS));
            let sent: f64 = sent.ok_or("a frontend does not count tensors")?.trim().parse()?;
            let images = WARM_UP_IMAGES + COMPARED_IMAGES;
            let expected = if form == TENSORS { images } else { 0 };
            if sent != expected as f64 {
                let name = &side.name;
                return Err(format!("{name}: {sent} images sent as tensors, not {expected}").into());
            }
        }
        let [files, tensors] = times.map(|times| milliseconds(&times));
        let case = format!("{}, 1 client", NEW_IMAGE.name());
        let metric = less("latency p50", "ms");
        self.row(metric, &case, "tensors in place of files", files, tensors).print()
    }
}

/// Returns the median latency in ms. For streams it is the time from the engine's output to its
/// arrival at the client.
fn p50_ms(case: Case, outcome: &Outcome) -> f64 {
    if case.is_streamed() {
        return median(outcome.delays.iter().map(|&delay| delay as f64 / 1e6).collect());
    }
    milliseconds(&outcome.latencies)
}

/// Returns the median in ms.
fn milliseconds(times: &[Duration]) -> f64 {
    median(times.iter().map(|time| time.as_secs_f64() * 1e3).collect())
}
